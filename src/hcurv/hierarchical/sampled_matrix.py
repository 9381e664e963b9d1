"""Random products with a matrix, and a global part made of them: what plans are estimated from."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from hcurv.hierarchical.sketch import random_products
from hcurv.memory import require_bytes
from hcurv.nystrom import nystrom_of_sketch, orthonormal
from hcurv.operators import EntrySource

__all__ = ["SampledMatrix"]

_SKETCH_FLOATS = 2**30  # of the largest


class SampledMatrix:
    """Some rows and columns of a matrix, known by products.

    Args:
        source: the matrix, with a product.
        rows: of it; vectors are in this order.
        seed: of the random vectors.

    Attributes:
        rows: as given.
        sample: random vectors, (rows + 1, s), the last row zero, and their products, to estimate
            with.
        sketch: others, to make the global part of.
        factor: V of the global part, (rows, g), orthogonal columns in the order of eigenvalues.
        seconds: what samples and global parts have taken.
    """

    def __init__(self, source: EntrySource, rows: Tensor, seed: int) -> None:
        self._source, self.rows = source, rows
        self._generator = torch.Generator(source.device).manual_seed(seed)
        none = torch.zeros(rows.numel() + 1, 0, dtype=source.dtype, device=source.device)
        self.sample = self.sketch = (none, none)
        self.factor = none[:-1]
        self._lefts: list[float] | None = None
        self.seconds = {"samples": 0.0, "global part": 0.0}

    @property
    def num_columns(self) -> int:
        """Of the sample."""
        return self.sample[0].shape[1]

    @property
    def affordable(self) -> int:
        """Columns that memory allows."""
        return _SKETCH_FLOATS // (4 * max(1, self.rows.numel()))

    def grow_sample(self, num_columns: int) -> None:
        """Have at least so many columns to estimate with."""
        start = time.perf_counter()
        self.sample = self._draw(self.sample, num_columns)
        self._lefts = None
        self.seconds["samples"] += time.perf_counter() - start

    def make_factor(self, width: int) -> None:
        """A global part, nearly the best of its rank, from a sketch of ``width`` columns.

        A basis of HΩ is multiplied by H once more: from the products follow eigenvalues and
        eigenvectors (Nyström), and a remainder that is positive semi-definite.
        """
        begin = time.perf_counter()
        self._require_memory(4 * width, f"a global part from a sketch of {width} columns")
        self.sketch = self._draw(self.sketch, width)
        start = orthonormal(self.sketch[1][:-1, :width], rounds=1)
        whole = start.new_zeros(self._source.shape[0], start.shape[1])
        products = self._source @ whole.index_copy_(0, self.rows, start)  # type: ignore[operator]
        values, vectors = nystrom_of_sketch(start, products.index_select(0, self.rows))
        self.factor = vectors * values.sqrt()
        self._lefts = None
        self.seconds["global part"] += time.perf_counter() - begin

    def left(self, rank: int) -> float:
        """‖H − VVᵀ‖_F/‖H‖_F, V with ``rank`` columns; 1 for a matrix of zeros."""
        whole = self._left(0)
        return math.sqrt(self._left(rank) / whole) if whole > 0 else 1.0

    @property
    def norm(self) -> float:
        """‖H‖_F, times the root of the number of columns of the sample."""
        return math.sqrt(self._left(0))

    def _left(self, rank: int) -> float:
        """‖H − VVᵀ‖_F², V with ``rank`` columns, times the number of columns of the sample.

        Of eigenvalues as far as they are known, else of the sample: a sample alone is uncertain
        where few eigenvalues make up most of the matrix.
        """
        if self._lefts is None:
            inputs, outputs = (part[:-1] for part in self.sample)
            rest = torch.addmm(outputs, self.factor, self.factor.T @ inputs, alpha=-1)
            last = float(torch.linalg.vector_norm(rest, dtype=torch.float64).square())
            values = torch.linalg.vector_norm(self.factor, dim=0, dtype=torch.float64).square()
            sums = values.square().flip(0).cumsum(0).flip(0) * self.num_columns + last
            self._lefts = [*sums.tolist(), last]
        return self._lefts[rank]

    def rank_for(self, tolerance: float, limit: int) -> float:
        """Columns of V that leave no more than the tolerance.

        Beyond ``limit`` under the assumption that what is left goes on to fall exponentially.
        """
        if self.left(limit) <= tolerance:
            low, high = 0, limit
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self.left(middle) <= tolerance else (middle + 1, high)
            return float(low)
        if limit < 2:
            return math.inf
        half, whole = self.left(limit // 2), self.left(limit)
        rate = math.log(half / whole) / (limit - limit // 2)
        return limit + math.log(whole / tolerance) / rate if rate > 0 else math.inf

    def _draw(self, known: tuple[Tensor, Tensor], num_columns: int) -> tuple[Tensor, Tensor]:
        missing = num_columns - known[0].shape[1]
        if missing <= 0:
            return known
        self._require_memory(2 * (num_columns + missing), f"a sketch of {num_columns} columns")
        new = random_products(self._source, self.rows, missing, self._generator)
        return torch.cat([known[0], new[0]], 1), torch.cat([known[1], new[1]], 1)

    def _require_memory(self, num_columns: int, what: str) -> None:
        require_bytes(
            num_columns * self.rows.numel() * self._source.dtype.itemsize,
            self._source.device,
            what,
            ("choose global_rank, leaf_size and ordering yourself", "use float32"),
        )
