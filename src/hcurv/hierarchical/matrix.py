"""HMatrix: a symmetric matrix in nested-basis (HSS) form, with an O(N·r) product.

With a binary tree over the rows (paper, §4, Algorithm 4.1; S = 0 in Eq. 1.3), the blocks of the
leaves on the diagonal are dense, and the block between two siblings i, j on any level is
P_i H[S_i, S_j] P_jᵀ: entries between few *skeleton* rows, interpolated to all rows. P_i of a parent
interpolates to the skeletons of its children only, which makes storage and product linear in N.
A global part V Vᵀ of low rank may come on top; the rest is then the tree's.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree
from hcurv.hierarchical import elements
from hcurv.hierarchical.definite import least_damping
from hcurv.hierarchical.elimination import IndefiniteError
from hcurv.hierarchical.factorization import Factorization, NotPositiveDefiniteError
from hcurv.hierarchical.factorize import factorize_levels
from hcurv.hierarchical.global_part import GlobalPart
from hcurv.hierarchical.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts import map_tensors, tensors_of
from hcurv.hierarchical.plan import Plan
from hcurv.indexing import Index, Indices, resolve_indices, resolve_pairs
from hcurv.operators import SymmetricOperator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BuildRecord", "HMatrix", "NearFieldWarning"]

_COLUMN_FLOATS = 2**23  # of a vector of the lowest level, taken at a time


class NearFieldWarning(UserWarning):
    """A factorization is not one of the matrix itself, which has a near field."""


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
        plan: how the parts were chosen, or None if nothing was left open.
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
    plan: Plan | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


class HMatrix(SymmetricOperator):
    """A compressed symmetric matrix. Made by `hcurv.compress`; immutable.

    Attributes:
        tree: order and clusters of the rows.
        leaves: diagonal blocks.
        levels: bases and couplings, from the level of the leaves up to that below the root.
        record: how it was built.
        global_part: what is added to all of this, or None.
        near: blocks of pairs of near leaves, exact; none in the HSS form.
    """

    def __init__(
        self,
        tree: ClusterTree,
        leaves: LeafBlocks,
        levels: tuple[Level, ...],
        record: BuildRecord,
        dtype: torch.dtype,
        global_part: GlobalPart | None = None,
        near: tuple[Coupling, ...] = (),
    ) -> None:
        self.tree = tree
        self.leaves = leaves
        self.levels = levels
        self.record = record
        self.global_part = global_part
        self.near = near
        self._dtype = dtype

    def __repr__(self) -> str:
        """Size, storage and error in one line."""
        return (
            f"HMatrix(N={self.shape[0]}, global_rank={self.global_rank}, depth={self.tree.depth},"
            f" ordering={self.tree.ordering!r},"
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
        levels = sum(level.num_stored for level in self.levels)
        shared = 0 if self.global_part is None else self.global_part.num_stored
        near = sum(blocks.num_stored for blocks in self.near)
        return self.leaves.num_stored + near + levels + shared

    @property
    def nbytes(self) -> int:
        """Bytes of all stored floats and indices."""
        parts = (self.tree, self.leaves, self.levels, self.global_part, self.near)
        return sum(t.nbytes for t in tensors_of(parts))

    @property
    def estimated_error(self) -> float:
        """Relative error as the build estimated it, from random vectors that it did not use."""
        return self.record.estimated_error

    @property
    def plan(self) -> Plan | None:
        """How global rank, leaf size and ordering were chosen; prints as a table."""
        return self.record.plan

    @property
    def global_rank(self) -> int:
        """Columns of the global part."""
        return 0 if self.global_part is None else self.global_part.rank

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
        if self.global_part is not None:
            self.global_part.add_product(rhs, result)
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
        for blocks in self.near:
            blocks.add_product(inputs, outputs)
        return outputs

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        ordered = torch.zeros(
            self.tree.permutation.numel() + 1, dtype=self.dtype, device=self.device
        )
        ordered[self.leaves.rows] = self.leaves.values.diagonal(dim1=1, dim2=2)
        result = ordered.new_zeros(self.shape[0])
        result[self.tree.permutation] = ordered[:-1]
        if self.global_part is not None:
            result += self.global_part.diagonal(self.shape[0])
        return result

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols`` of the compressed matrix."""
        with torch.no_grad():
            row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
            col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
            values = elements.block(self, row_index, col_index)
            if self.global_part is not None:
                left, right = (self.global_part.rows_of(i) for i in (row_index, col_index))
                values.addmm_(left, right.T)
            return values

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """The entries A[rows[j], cols[j]] of the compressed matrix, elementwise."""
        with torch.no_grad():
            index = resolve_pairs(rows, cols, self.shape[0], self.device)
            values = elements.pairs(self, *index)
            if self.global_part is not None:
                left, right = (self.global_part.rows_of(i) for i in index)
                values += torch.linalg.vecdot(left, right)
            return values

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

        Warns:
            NearFieldWarning: A has a near field, and is compressed to HSS form for this.

        Examples:
            >>> F = A.factorize(damping=1e-3)
            >>> F.solve(b), F.logdet(), F.sample(10), F.inverse_diagonal()
        """
        given = torch.as_tensor(
            damping, dtype=None if isinstance(damping, Tensor) else torch.float64
        )
        if given.numel() != 1 or not math.isfinite(value := given.detach().item()):
            raise ValueError(f"damping must be one finite number; got {damping!r}")
        matrix = self
        if self.near:
            matrix = self.without_near_field()
            warnings.warn(
                "A has a near field, which factorizations do not know: what is factorized is A"
                f" compressed to HSS form, with an error of about {matrix.estimated_error:.1e}. Use"
                " it as a preconditioner, hcurv.cg(A, b, preconditioner=F)",
                NearFieldWarning,
                stacklevel=2,
            )
        number = given.reshape(())
        with torch.no_grad():
            result = matrix._factorize_tree(number, value, definite)
            if self.global_part is None:
                return result
            return result.updated(self.global_part, definite)

    def _factorize_tree(self, damping: Tensor, value: float, definite: bool) -> Factorization:
        """The factorization without global part and near field."""
        has_zeros = self.tree.num_kept < self.tree.size
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
            damping,
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
        lowest, smallest = least_damping(self.hierarchical_part)
        what = "A" if self.global_part is None else "A (without its global part)"
        return NotPositiveDefiniteError(
            f"A + damping·I is not positive definite for damping = {damping:.3e}: compression (or"
            f" rounding) left eigenvalues of {what} down to about {lowest:.2e}. Use"
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

        parts = (self.tree, self.leaves, self.levels, self.global_part, self.near)
        tree, leaves, levels, global_part, near = map_tensors(move, parts)
        return HMatrix(tree, leaves, levels, self.record, kind, global_part, near)

    def with_leaves(self, leaves: LeafBlocks) -> HMatrix:
        """This matrix with other diagonal blocks."""
        return self._with(leaves=leaves)

    @property
    def hierarchical_part(self) -> HMatrix:
        """This matrix without its global part."""
        return self._with(global_part=None)

    def without_near_field(self) -> HMatrix:
        """This matrix with its tree and near field compressed to HSS form, as accurately."""
        if not self.near:
            return self
        from hcurv.hierarchical.compress import compress

        rest = self.hierarchical_part
        probes = torch.Generator().manual_seed(self.record.seed)
        vectors = torch.randn(self.shape[0], 16, dtype=self.dtype, generator=probes).to(self.device)
        share = torch.linalg.vector_norm(rest @ vectors) / torch.linalg.vector_norm(self @ vectors)
        result = compress(
            rest,
            tolerance=self.record.tolerance / max(float(share), self.record.tolerance),
            leaf_size=self.record.leaf_size,
            global_rank=0,
            ordering=torch.cat([self.tree.permutation, self.tree.zero_rows]),
            seed=self.record.seed,
        )
        return result._with(global_part=self.global_part)

    def _with(self, **parts: Any) -> HMatrix:
        own = {name: getattr(self, name) for name in ("tree", "leaves", "levels", "record")}
        own |= {"dtype": self.dtype, "global_part": self.global_part, "near": self.near}
        return HMatrix(**{**own, **parts})

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
