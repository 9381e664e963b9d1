"""A matrix H = SᵀS whose root S is known: exact entries, blocks and products."""

from __future__ import annotations

import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import takes_arrays
from hcurv.damping import Damping, DampingLike, as_damping
from hcurv.indexing import Index, Indices, resolve_blocks, resolve_indices, resolve_pairs
from hcurv.layout import ParameterLayout
from hcurv.memory import require_bytes
from hcurv.network.kernel import TangentKernel
from hcurv.network.representable import require_finite
from hcurv.network.root import Root
from hcurv.operators import EntryOperator
from hcurv.ranks import OneRank

__all__ = ["FactoredMatrix"]

# Entries of single pairs take about this many bytes each, for indices and their order.
_PAIR_BYTES = 160


class FactoredMatrix(EntryOperator):
    """H = SᵀS, with the root S known by the Jacobians of all layers (paper, Theorem 3.1).

    Args:
        root: S.
        workspace: the number of bytes of temporary memory that one call may use beyond its result.
    """

    def __init__(self, root: Root, workspace: int) -> None:
        self._root, self._workspace = root, workspace

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``, where N is the number of parameters with ``requires_grad``."""
        return (self._root.layout.size, self._root.layout.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's parameters."""
        return self._root.dtype

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return self._root.device

    @property
    def num_points(self) -> int:
        """The number n of data points."""
        return self._root.num_points

    @property
    def num_stored(self) -> int:
        """The number of floats that are stored at this time.

        It grows once if `GaussNewton.memory_plan` has something for later.
        """
        return self._root.num_stored

    @property
    def layout(self) -> ParameterLayout:
        """The names, shapes and places of the parameters in the flat vector."""
        return self._root.layout

    @property
    def num_root_rows(self) -> int:
        """The number of rows of the root S, H = SᵀS: n points with q rows each."""
        return self.num_points * self._root.num_rows

    @property
    def root(self) -> Root:
        """The root S of H = SᵀS, as the precomputation stored it."""
        return self._root

    @property
    def ranks(self) -> OneRank:
        """The processes that this matrix is spread over, and what their messages have cost.

        Examples:
            >>> H.ranks.size
            1
        """
        return self._root.ranks

    @property
    def workspace(self) -> int:
        """Bytes of temporary memory that one call may use beyond its result."""
        return self._workspace

    def in_precision(self, dtype: torch.dtype) -> FactoredMatrix:
        """The same matrix with its factors converted to another precision.

        Sums over points then lose no more digits than that precision has; the entries of S keep
        the precision that they were computed in.

        Examples:
            >>> H.in_precision(torch.float32).dtype
            torch.float32
        """
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        return FactoredMatrix(self._root.to(dtype), self._workspace)

    def of_points(self, points: Tensor, weights: Tensor) -> FactoredMatrix:
        """The sum over some of the points alone, each with a weight.

        Examples:
            >>> first = H.of_points(torch.arange(5), torch.ones(5))
            >>> rest = H.of_points(torch.arange(5, 20), torch.ones(15))
            >>> torch.allclose(first.to_dense() + rest.to_dense(), H.to_dense())
            True
        """
        points = resolve_indices(points, self._root.num_points, self.device, "points")
        if not isinstance(weights, Tensor) or weights.shape != points.shape:
            raise ValueError(f"weights must be a tensor ({points.numel()},), one for each point")
        chosen = self._root.select(points, weights.sqrt().to(self.dtype))
        return FactoredMatrix(chosen, self._workspace)

    def _matmat(self, rhs: Tensor) -> Tensor:
        return require_finite(self._root.product(rhs, self._workspace), rhs)

    @takes_arrays
    def root_product(self, rhs: Tensor) -> Tensor:
        """Multiply the tall root S = RJ of H = SᵀS by vectors.

        Each product is a linearised forward pass over all points, weighted by the loss.

        Args:
            rhs: (N,) or (N, k).

        Returns:
            (n·q,) or (n·q, k); the q rows of a point follow each other.

        Examples:
            >>> root = H.root_product(b)
            >>> root.shape, torch.allclose(root @ root, b @ (H @ b))
            (torch.Size([60]), True)
        """
        self._check_vectors(rhs)
        with torch.no_grad():
            columns = rhs.detach() if rhs.ndim == 2 else rhs.detach()[:, None]
            result = require_finite(self._root.apply(columns, self._workspace), columns)
        return result if rhs.ndim == 2 else result.squeeze(1)

    @takes_arrays
    def root_transposed(self, values: Tensor) -> Tensor:
        """Multiply the transposed root Sᵀ by vectors: backward passes over all points.

        Args:
            values: (n·q,) or (n·q, k), in the order of `root_product`.

        Returns:
            (N,) or (N, k).

        Examples:
            >>> torch.allclose(H.root_transposed(H.root_product(b)), H @ b)
            True
        """
        rows = self.num_root_rows
        if not isinstance(values, Tensor):
            raise TypeError(f"values must be a tensor; got {type(values).__name__}")
        check_dense(values, "values")
        if values.ndim not in (1, 2) or values.shape[0] != rows or values.dtype != self.dtype:
            raise ValueError(
                f"values must have shape ({rows},) or ({rows}, k) and be {self.dtype};"
                f" got {tuple(values.shape)} of {values.dtype}"
            )
        with torch.no_grad():
            columns = values.detach() if values.ndim == 2 else values.detach()[:, None]
            result = self._root.apply_transposed(columns, self._workspace)
            require_finite(result, columns)
        return result if values.ndim == 2 else result.squeeze(1)

    def root_columns(self, index: Indices) -> Tensor:
        """Columns S[:, index] of the root S of H = SᵀS, (n·q, k).

        Examples:
            >>> S = H.root_columns(slice(None))
            >>> torch.allclose(S.T @ S, H.to_dense())
            True
        """
        with torch.no_grad():
            columns = resolve_indices(index, self.shape[0], self.device, "index")
            return self._root.columns(columns)

    def kernel(self, damping: DampingLike | Damping = 1.0) -> TangentKernel:
        """The tangent kernel K = S D⁻¹ Sᵀ, weighted by the loss, for H = SᵀS: (n·q, n·q).

        With D = 1 it has the same non-zero eigenvalues as H. Where n·q is less than N, it is the
        smaller matrix.

        Args:
            damping: D, positive: a number, a tensor (N,), or numbers by the names of parameters or
                layers.

        Examples:
            >>> K = H.kernel()
            >>> K.shape
            (60, 60)
            >>> round(K.trace() / H.trace(), 9)
            1.0
        """
        resolved = as_damping(damping, self.shape[0], self.layout)
        with torch.no_grad():
            return TangentKernel(self._root, resolved, self._workspace)

    def diagonal(self) -> Tensor:
        """Compute all N diagonal entries, exactly.

        Examples:
            >>> torch.allclose(H.diagonal(), H.to_dense().diagonal())
            True
        """
        return self._root.diagonal(self._workspace)

    def block(self, rows: Index, cols: Index) -> Tensor:
        """Compute the dense block ``rows`` x ``cols``, exactly; it always has two dimensions.

        Args:
            rows: integers, a slice, a mask, or one integer.
            cols: likewise.

        Raises:
            InsufficientMemoryError: the block would not fit into free memory.

        Examples:
            >>> H.block(3, range(5)).shape
            torch.Size([1, 5])
        """
        with torch.no_grad():
            row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
            col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
            size = row_index.numel() * col_index.numel() * self.dtype.itemsize
            self._require(
                size,
                f"a dense block of {row_index.numel()} x {col_index.numel()} entries",
                ("ask for fewer rows or columns at a time", "use H @ v instead of a dense block"),
                self._root.block_bytes(row_index, col_index, self._workspace),
            )
            return self._root.block(row_index, col_index, self._workspace)

    def _require(
        self, num_bytes: int, what: str, ways_out: tuple[str, ...], temporary: int | None = None
    ) -> None:
        """Refuse a result that is too large for the memory of some rank, on all ranks.

        Temporary memory is the whole workspace, unless it is known better.
        """
        more = self._workspace if temporary is None else temporary
        with self._root.ranks.agreed():
            require_bytes(num_bytes + more, self.device, what, ways_out)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Compute many blocks H[rows[b], cols[b]] of equal size, exactly.

        A block is symmetric to the last bit if its rows and columns are the same.

        Args:
            rows: integers, (B, m).
            cols: integers, (B, k).

        Returns:
            (B, m, k).

        Examples:
            >>> rows = torch.tensor([[0, 1], [2, 3]])
            >>> blocks = H.blocks(rows, rows + 10)
            >>> torch.allclose(blocks[1], H[[2, 3], [12, 13]])
            True
        """
        with torch.no_grad():
            row_index, col_index = resolve_blocks(rows, cols, self.shape[0], self.device)
            size = row_index.numel() * col_index.shape[1] * self.dtype.itemsize
            self._require(
                size,
                f"{len(row_index)} blocks of {row_index.shape[1]} x {col_index.shape[1]} entries",
                ("ask for fewer blocks at a time", "ask for smaller blocks"),
            )
            return self._root.blocks(row_index, col_index, self._workspace)

    def partial_product(self, rhs: Tensor) -> Tensor:
        """The term of this rank's points, times (N,) or (N, k); all ranks' terms add up to H @ rhs.

        All ranks call it with the same vectors.

        Examples:
            >>> torch.allclose(H.partial_product(b[:, None]), H @ b[:, None])  # there is one rank
            True
        """
        self._check_vectors(rhs)
        columns = rhs if rhs.ndim == 2 else rhs[:, None]
        with torch.no_grad():
            return self._root.partial_product(columns, self._workspace).view(rhs.shape)

    def partial_blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks of the term of this rank's points: (B, m), (B, k) → (B, m, k).

        All ranks call it with the same indices.

        Examples:
            >>> rows = torch.tensor([[0, 1], [2, 3]])
            >>> H.partial_blocks(rows, rows).shape
            torch.Size([2, 2, 2])
        """
        with torch.no_grad():
            row_index, col_index = resolve_blocks(rows, cols, self.shape[0], self.device)
            return self._root.partial_blocks(row_index, col_index, self._workspace)

    def orders(self) -> dict[str, Tensor]:
        """Return orders of the parameters that follow the network, each a permutation (N,).

        "layer-output-input" goes through the layers, the units of a layer and the inputs of a unit,
        its bias last. "layer-input-output" goes through the layers, the inputs of a layer, the
        biases last, and the units. `compress` builds its trees from them.

        Examples:
            >>> sorted(H.orders())
            ['layer-input-output', 'layer-output-input']
            >>> H.orders()["layer-output-input"][:6]  # four weights and the bias of unit 0, ...
            tensor([ 0,  1,  2,  3, 24,  4])
        """
        return self._root.orders()

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """Compute the entries H[rows[j], cols[j]], exactly.

        Args:
            rows: integers, (m,).
            cols: integers, (m,).

        Returns:
            (m,).

        Examples:
            >>> torch.allclose(H.pairs([0, 7], [3, 9]), torch.stack([H[0, 3], H[7, 9]]))
            True
        """
        with torch.no_grad():
            row_index, col_index = resolve_pairs(rows, cols, self.shape[0], self.device)
            values = torch.zeros(row_index.numel(), dtype=self.dtype, device=self.device)
            step = max(1, self._workspace // (2 * _PAIR_BYTES))
            parts = (tensor.split(step) for tensor in (values, row_index, col_index))
            for target, first, second in zip(*parts, strict=True):
                target.copy_(self._root.pairs(first, second, self._workspace // 2))
            return values

    def to_dense(self) -> Tensor:
        """Compute the whole matrix, (N, N), if there is memory for it.

        Examples:
            >>> H.to_dense().shape
            torch.Size([51, 51])
        """
        return self.block(slice(None), slice(None))
