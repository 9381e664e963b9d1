"""HMatrix: a symmetric matrix in nested-basis (HSS) form, with an O(N·r) product.

With a binary tree over the rows (paper, §4, Algorithm 4.1; S = 0 in Eq. 1.3), the blocks of the
leaves on the diagonal are dense, and the block between two siblings i, j on any level is
P_i H[S_i, S_j] P_jᵀ: entries between few *skeleton* rows, interpolated to all rows. P_i of a parent
interpolates to the skeletons of its children only, which makes storage and product linear in N.
A global part V Vᵀ of low rank may come on top; the rest is then the tree's.
"""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hcurv.damping import DampingLike, DeviceLike, as_damping
from hcurv.factorized import check_float_type
from hcurv.hierarchical.matrix import elements
from hcurv.hierarchical.matrix.build_record import BuildRecord
from hcurv.hierarchical.matrix.vector_product import VectorProduct, make_vector_product
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.nested_tensors import map_tensors, tensors_of
from hcurv.hierarchical.parts.node_share import NodeShare
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.parts.shared_part import SharedPart
from hcurv.hierarchical.solving.factorization import Factorization, factorize
from hcurv.hierarchical.solving.trust import warn_of_roughness
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.indexing import Index, Indices, check_count, check_seed, resolve_indices, resolve_pairs
from hcurv.layout import ParameterLayout
from hcurv.operators import EntryOperator, EntrySource, require_dense
from hcurv.residuals import warn_of_residual

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BuildRecord", "HMatrix", "completed"]

# Vectors are taken some columns at a time, so that a vector of the lowest level holds at most this
# many floats. It bounds the memory of a product with many columns.
_COLUMN_FLOATS = 2**23
# Entries are computed for some pairs at a time, so that all of them take about so many floats.
_PAIR_FLOATS = 2**22


