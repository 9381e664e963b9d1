"""HMatrix: a symmetric matrix in nested-basis (HSS) form, with an O(N·r) product.

With a binary tree over the rows (paper, §4, Algorithm 4.1; S = 0 in Eq. 1.3), the blocks of the
leaves on the diagonal are dense, and the block between two siblings i, j on any level is
P_i H[S_i, S_j] P_jᵀ: entries between few *skeleton* rows, interpolated to all rows. P_i of a parent
interpolates to the skeletons of its children only, which makes storage and product linear in N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree
from hcurv.hierarchical import elements
from hcurv.hierarchical.definite import least_damping
from hcurv.hierarchical.elimination import IndefiniteError
from hcurv.hierarchical.factorization import Factorization, NotPositiveDefiniteError
from hcurv.hierarchical.factorize import factorize_levels
from hcurv.hierarchical.levels import LeafBlocks, Level
from hcurv.hierarchical.parts import map_tensors, tensors_of
from hcurv.indexing import Index, Indices, resolve_indices, resolve_pairs
from hcurv.operators import SymmetricOperator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BuildRecord", "HMatrix"]

_COLUMN_FLOATS = 2**23  # of a vector of the lowest level, taken at a time


@dataclass(frozen=True)
class BuildRecord:
    """How a matrix was compressed.

    Attributes:
        method: "sketch" or "neighbors".
        tolerance: relative error asked for.
        leaf_size: largest leaf asked for.
        max_rank: rank cap, or None.
        seed: of all that was random.
        num_columns: columns of the sketch, or sampled columns per node.
        num_capped: nodes that the cap kept from the tolerance.
        estimated_error: relative error estimated on what the build did not use.
        damping: with which it was made positive definite, or None.
        seconds: time of each phase.
    """

    method: str
    tolerance: float
    leaf_size: int
    max_rank: int | None
    seed: int
    num_columns: int
    num_capped: int
    estimated_error: float
    damping: float | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


class HMatrix(SymmetricOperator):
    """A compressed symmetric matrix. Made by `hcurv.compress`; immutable.

    Attributes:
        tree: order and clusters of the rows.
        leaves: diagonal blocks.
        levels: bases and couplings, from the level of the leaves up to that below the root.
        record: how it was built.
    """

    def __init__(
        self,
        tree: ClusterTree,
        leaves: LeafBlocks,
        levels: tuple[Level, ...],
        record: BuildRecord,
        dtype: torch.dtype,
    ) -> None:
        self.tree = tree
        self.leaves = leaves
        self.levels = levels
        self.record = record
        self._dtype = dtype

    def __repr__(self) -> str:
        """Size, storage and error in one line."""
        return (
            f"HMatrix(N={self.shape[0]}, depth={self.tree.depth}, ordering={self.tree.ordering!r},"
            f" compression_rate={self.compression_rate:.3g},"
            f" estimated_error={self.estimated_error:.2g}, dtype={self.dtype})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self.tree.size, self.tree.size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the values are stored."""
        return self.tree.permutation.device

    @property
    def num_stored(self) -> int:
        """Every stored float, padding included."""
        return self.leaves.num_stored + sum(level.num_stored for level in self.levels)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored floats and indices."""
        return sum(t.nbytes for t in tensors_of((self.tree, self.leaves, self.levels)))

    @property
    def estimated_error(self) -> float:
        """Relative error as the build estimated it, from random vectors that it did not use."""
        return self.record.estimated_error

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """Ranks of the nodes of each level, from the two below the root down to the leaves."""
        return tuple(level.ranks for level in reversed(self.levels))

    def _matmat(self, rhs: Tensor) -> Tensor:
        result = torch.zeros_like(rhs, memory_format=torch.contiguous_format)
        kept = self.tree.permutation
        step = max(1, _COLUMN_FLOATS // (kept.numel() + 1))
        for start in range(0, rhs.shape[1], step):
            columns = slice(start, start + step)
            inputs = rhs.new_zeros(kept.numel() + 1, rhs[:, columns].shape[1])
            torch.index_select(rhs[:, columns], 0, kept, out=inputs[:-1])
            result[:, columns].index_copy_(0, kept, self._apply(inputs)[:-1])
        return result

    def _apply(self, inputs: Tensor) -> Tensor:
        """Product in tree order: up, across and down the tree."""
        gathered = [inputs]
        for level in self.levels:
            gathered.append(level.gather(gathered[-1]))
        outputs = torch.zeros_like(gathered[-1])
        for level, values in zip(reversed(self.levels), reversed(gathered), strict=False):
            level.add_couplings(values, outputs)
            outputs = level.spread(outputs)
        self.leaves.add_product(inputs, outputs)
        return outputs

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        ordered = torch.zeros(
            self.tree.permutation.numel() + 1, dtype=self.dtype, device=self.device
        )
        ordered[self.leaves.rows] = self.leaves.values.diagonal(dim1=1, dim2=2)
        result = ordered.new_zeros(self.shape[0])
        result[self.tree.permutation] = ordered[:-1]
        return result

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols`` of the compressed matrix."""
        with torch.no_grad():
            row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
            col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
            return elements.block(self, row_index, col_index)

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """The entries A[rows[j], cols[j]] of the compressed matrix, elementwise."""
        with torch.no_grad():
            index = resolve_pairs(rows, cols, self.shape[0], self.device)
            return elements.pairs(self, *index)

    def factorize(self, damping: float | Tensor = 0.0, *, definite: bool = True) -> Factorization:
        """Factorize A + damping·I: the key to solving, log-determinants, samples, variances.

        Args:
            damping: a number, or a tensor of one number; if that requires gradients, `solve` and
                `logdet` of the result pass them on.
            definite: whether A + damping·I has to be positive definite. With False it may have
                negative eigenvalues, which are counted (and it takes several times as long): a
                damping of −s is what finding eigenvalues near s needs.

        Raises:
            NotPositiveDefiniteError: it is not positive definite; ``smallest_damping`` is one with
                which it is.
            InsufficientMemoryError: the factors would not fit into free memory.

        Example:
            >>> F = A.factorize(damping=1e-3)
            >>> F.solve(b), F.logdet(), F.sample(10), F.inverse_diagonal()
        """
        given = torch.as_tensor(
            damping, dtype=None if isinstance(damping, Tensor) else torch.float64
        )
        if given.numel() != 1 or not math.isfinite(value := given.detach().item()):
            raise ValueError(f"damping must be one finite number; got {damping!r}")
        has_zeros = self.tree.num_kept < self.tree.size
        with torch.no_grad():
            try:
                if has_zeros and (value <= 0 if definite else value == 0):
                    raise IndefiniteError
                factors = factorize_levels(self, value, definite)
            except IndefiniteError:
                raise self._indefinite(value, definite) from None
        num_negative = factors.num_negative
        if has_zeros and value < 0:
            num_negative += self.tree.size - self.tree.num_kept
        return Factorization(
            self.tree,
            factors.levels,
            given.reshape(()),
            factors.log_determinant,
            num_negative,
            self.dtype,
        )

    def _indefinite(self, damping: float, definite: bool) -> NotPositiveDefiniteError:
        """The error for a damping that does not do, with one that does."""
        if not definite:
            return NotPositiveDefiniteError(
                f"A + damping·I is singular for damping = {damping:.3e}: −damping is an eigenvalue"
                " of A. Choose a slightly different damping",
                damping,
                damping,
            )
        lowest, smallest = least_damping(self)
        return NotPositiveDefiniteError(
            f"A + damping·I is not positive definite for damping = {damping:.3e}: compression (or"
            f" rounding) left eigenvalues of A down to about {lowest:.2e}. Use"
            f" damping={smallest:.2e} or more, or compress with positive_definite=True,"
            " damping=… (positive)",
            damping,
            smallest,
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> HMatrix:
        """This matrix on another device or in another precision."""
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        kind = self.dtype if dtype is None else dtype

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, kind if tensor.is_floating_point() else None)

        tree, leaves, levels = map_tensors(move, (self.tree, self.leaves, self.levels))
        return HMatrix(tree, leaves, levels, self.record, kind)

    def with_leaves(self, leaves: LeafBlocks) -> HMatrix:
        """This matrix with other diagonal blocks."""
        return HMatrix(self.tree, leaves, self.levels, self.record, self.dtype)

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a safetensors file, atomically; `hcurv.load` reads it."""
        from hcurv.hierarchical.storage import save

        save(self, path)

    def plot(self, max_levels: int = 6) -> Figure:
        """Block structure with ranks (as in the paper's Figure 1), and the ranks of each level.

        Args:
            max_levels: blocks below this level are drawn as one.
        """
        from hcurv.hierarchical.plots import plot_matrix

        return plot_matrix(self, max_levels)
