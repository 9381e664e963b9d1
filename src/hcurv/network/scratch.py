"""Memory for temporary tensors that is used again and again."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Lends tensors from one piece of memory and takes them all back at once.

    Loops over points and pairs make many temporaries of the same size. Fresh memory pages for
    each of them would cost more time than the arithmetic.

    Args:
        like: a tensor with the type and device of the temporaries.
        spare: floats that the borrower may allocate in addition.
    """

    def __init__(self, like: Tensor, spare: int = 0) -> None:
        self.spare = spare
        self._memory = like.new_empty(0)
        self._used = 0

    def reset(self, size: int) -> None:
        """Take everything back, and make room for ``size`` floats."""
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        self._used = 0

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Lend an uninitialised tensor; it is allocated afresh where the memory is used up."""
        start, size = self._used, torch.Size(shape).numel()
        if start + size > self._memory.numel():
            return self._memory.new_empty(shape)
        self._used += size
        return self._memory[start : self._used].view(shape)

    def select(self, values: Tensor, index: Tensor) -> Tensor:
        """Lend a copy of ``values[index]``."""
        shape = (index.numel(), *values.shape[1:])
        return torch.index_select(values, 0, index, out=self.take(shape))
