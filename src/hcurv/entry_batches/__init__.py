"""Many blocks of equal size at once, without a Python step for each."""

from hcurv.entry_batches.evaluate import blocks, resolve_blocks

__all__ = ["blocks", "resolve_blocks"]