class HMatrix(EntryOperator):
    """A compressed symmetric matrix. Made by `hcurv.compress`; immutable.

    The first product with a single vector copies small blocks of the tree into a few sparse
    matrices, which later ones use: see `parts.vector_steps`. `nbytes` does not count these copies.

    Attributes:
        tree: order and clusters of the rows.
        leaves: diagonal blocks.
        levels: bases and couplings, from the level of the leaves up to that below the root.
        global_part: a low-rank matrix that is added to all of this, or None.
        near: dense blocks of pairs of different leaves; none in the HSS form.
        layout: names and places of the parameters of a network, or None for other matrices.

    Examples:
        >>> A = hcurv.compress(H, tolerance=1e-2)
        >>> A.shape, A.estimated_error < 2e-2
        ((51, 51), True)
        >>> torch.allclose(A @ b, A.to_dense() @ b)
        True
        >>> A[0, :3].shape
        torch.Size([3])
    """

    near: tuple[Coupling, ...] = ()
    layout: ParameterLayout | None = None
    nodes: NodeShare | None = None  # the nodes of this rank, if ranks share the matrix

    def __init__(
        self,
        tree: ClusterTree,
        leaves: LeafBlocks,
        levels: tuple[Level, ...],
        record: BuildRecord | None,
        dtype: torch.dtype,
        global_part: GlobalPart | None = None,
    ) -> None:
        self.tree = tree
        self.leaves = leaves
        self.levels = levels
        self.global_part: GlobalPart | None = global_part
        self._record = record
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
    def record(self) -> BuildRecord:
        """How the matrix was built."""
        if self._record is None:
            raise ValueError("this matrix has no build record: it is not the result of compress")
        return self._record

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
        """Device on which the values are stored."""
        return self.tree.permutation.device

    @property
    def num_stored(self) -> int:
        """Number of stored floats, with padding."""
        levels = sum(level.num_stored for level in self.levels)
        shared = 0 if self.global_part is None else self.global_part.num_stored
        return self.leaves.num_stored + levels + shared

    @property
    def nbytes(self) -> int:
        """Number of bytes of all stored floats and indices."""
        return sum(t.nbytes for t in tensors_of(tuple(self._parts().values())))

    @property
    def estimated_error(self) -> float:
        """Relative error in the Frobenius norm, estimated on vectors that the build did not use."""
        return self.record.estimated_error

    @property
    def damped_error(self) -> float | None:
        """The root mean square of ‖E z‖/‖z‖ over normal z; None if compressed without a damping.

        E = Gᵀ (H − A) G with A + λI = (G Gᵀ)⁻¹: a solve is wrong by E. It is an estimate from
        probes that the build did not use.

        Examples:
            >>> A = hcurv.compress(H, damping=0.1)
            >>> A.damped_error < 0.05, A.variance_error < 0.02
            (True, True)
        """
        found = self.record.damped_error
        return None if found is None else found.rms

    @property
    def variance_error(self) -> float | None:
        """Relative error of variances jᵀ (A + λI)⁻¹ j; None if compressed without a damping.

        The j are random rows of a root of H (H = Σ j jᵀ), such as an output's Jacobian. If
        `compress` is given a damping λ, its tolerance is for this error. It is an estimate.

        Examples:
            >>> A = hcurv.compress(H, damping=0.1, tolerance=1e-3)
            >>> A.variance_error < 2e-3
            True
        """
        found = self.record.damped_error
        return None if found is None else found.variance

    @property
    def plan(self) -> Plan | None:
        """How global rank, leaf size and ordering were chosen. It prints as a table."""
        return self.record.plan

    @property
    def global_rank(self) -> int:
        """Number of columns of the factor of the global part."""
        return 0 if self.global_part is None else self.global_part.rank

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """Ranks of the nodes of each level, from the two below the root down to the leaves."""
        return tuple(level.ranks for level in reversed(self.levels))

    def _matmat(self, rhs: Tensor) -> Tensor:
        if rhs.shape[1] == 1 and self._vector_product is not None:
            result = self._vector_product.apply(rhs[:, 0])[:, None]
        else:
            result = self._tree_product(rhs)
        if self.global_part is not None:
            self.global_part.add_product(rhs, result)
        return result

    @cached_property
    def _vector_product(self) -> VectorProduct | None:
        """How one vector is multiplied by the tree; None if as many vectors are."""
        return make_vector_product(self)

    def _tree_product(self, rhs: Tensor) -> Tensor:
        """Multiply by what the tree stores, some columns at a time."""
        result = torch.zeros_like(rhs, memory_format=torch.contiguous_format)
        kept = self.tree.permutation
        step = max(1, _COLUMN_FLOATS // (kept.numel() + 1))
        for start in range(0, rhs.shape[1] if kept.numel() else 0, step):
            columns = slice(start, start + step)
            inputs = rhs.new_zeros(kept.numel() + 1, rhs[:, columns].shape[1])
            torch.index_select(rhs[:, columns], 0, kept, out=inputs[:-1])
            result[:, columns].index_copy_(0, kept, self._apply(inputs)[:-1])
        return result

    def _apply(self, inputs: Tensor) -> Tensor:
        """Multiply in tree order: up, across and down the tree."""
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
        """Return the N diagonal entries, (N,).

        Examples:
            >>> torch.allclose(A.diagonal(), A.to_dense().diagonal())
            True
        """
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
        """Return the dense block ``rows`` x ``cols`` of the compressed matrix, (m, k).

        Examples:
            >>> torch.allclose(A.block([0, 5], [7, 8, 9]), A.to_dense()[[0, 5]][:, [7, 8, 9]])
            True
        """
        with torch.no_grad():
            row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
            col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
            # A level of the tree makes a product and a mask of the size of the block.
            require_dense(row_index.numel(), col_index.numel(), self, copies=3)
            values = self._tree_block(row_index, col_index)
            if self.global_part is not None:
                left, right = (self.global_part.rows_of(i) for i in (row_index, col_index))
                values.addmm_(left, right.T)
            return values

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """Return the entries A[rows[j], cols[j]] of the compressed matrix, (k,).

        Examples:
            >>> torch.allclose(A.pairs([0, 5], [7, 8]), A.to_dense()[[0, 5], [7, 8]])
            True
        """
        with torch.no_grad():
            row_index, col_index = resolve_pairs(rows, cols, self.shape[0], self.device)
            values = torch.zeros(row_index.numel(), dtype=self.dtype, device=self.device)
            # Every pair takes a row of each basis on its way up the tree.
            ranks = sum(int(level.ranks.max()) for level in self.levels) + self.global_rank
            parts = (
                tensor.split(max(1, _PAIR_FLOATS // (1 + ranks)))
                for tensor in (values, row_index, col_index)
            )
            for target, first, second in zip(*parts, strict=True):
                target.copy_(self._tree_pairs(first, second))
                if self.global_part is not None:
                    left, right = (self.global_part.rows_of(i) for i in (first, second))
                    target += torch.linalg.vecdot(left, right)
            return values

    def _tree_block(self, rows: Tensor, cols: Tensor) -> Tensor:
        """A block of what the tree stores, without the global part."""
        return elements.block(self, rows, cols)

    def _tree_pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Entries of what the tree stores, without the global part."""
        return elements.pairs(self, rows, cols)

    def factorize(
        self, damping: DampingLike = 0.0, *, definite: bool = True, warn: bool = True
    ) -> Factorization:
        """Factorize A + D, for solving, log-determinants, samples and variances.

        Args:
            damping: the diagonal matrix D: a number, a tensor (N,), or, if this matrix has a
                `layout`, a mapping from names of parameters or layers to numbers. If it requires
                gradients, `solve` and `logdet` of the result pass them on.
            definite: whether A + D has to be positive definite. With False it may have negative
                eigenvalues, which are counted, but factorizing takes several times as long. To find
                eigenvalues near s, a damping of −s is needed.
            warn: whether to warn if the matrix, or a solve, is too rough. A preconditioner may be.

        Raises:
            NotPositiveDefiniteError: A + D is not positive definite. Its ``smallest_damping`` is a
                number that works.
            InsufficientMemoryError: the factors would not fit into free memory.

        Warns:
            AccuracyWarning: it was not compressed for this damping, and its error is far above it;
                or the damping is too small for the precision: a random residual, which is
                measured once, here, is above 1e-2.

        Examples:
            >>> F = A.factorize(damping=1e-2)
            >>> x = F.solve(b)
            >>> torch.allclose(A @ x + 1e-2 * x, b)
            True
            >>> priors = torch.linspace(0.1, 1.0, 51, dtype=torch.float64)
            >>> x = A.factorize(priors).solve(b)
            >>> torch.allclose(A @ x + priors * x, b)
            True
        """
        resolved = as_damping(damping, self.shape[0], self.layout)
        with torch.no_grad():
            factors = factorize(self, resolved, definite)
            if warn:
                warn_of_residual(self, factors, "F.solve(b, operator=H), which refines solutions")
            if warn and definite and self._record is not None:
                warn_of_roughness(self, self._record, factors, resolved)
            return factors

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> HMatrix:
        """Return this matrix on another device or in another precision.

        Examples:
            >>> A.to(dtype=torch.float32).dtype
            torch.float32
        """
        check_float_type(dtype, device)
        dtype = self.dtype if dtype is None else dtype

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        moved = {name: map_tensors(move, part) for name, part in self._parts().items()}
        return self._with(**moved, dtype=dtype)

    def with_leaves(self, leaves: LeafBlocks) -> HMatrix:
        """Return this matrix with other diagonal blocks.

        Examples:
            >>> torch.equal(A.with_leaves(A.leaves) @ b, A @ b)
            True
        """
        return self._with(leaves=leaves)

    def with_parts(self, **parts: Any) -> HMatrix:
        """Return this matrix with other parts, by the names that the constructor takes.

        Examples:
            >>> torch.equal(A.with_parts(leaves=A.leaves) @ b, A @ b)
            True
        """
        return self._with(**parts)

    def refresh(self, matrix: EntrySource | Tensor, seed: int = 0) -> HMatrix:
        """Return another matrix in the form of this one: same tree, ranks and skeletons.

        For a matrix that has changed a little, a training step later or on another batch, this is
        much cheaper than `compress`: entries, as many random products as the largest rank asks for,
        and a product for each column of the global part.

        Args:
            matrix: the new matrix, of the same shape and type, with products.
            seed: seed of the probes that estimate the error.

        Warns:
            CompressionWarning: the error is more than twice the one before.

        Examples:
            >>> with torch.no_grad():
            ...     for parameter in model.parameters():
            ...         parameter *= 1.01
            >>> H_new = hcurv.GaussNewton(model, loss, (inputs, targets))
            >>> hcurv.compress(H, tolerance=1e-2).refresh(H_new).estimated_error < 2e-2
            True
        """
        from hcurv.hierarchical.building.refresh import refresh

        with torch.no_grad():
            return refresh(self, matrix, check_seed(seed))

    def with_layout(self, layout: ParameterLayout | None) -> HMatrix:
        """Return this matrix with names for its rows, which a damping by names needs.

        Examples:
            >>> named = A.with_layout(H.layout)
            >>> F = named.factorize({"0": 1.0, "2": 0.1})  # one number for each layer
            >>> F.damping.shape
            torch.Size([51])
        """
        if layout is not None and not isinstance(layout, ParameterLayout):
            raise TypeError(f"layout must be a ParameterLayout; got {type(layout).__name__}")
        if layout is not None and layout.size != self.shape[0]:
            raise ValueError(f"the layout must have {self.shape[0]} parameters; got {layout.size}")
        result = self._with()
        result.layout = layout
        return result

    @property
    def leaf_order(self) -> Tensor:
        """The rows of the matrix in the order of the leaf blocks: of this rank, if ranks share it.

        Examples:
            >>> torch.equal(A.leaf_order, A.tree.permutation)
            True
        """
        nodes = self.nodes
        return (
            self.tree.permutation if nodes is None or not nodes.is_shared else nodes.share.own_rows
        )

    @property
    def hierarchical_part(self) -> HMatrix:
        """This matrix without its global part."""
        return self._with(global_part=None)

    def gather(self) -> HMatrix:
        """Return the whole matrix in this process: itself, unless it is spread over ranks.

        Examples:
            >>> A.gather() is A
            True
        """
        return self

    def without_near_field(self) -> HMatrix:
        """Return this matrix in HSS form, which can be factorized: itself, if that is its form.

        Examples:
            >>> A.without_near_field() is A
            True
        """
        return self

    def _parts(self) -> dict[str, Any]:
        """Everything that holds tensors, by the names that the constructor takes."""
        return {
            "tree": self.tree,
            "leaves": self.leaves,
            "levels": self.levels,
            "global_part": self.global_part,
        }

    def _with(self, **changes: Any) -> HMatrix:
        """This matrix with other values for some arguments of the constructor."""
        arguments = {**self._parts(), "record": self._record, "dtype": self.dtype}
        result = type(self)(**{**arguments, **changes})
        result.layout = self.layout
        return result

    def save(self, path: str | PathLike[str]) -> None:
        """Write this matrix to a safetensors file, which `hcurv.load` reads.

        An existing file is replaced only once the new one is complete.

        Examples:
            >>> A.save("A.safetensors")
            >>> torch.equal(hcurv.load("A.safetensors") @ b, A @ b)
            True
        """
        from hcurv.hierarchical.matrix.storage import save

        save(self, path)

    def plot(self, max_levels: int = 6) -> Figure:
        """Draw what the matrix stores.

        Of a tree: the blocks with their ranks (as in the paper's Figure 1), and the ranks of each
        level. Of a matrix that has no tree: the eigenvalues of the global part, and the largest
        entries of its diagonal.

        Args:
            max_levels: blocks below this level are drawn as one.

        Examples:
            >>> A.plot().savefig("A.png")
        """
        from hcurv.hierarchical.matrix.plots import plot_matrix

        return plot_matrix(self, check_count(max_levels, "max_levels", least=0))


def completed(
    matrix: HMatrix, record: BuildRecord, global_part: GlobalPart | SharedPart | None
) -> HMatrix:
    """Return a matrix with the record of its build, and with a global part or None."""
    return matrix._with(record=record, global_part=global_part)
