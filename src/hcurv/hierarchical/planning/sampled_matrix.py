"""Random products with a matrix, and a growing global part made of them.

Products are drawn in three parts. A few are *held out*: errors are known from them. The others are
a *pool*, from which the global part takes its directions, the oldest first. What it has not taken
yet is *fresh*: it tells what the global part leaves, and serves a tree beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sketch import random_products
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.linalg.growing_nystrom import GrowingNystrom
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import MatrixProduct, RootedSource

__all__ = [
    "AMPLE",
    "FIRST_WIDTH",
    "MAX_STEP",
    "USABLE",
    "SampledMatrix",
    "pool_of",
]

# A global part is first made of this many directions, which grow at most by a factor of three from
# one step to the next.
FIRST_WIDTH, MAX_STEP = 16, 3.0
# A global part of rank g is made of this many times as many directions, and at least of so many
# times as many.
AMPLE, USABLE = 1.25, 1.15
# So many columns are held out: with a global part, its error is then known to a few per cent.
_HELD_OUT = 16
# Directions are multiplied in panels of so many floats (256 MB in single precision), but of at
# least so many columns.
_PANEL_FLOATS, _LEAST_PANEL = 2**26, 16
# So many directions are multiplied together, unless products are dear.
_WIDE = 96
# If fewer than this share of new directions are independent of the others, the global part spans
# the range of the matrix.
_FULL = 0.9
# Residuals fall more slowly than exponentially. Ranks that exponential extrapolation gives are
# raised by this power. On classifiers (a) and (b), from 125 and 375 columns to as many as 1560,
# that is right to a factor of two, where an exponential alone gives up to three times too small a
# rank. From too few columns it is no better than a guess: five times too large on autoencoder (a).
_SLOWING = 1.3

Columns = tuple[Tensor, Tensor]


class SampledMatrix:
    """Some rows and columns of a matrix, known by products.

    Args:
        source: the matrix, with a product.
        share: rows of it, in the order that vectors have here; the others are zero. Each rank has
            its own rows of all vectors.
        seed: seed of the random vectors.
        phases: where to count the time and show progress.
        max_floats: number of floats that products and global part may take.
        wide: so many directions are multiplied together, if so many are asked for, even if that
            takes random vectors, which cost another product each.

    Attributes:
        share: as given.
        rows: all rows.
        is_sorted: whether they ascend.
        places: where each row of the matrix lies among them, and −1 for the others, (N,).
        held_out: random vectors, (own rows + 1, s), whose last row is zero, and their products.
        is_exhausted: whether the global part spans the range of the matrix.
        useful_width: number of directions beyond which a global part is too large to be of use.
    """

    def __init__(
        self,
        source: EntrySource | MatrixProduct,
        share: RowShare,
        seed: int,
        phases: Phases,
        max_floats: int,
        wide: int = _WIDE,
    ) -> None:
        rows = share.rows
        self._source, self._phases, self._wide = source, phases, wide
        self.share, self.rows = share, rows
        self.is_sorted = bool((rows.diff() > 0).all())
        self.places = rows.new_full((source.shape[0],), -1)
        self.places[rows] = torch.arange(rows.numel(), device=rows.device)
        self._max_columns = max_floats // max(1, share.num_own)
        self._generator = torch.Generator(source.device).manual_seed(seed)
        self._pool: list[Columns] = []
        self._num_taken = 0  # columns of the pool that the global part has taken
        self._num_forgotten = 0  # columns of the pool that were taken and not kept
        self._keeps_pool = True
        # A root that is spread over ranks is not used: its rows lie on the ranks of its points.
        root = source if isinstance(source, RootedSource) and not share.is_split else None
        self._root = root if root is not None and root.num_root_rows < rows.numel() else None
        multiply: Callable[[Tensor], Tensor] = self._multiply
        self._part = GrowingNystrom(multiply, self._root is not None, share.ranks)
        self.is_exhausted = False
        self.useful_width: float = math.inf
        self._last: float | None = None  # mean of ‖(H − VVᵀ)ω‖² over held-out columns
        self._tails: list[float] = []  # sums of the squares of the eigenvalues from a rank on
        with phases.timed("samples"):
            # The first columns of the pool are multiplied together with them.
            inputs, products = self._draw(2 * _HELD_OUT)
            self.held_out = inputs[:, :_HELD_OUT].clone(), products[:, :_HELD_OUT].clone()
            self._pool.append((inputs[:, _HELD_OUT:].clone(), products[:, _HELD_OUT:].clone()))

    @property
    def width(self) -> int:
        """Number of directions that the global part is made of."""
        return self._part.width

    @property
    def rank(self) -> int:
        """Largest number of columns of the global part."""
        return self._part.values.numel() if self.width else 0

    @property
    def affordable(self) -> int:
        """Number of directions of a global part that is not too large, without a pool.

        With it exist the products that it is made of, and its columns in the end.
        """
        return max(0, self._max_columns - self._num_reserved) // self._num_arrays

    @property
    def max_width(self) -> int:
        """Largest number of directions that a global part is made of."""
        most = min(self.affordable, self.useful_width)
        return min(self.rows.numel(), max(FIRST_WIDTH, int(most)))

    @property
    def _num_arrays(self) -> int:
        """Number of arrays as large as the global part: it, Y, and Q if that has as many rows."""
        return 2 if self._root is not None else 3

    @property
    def _num_reserved(self) -> int:
        """Number of columns that are held out, or that a panel of directions takes."""
        return 2 * _HELD_OUT + 3 * _LEAST_PANEL

    def bytes_for(self, width: float) -> float:
        """About how large a workspace would have to be for some number of directions."""
        columns = self._num_reserved + self._num_arrays * width
        return columns * self.share.num_own * self._source.dtype.itemsize

    @property
    def affordable_pool(self) -> int:
        """Number of columns of a pool that is not too large."""
        return pool_of(self._max_columns)

    def draw(self, num_columns: int, rank: int) -> None:
        """Have at least so many columns that are independent of a global part of some rank."""
        missing = num_columns - self.num_columns(rank)
        if missing <= 0:
            return
        self._phases.describe(f"planning: {num_columns} random products")
        with self._phases.timed("samples"):
            self._pool.append(self._draw(missing))

    def keep_no_pool(self) -> None:
        """Forget the columns that were taken, and do not keep those that will be."""
        self._keeps_pool = False
        self._forget_taken()

    def extend(self, width: int) -> None:
        """Make the global part of at least ``width`` directions, if the matrix has so many.

        A direction is H times a random vector, or times a direction before (a Krylov space). It is
        multiplied by H once more, which makes the global part nearly the best of its rank (Nyström;
        what is left is positive semi-definite).
        """
        if width <= self.width or self.is_exhausted:
            return
        self._require_memory(width)
        self._phases.describe(f"planning: global part from {width} directions")
        panel = max(_LEAST_PANEL, _PANEL_FLOATS // (2 * max(1, self.rows.numel())))
        with self._phases.timed("global part"):
            while self.width < width and not self.is_exhausted:
                count = min(panel, width - self.width)
                num_images = min(count, self._part.num_images)
                # Random vectors take another product each, but few directions at a time are slow.
                num_random = min(count, max(self._wide, num_images)) - num_images
                parts = [self._part.images(num_images)] if num_images else []
                while num_random > 0:
                    parts.append(self._take(num_random))
                    num_random -= parts[-1].shape[1]
                taken = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                del parts
                if self._root is not None:
                    taken = self._root.root_product(self.share.spread(taken, self._size))
                added = self._part.extend(taken)
                num_random = taken.shape[1] - num_images
                self.is_exhausted = num_random > 0 and added < _FULL * num_random
            self._last = None
            self.residual(0)

    def _take(self, count: int) -> Tensor:
        """H times the oldest fresh columns of the pool, at most ``count`` of them, as a copy."""
        if self._num_taken == self._num_drawn:
            drawn = self._draw(count)
            if not self._keeps_pool:
                self._num_taken += count
                self._num_forgotten += count
                return drawn[1][:-1]
            self._pool.append(drawn)
        start = self._num_forgotten
        for _, products in self._pool:
            stop = start + products.shape[1]
            if self._num_taken < stop:
                first = self._num_taken - start
                taken = products[:-1, first : first + count].clone()
                self._num_taken += taken.shape[1]
                if not self._keeps_pool:
                    self._forget_taken()
                return taken
            start = stop
        raise AssertionError("the pool has fresh columns")

    def _forget_taken(self) -> None:
        while self._pool and self._num_forgotten + self._pool[0][0].shape[1] <= self._num_taken:
            self._num_forgotten += self._pool.pop(0)[0].shape[1]

    def release(self) -> None:
        """Forget all random vectors, once nothing but the global part is needed."""
        self._pool.clear()
        self.held_out = self.held_out[0][:, :0].clone(), self.held_out[1][:, :0].clone()

    def columns(self, rank: int) -> Columns:
        """All columns that are independent of a global part of some rank, and their products.

        All columns are independent of no global part.
        """
        return _joined([self.held_out, *self._since(0 if rank == 0 else self._num_taken)])

    def samples(self, rank: int) -> Columns:
        """The same without those that are held out."""
        parts = self._since(0 if rank == 0 else self._num_taken)
        return _joined(parts) if parts else (self.held_out[0][:, :0], self.held_out[1][:, :0])

    def num_columns(self, rank: int) -> int:
        """How many columns are independent of a global part of some rank."""
        first = self._num_forgotten if rank == 0 else self._num_taken
        return _HELD_OUT + self._num_drawn - first

    def _since(self, first: int) -> list[Columns]:
        """The parts of the pool from a column on."""
        start, found = self._num_forgotten, []
        for inputs, products in self._pool:
            skip = min(max(0, first - start), inputs.shape[1])
            if skip < inputs.shape[1]:
                found.append((inputs[:, skip:], products[:, skip:]))
            start += inputs.shape[1]
        return found

    @property
    def _num_drawn(self) -> int:
        return self._num_forgotten + sum(inputs.shape[1] for inputs, _ in self._pool)

    def factor(self, rank: int) -> Tensor:
        """V with ``rank`` columns, (own rows, rank)."""
        if rank == 0:
            return self.held_out[0][:-1, :0]
        return self._part.factor(rank)

    def factor_rows(self, index: Tensor, rank: int) -> Tensor:
        """Some rows of V with ``rank`` columns, by their places among the rows, (…, rank)."""
        return self._part.rows(lambda block: self.share.at(block, index), rank)

    def mix(self, columns: Tensor, rank: int) -> Tensor:
        """Vᵀ times columns (own rows, k), for V with ``rank`` columns."""
        return self._part.mix(columns, rank)

    def residual(self, rank: int) -> float:
        """‖H − VVᵀ‖_F/‖H‖_F for V with ``rank`` columns; 1 for a matrix of zeros."""
        whole = self._squared_residual(0)
        return math.sqrt(self._squared_residual(rank) / whole) if whole > 0 else 1.0

    @property
    def norm(self) -> float:
        """‖H‖_F."""
        return math.sqrt(self._squared_residual(0))

    def _squared_residual(self, rank: int) -> float:
        """‖H − VVᵀ‖_F² for V with ``rank`` columns.

        It is computed from eigenvalues as far as they are known, and the rest is estimated with
        held-out columns. These alone would be uncertain where few eigenvalues make up most of the
        matrix.
        """
        if self._last is None:
            inputs, products = (part[:-1] for part in self.held_out)
            self._tails = [0.0]
            if self.width:
                products = self._part.remainder(inputs, products)
                self._tails = [*self._part.values.square().flip(0).cumsum(0).flip(0).tolist(), 0.0]
            self._last = self.share.squared_norm(products) / _HELD_OUT
        return self._tails[rank] + self._last

    def rank_for(self, tolerance: float, limit: int) -> float:
        """How many columns of V leave a residual of no more than the tolerance.

        If that is more than ``limit``, the residual is assumed to go on falling exponentially. Far
        beyond the limit, that gives too small a number as a rule.
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

    @staticmethod
    def likely_rank(rank: float, limit: int) -> float:
        """The rank that is likely to be needed, if `rank_for` gave this one."""
        return rank if rank <= limit else limit * (rank / max(1, limit)) ** _SLOWING

    def likely_residual(self, rank: int, limit: int, slowing: bool = True) -> float:
        """The residual that V with ``rank`` columns is likely to leave, beyond ``limit``.

        Args:
            rank: number of columns.
            limit: up to so many columns the residual is known.
            slowing: whether the residual falls more and more slowly. It is too small if not.
        """
        half, whole = self.residual(limit // 2), self.residual(limit)
        if half == 0:
            return 0.0
        equal = limit * (rank / limit) ** (1 / _SLOWING if slowing else 1.0)
        steps = (equal - limit) / (limit - limit // 2)
        return whole * math.pow(whole / half, steps)

    def _multiply(self, directions: Tensor) -> Tensor:
        if self._root is not None:
            return self.share.select(self._root.root_transposed(directions))
        return self.share.product(self._source, directions)

    @property
    def _size(self) -> int:
        return self._source.shape[0]

    def _draw(self, num_columns: int) -> Columns:
        self._require_memory(self.width + num_columns)
        return random_products(self._source, self.share, num_columns, self._generator)

    def _require_memory(self, width: int) -> None:
        needed = 3 * max(0, width - self.width) * self.share.num_own
        with self.share.ranks.agreed():
            require_bytes(
                needed * self._source.dtype.itemsize,
                self._source.device,
                f"a sketch of {width} columns",
                ("choose global_rank, leaf_size and ordering yourself", "use float32"),
            )


def pool_of(max_columns: int) -> int:
    """Number of columns of a pool, if so many columns may be stored in all."""
    return max(0, max_columns - 2 * _HELD_OUT) // 5


def _joined(parts: list[Columns]) -> Columns:
    """Columns side by side."""
    if len(parts) == 1:
        return parts[0]
    first, second = zip(*parts, strict=True)
    return torch.cat(first, 1), torch.cat(second, 1)
