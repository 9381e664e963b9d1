"""The tangent kernel K = S D⁻¹ Sᵀ: the Gauss-Newton Hessian seen from the points.

S is the root of H = SᵀS, with a row for each point i and each row a of the loss's square root R_i.
H and S Sᵀ have the same non-zero eigenvalues; where n·q is less than N, K is the smaller of the
two. Its entries are as cheap as those of H.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from hcurv.damping import Damping, DampingLike
from hcurv.factorized import Factorized
from hcurv.indexing import Index, resolve_blocks, resolve_indices
from hcurv.memory import require_bytes
from hcurv.network.point_order import similarity_order
from hcurv.network.root import KernelParts, Root
from hcurv.operators import SymmetricOperator
from hcurv.ranks import OneRank

__all__ = ["TangentKernel"]

# Floats of the operands of one batch of blocks.
_BATCH_FLOATS = 2**24
# Random features by which points are ordered, so that neighbours are alike.
_NUM_FEATURES = 12


class TangentKernel(SymmetricOperator):
    """K = S D⁻¹ Sᵀ as a matrix: entries, blocks, products. Made by `GaussNewton.kernel`.

    Row i·q + a belongs to point i and row a of its loss's square root.

    Args:
        root: S.
        damping: D, positive.
        workspace: bytes of temporary memory that one call may use beyond its result.

    Examples:
        >>> K = H.kernel()
        >>> root = H.root_columns(slice(None))
        >>> torch.allclose(K.to_dense(), root @ root.T)
        True
    """

    def __init__(self, root: Root, damping: Damping, workspace: int) -> None:
        damping.require_positive("the kernel divides by it")
        self._root, self._damping, self._workspace = root, damping, workspace
        self._num_rows = root.num_rows

    @cached_property
    def _parts(self) -> KernelParts:
        diagonal = self._damping.diagonal(self._root.layout.size, self._root.device)
        return self._root.kernel_parts(1 / diagonal)

    def __repr__(self) -> str:
        """Size in one line."""
        return (
            f"TangentKernel(n·q={self.shape[0]}, num_points={self._root.num_points},"
            f" dtype={self.dtype})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(n·q, n·q)``."""
        size = self._root.num_points * self._num_rows
        return (size, size)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""
        return self._root.dtype

    @property
    def device(self) -> torch.device:
        """Where the entries are computed."""
        return self._root.device

    @property
    def ranks(self) -> OneRank:
        """The processes that have the points.

        Examples:
            >>> H.kernel().ranks.size
            1
        """
        return self._root.ranks

    @property
    def num_stored(self) -> int:
        """Floats of the factors, which the kernel shares with its matrix."""
        return self._root.num_stored

    def orders(self) -> dict[str, Tensor]:
        """Orders of the rows in which neighbours are alike, by name.

        "point-output" lists the points by similarity, and for each of them its rows;
        "output-point" lists for each row of R all points by similarity.

        Examples:
            >>> {name: order.numel() for name, order in H.kernel().orders().items()}
            {'point-output': 60, 'output-point': 60}
        """
        generator = torch.Generator().manual_seed(0)
        points = similarity_order(self._root.point_features(_NUM_FEATURES, generator))
        rows = points[:, None] * self._num_rows + torch.arange(self._num_rows, device=self.device)
        return {"point-output": rows.reshape(-1), "output-point": rows.T.reshape(-1)}

    def _matmat(self, rhs: Tensor) -> Tensor:
        back = self._root.apply_transposed(rhs, self._workspace)
        scale = self._damping.diagonal(back.shape[0], back.device).to(back.dtype)
        back /= scale[:, None]
        return self._root.apply(back, self._workspace)

    def in_precision(self, dtype: torch.dtype) -> TangentKernel:
        """The same kernel from factors that are converted to another precision.

        Examples:
            >>> H.kernel().in_precision(torch.float32).dtype
            torch.float32
        """
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        return TangentKernel(self._root.to(dtype), self._damping, self._workspace)

    def factorize(self, damping: DampingLike) -> Factorized:
        """Invert K + D by a dense Cholesky factorization, if there is memory for it.

        The precision is double where single would not do. Larger kernels can be compressed.

        Args:
            damping: added to the diagonal: a positive number, or n·q of them.

        Raises:
            InsufficientMemoryError: 2·(n·q)² floats do not fit.

        Examples:
            >>> K = H.kernel()
            >>> rhs = torch.ones(60, dtype=torch.float64)
            >>> x = K.factorize(0.1).solve(rhs)
            >>> torch.allclose(K @ x + 0.1 * x, rhs)
            True
        """
        from hcurv.inversion.sample_space import factorize_kernel

        return factorize_kernel(self, damping)

    def diagonal(self) -> Tensor:
        """The n·q diagonal entries.

        Examples:
            >>> torch.allclose(H.kernel().diagonal(), H.kernel().to_dense().diagonal())
            True
        """
        with torch.no_grad():
            return self._parts.diagonal()

    def to_dense(self) -> Tensor:
        """The whole kernel, (n·q, n·q), if there is memory for it.

        Examples:
            >>> torch.allclose(H.kernel().to_dense() @ torch.ones(60).double(),
            ...                H.kernel() @ torch.ones(60).double())
            True
        """
        size = self.shape[0]
        with self._root.ranks.agreed():
            require_bytes(
                size**2 * self.dtype.itemsize + self.fill_bytes,
                self.device,
                f"a dense kernel of {size} x {size} entries",
                ("use fewer points", "use products with the kernel instead"),
            )
        found = self.fill(torch.empty(size, size, dtype=self.dtype, device=self.device))
        # No entry is larger than the largest one of the diagonal.
        if not bool(torch.isfinite(found.diagonal()).all()):
            raise ValueError(
                f"entries of the kernel overflow {self.dtype}: the damping it divides by is too"
                " small for this matrix (use float64 or a larger damping)"
            )
        return found

    @property
    def fill_bytes(self) -> int:
        """Bytes of temporary memory that `fill` takes: three tiles, two of them on the diagonal.

        Examples:
            >>> H.kernel().fill_bytes == 3 * 60**2 * 8
            True
        """
        tile = min(self._root.num_points, self._parts.tile_points) * self._num_rows
        return 3 * tile**2 * self.dtype.itemsize

    def fill(self, result: Tensor, *, lower: bool = False) -> Tensor:
        """Write the kernel to ``result``, (n·q, n·q), in its precision, and return it.

        Only tiles on and below the diagonal are computed; the others are their transposes.

        Args:
            result: what is written to.
            lower: leave the tiles above the diagonal as they are. A Cholesky factorization does not
                read them.

        Examples:
            >>> H.kernel().fill(torch.empty(60, 60, dtype=torch.float64)).shape
            torch.Size([60, 60])
        """
        n, q = self._root.num_points, self._num_rows
        step = min(n, self._parts.tile_points)
        # One product of factors, used again and again: fresh memory costs more than the arithmetic.
        space = torch.empty(step * q, step * q, dtype=result.dtype, device=self.device)
        with torch.no_grad():
            for top in range(0, n, step):
                first = slice(top, min(top + step, n))
                for left in range(0, top + 1, step):
                    second = slice(left, min(left + step, n))
                    rows, cols = (slice(s.start * q, s.stop * q) for s in (first, second))
                    tile = result[rows, cols]
                    self._parts.tile(first, second, tile, space)
                    if left == top:
                        # Both halves are the same to the last bit.
                        tile.copy_((tile + tile.T) / 2)
                    elif not lower:
                        result[cols, rows] = tile.T
        return result

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols``.

        Examples:
            >>> H.kernel().block([0, 3], slice(5)).shape
            torch.Size([2, 5])
        """
        row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
        col_index = resolve_indices(cols, self.shape[0], self.device, "cols")
        with self._root.ranks.agreed():
            require_bytes(
                row_index.numel() * col_index.numel() * self.dtype.itemsize + self._workspace,
                self.device,
                f"a dense block of {row_index.numel()} x {col_index.numel()} entries",
                ("ask for fewer rows or columns at a time",),
            )
        if row_index.numel() == 0 or col_index.numel() == 0:
            return torch.zeros(
                row_index.numel(), col_index.numel(), dtype=self.dtype, device=self.device
            )
        with torch.no_grad():
            return self._parts.entries(row_index[None], col_index[None])[0]

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks K[rows[b], cols[b]] of equal size: (B, m), (B, k) → (B, m, k).

        Examples:
            >>> rows = torch.tensor([[0, 1], [7, 8]])
            >>> H.kernel().blocks(rows, rows).shape
            torch.Size([2, 2, 2])
        """
        row_index, col_index = resolve_blocks(rows, cols, self.shape[0], self.device)
        num_blocks, num_rows, num_cols = *row_index.shape, col_index.shape[1]
        result = torch.zeros(num_blocks, num_rows, num_cols, dtype=self.dtype, device=self.device)
        if result.numel() == 0:
            return result
        step = max(1, _BATCH_FLOATS // self._parts.batch_floats(num_rows, num_cols))
        with torch.no_grad():
            for start in range(0, num_blocks, step):
                part = slice(start, start + step)
                result[part] = self._parts.entries(row_index[part], col_index[part])
        return result
