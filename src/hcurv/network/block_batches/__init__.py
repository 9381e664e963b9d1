"""Many blocks of equal size at once, without a Python step for each."""

from hcurv.network.block_batches.many_blocks import blocks

__all__ = ["blocks"]
