"""Random products with a matrix and a global part made of them, from which plans are estimated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sketch import random_products
from hcurv.linalg.nystrom import nystrom_of_sketch, orthonormal
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import product

__all__ = ["SampledMatrix"]

# A sketch has at most a quarter of this many floats: 1 GB in single precision. A global part takes
# four arrays of its size while it is computed.
_MAX_FLOATS = 2**30


class SampledMatrix:
    """Some rows and columns of a matrix, known by products.

    Args:
        source: the matrix, with a product.
        rows: rows of it, in the order that vectors have here.
        seed: seed of the random vectors.
        phases: where to count the time and show progress.

    Attributes:
        rows: as given.
        sample: random vectors, (rows + 1, s), whose last row is zero, and their products. Ranks
            and errors are estimated with them.
        sketch: other random vectors and their products, from which the global part is made.
        factor: V of the global part, (rows, g), orthogonal columns in the order of eigenvalues.
    """

    def __init__(self, source: EntrySource, rows: Tensor, seed: int, phases: Phases) -> None:
        self._source, self.rows, self._phases = source, rows, phases
        self._generator = torch.Generator(source.device).manual_seed(seed)
        none = torch.zeros(rows.numel() + 1, 0, dtype=source.dtype, device=source.device)
        self.sample = self.sketch = (none, none)
        self.factor = none[:-1]
        self._residuals: list[float] | None = None

    @property
    def num_columns(self) -> int:
        """Number of columns of the sample."""
        return self.sample[0].shape[1]

    @property
    def affordable(self) -> int:
        """Number of columns of a sketch that is not too large."""
        return _MAX_FLOATS // (4 * max(1, self.rows.numel()))

    def grow_sample(self, num_columns: int) -> None:
        """Have at least so many columns in the sample."""
        self._phases.describe(f"planning: {num_columns} random products")
        with self._phases.timed("samples"):
            self.sample = self._draw(self.sample, num_columns)
        self._residuals = None

    def make_factor(self, width: int) -> None:
        """Make a global part, nearly the best of its rank, from a sketch of ``width`` columns.

        A basis of HΩ is multiplied by H once more. From these products follow eigenvalues and
        eigenvectors (Nyström), whose remainder is positive semi-definite.
        """
        self._require_memory(4 * width, f"a global part from a sketch of {width} columns")
        self._phases.describe(f"planning: global part from {width} random products")
        with self._phases.timed("global part"):
            self.sketch = self._draw(self.sketch, width)
            start = orthonormal(self.sketch[1][:-1, :width], rounds=1)
            whole = start.new_zeros(self._source.shape[0], start.shape[1])
            whole.index_copy_(0, self.rows, start)
            products = product(self._source, whole)
            values, vectors = nystrom_of_sketch(start, products.index_select(0, self.rows))
            self.factor = vectors * values.sqrt()
        self._residuals = None

    def residual(self, rank: int) -> float:
        """‖H − VVᵀ‖_F/‖H‖_F for V with ``rank`` columns; 1 for a matrix of zeros."""
        whole = self._squared_residual(0)
        return math.sqrt(self._squared_residual(rank) / whole) if whole > 0 else 1.0

    @property
    def norm(self) -> float:
        """‖H‖_F, times the root of the number of columns of the sample."""
        return math.sqrt(self._squared_residual(0))

    def _squared_residual(self, rank: int) -> float:
        """‖H − VVᵀ‖_F² for V with ``rank`` columns, times the number of columns of the sample.

        It is computed from eigenvalues as far as they are known, and the rest is estimated with
        the sample. The sample alone would be uncertain where few eigenvalues make up most of the
        matrix.
        """
        if self._residuals is None:
            inputs, outputs = (part[:-1] for part in self.sample)
            rest = torch.addmm(outputs, self.factor, self.factor.T @ inputs, alpha=-1)
            last = float(torch.linalg.vector_norm(rest, dtype=torch.float64).square())
            values = torch.linalg.vector_norm(self.factor, dim=0, dtype=torch.float64).square()
            sums = values.square().flip(0).cumsum(0).flip(0) * self.num_columns + last
            self._residuals = [*sums.tolist(), last]
        return self._residuals[rank]

    def rank_for(self, tolerance: float, limit: int) -> float:
        """How many columns of V leave a residual of no more than the tolerance.

        If that is more than ``limit``, the residual is assumed to go on falling exponentially.
        """
        if self.residual(limit) <= tolerance:
            low, high = 0, limit
            while low < high:
                middle = (low + high) // 2
                low, high = (
                    (low, middle) if self.residual(middle) <= tolerance else (middle + 1, high)
                )
            return float(low)
        if limit < 2:
            return math.inf
        half, whole = self.residual(limit // 2), self.residual(limit)
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
