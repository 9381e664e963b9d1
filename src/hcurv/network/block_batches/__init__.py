"""Many blocks of equal size at once, without a Python step for each."""

from hcurv.network.block_batches.many_blocks import blocks, resolve_blocks

__all__ = ["blocks", "resolve_blocks"]
