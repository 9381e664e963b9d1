"""Factorization: (A + damping·I)⁻¹ of a hierarchical matrix A, to solve and sample with."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from hcurv.cluster_tree import ClusterTree
from hcurv.hierarchical.elimination import LevelFactor
from hcurv.hierarchical.global_part import GlobalPart, GlobalUpdate, make_update
from hcurv.hierarchical.inverse_blocks import inverse_diagonal
from hcurv.hierarchical.parts import map_tensors, tensors_of
from hcurv.indexing import check_count
from hcurv.operators import SymmetricOperator

__all__ = ["Factorization", "NotPositiveDefiniteError"]

_COLUMN_FLOATS = 2**23  # of a vector of the lowest level, taken at a time


class NotPositiveDefiniteError(ValueError):
    """A + damping·I is not positive definite, so that it has no Cholesky factorization.

    Attributes:
        damping: that was asked for.
        smallest_damping: one that works, and hardly any smaller one does (estimated).
    """

    def __init__(self, message: str, damping: float, smallest_damping: float) -> None:
        super().__init__(message)
        self.damping = damping
        self.smallest_damping = smallest_damping


class Factorization(SymmetricOperator):
    """(A + damping·I)⁻¹ as a matrix: ``F @ b`` solves. Made by `HMatrix.factorize`; immutable.

    `solve` and `logdet` pass gradients on to a damping (and right-hand side) that requires them.

    Attributes:
        tree: order and clusters of the rows.
        levels: what was eliminated on each level, from the leaves to the root.
        log_determinant: log |det| over the rows that the tree holds.
        num_negative: negative eigenvalues of A + damping·I, that is, eigenvalues of A below
            −damping (Sylvester's law of inertia); 0 unless ``definite=False``.
        update: what a global part of A changes, or None.
    """

    def __init__(
        self,
        tree: ClusterTree,
        levels: tuple[LevelFactor, ...],
        damping: Tensor,
        log_determinant: float,
        num_negative: int,
        dtype: torch.dtype,
        update: GlobalUpdate | None = None,
    ) -> None:
        self.tree = tree
        self.levels = levels
        self.log_determinant = log_determinant
        self.num_negative = num_negative
        self.update = update
        self._damping = damping
        self._dtype = dtype

    def __repr__(self) -> str:
        """Size, damping and storage in one line."""
        return (
            f"Factorization(N={self.shape[0]}, damping={self.damping:.3g},"
            f" compression_rate={self.compression_rate:.3g}, dtype={self.dtype})"
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
    def damping(self) -> float:
        """What was added to the diagonal."""
        return float(self._damping.detach())

    @property
    def num_stored(self) -> int:
        """Every float that solving needs, the bases that it shares with the matrix included."""
        own = sum(step.num_stored for level in self.levels for step in level.eliminations)
        return own + (0 if self.update is None else self.update.num_stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all of these floats and indices."""
        return sum(t.nbytes for t in tensors_of((self.tree, self.levels, self.update)))

    def solve(self, rhs: Tensor, *, operator: Any = None, num_refinements: int = 3) -> Tensor:
        """Solve (A + damping·I) x = rhs.

        Args:
            rhs: (N,) or (N, k).
            operator: anything with ``@``, without the damping, to refine against: A itself, for
                full accuracy of its precision, or the matrix that A approximates. Right-hand side
                and solution are then in the precision of this operator.
            num_refinements: most steps of refinement; columns that no longer improve are left.
        """
        damping = self._damping
        if operator is None:
            self._check_vectors(rhs)
        elif tuple(operator.shape) != self.shape:
            raise ValueError(
                f"the operator must have shape {self.shape}; got {tuple(operator.shape)}"
            )
        else:
            num_refinements = check_count(num_refinements, "num_refinements", least=0)
            self._check_vectors(rhs, operator.dtype)

        def run(values: Tensor) -> Tensor:
            columns = values if values.ndim == 2 else values[:, None]
            if operator is None:
                result = self._matmat(columns)
            else:
                result = self._refine(columns, operator, num_refinements)
            return result.view_as(values)

        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        if torch.is_grad_enabled() and (rhs.requires_grad or damping.requires_grad):
            return _Solve.apply(rhs, damping, run)  # type: ignore[no-any-return,no-untyped-call]
        with torch.no_grad():
            return run(rhs.detach())

    def logdet(self) -> Tensor:
        """log |det(A + damping·I)|, in double precision."""
        damping = self._damping
        if torch.is_grad_enabled() and damping.requires_grad:
            return _LogDet.apply(damping, self)  # type: ignore[no-any-return,no-untyped-call]
        return self._logdet()

    def sqrt_solve(self, rhs: Tensor) -> Tensor:
        """G times ``rhs``, (N,) or (N, k), where G Gᵀ = (A + damping·I)⁻¹."""
        self._check_vectors(rhs)
        self._require_definite("sqrt_solve")
        if rhs.numel() == 0:
            return torch.zeros_like(rhs)
        with torch.no_grad():
            columns = rhs.detach() if rhs.ndim == 2 else rhs.detach()[:, None]
            if self.update is not None:
                columns = self.update.invert_root(columns.clone())
            return self._half_solve(columns).view_as(rhs)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Samples from the normal distribution N(0, (A + damping·I)⁻¹), (num, N).

        Args:
            num: number of samples.
            generator: of the random numbers; None for torch's own.
        """
        num = check_count(num, "num", least=0)
        self._require_definite("sample")
        where = self.device if generator is None else generator.device
        noise = torch.randn(self.shape[0], num, dtype=self.dtype, device=where, generator=generator)
        return self.sqrt_solve(noise.to(self.device)).T.contiguous()

    def inverse_diagonal(self) -> Tensor:
        """Diagonal of (A + damping·I)⁻¹, exactly, with O(N r²) work, (N,)."""
        with torch.no_grad():
            return self._inverse_diagonal().to(self.dtype)

    def diagonal(self) -> Tensor:
        """As `inverse_diagonal`."""
        return self.inverse_diagonal()

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Factorization:
        """This factorization on another device or in another precision."""
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
        kind = self.dtype if dtype is None else dtype

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, kind if tensor.is_floating_point() else None)

        tree, levels, update = map_tensors(move, (self.tree, self.levels, self.update))
        return Factorization(
            tree, levels, self._damping, self.log_determinant, self.num_negative, kind, update
        )

    def updated(self, part: GlobalPart, definite: bool) -> Factorization:
        """The factorization with a global part added to A."""
        apply = self._half_transposed if definite else self._matmat
        found = make_update(part, self.shape[0], apply, definite)
        return Factorization(
            self.tree,
            self.levels,
            self._damping,
            self.log_determinant + found.log_determinant,
            self.num_negative + found.num_negative,
            self.dtype,
            found.update,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a safetensors file, atomically; `hcurv.load` reads it."""
        from hcurv.hierarchical.storage import save

        save(self, path)

    def _require_definite(self, what: str) -> None:
        if self.num_negative:
            raise ValueError(
                f"{what} needs a positive definite matrix; this one has {self.num_negative}"
                " negative eigenvalues"
            )

    def _logdet(self) -> Tensor:
        total = torch.tensor(self.log_determinant, dtype=torch.float64)
        num_zeros = self.tree.size - self.tree.num_kept
        if num_zeros:
            total = total + num_zeros * self._damping.detach().abs().log().cpu()
        return total

    def _inverse_diagonal(self) -> Tensor:
        result = torch.full((self.shape[0],), torch.inf, dtype=torch.float64, device=self.device)
        if self.tree.num_kept < self.tree.size:
            result.fill_(1 / self.damping)
        result[self.tree.permutation] = inverse_diagonal(self.levels)
        if self.update is not None:
            result += self._diagonal_change()
        return result

    def _diagonal_change(self) -> Tensor:
        """What the update adds to the diagonal of the inverse."""
        assert self.update is not None
        basis = GlobalPart(self.update.rows, self.update.basis).whole(self.shape[0])
        values = -self.update.values
        if self.update.between:
            basis, values = self._half_solve(basis), values / (1 - values)
        return basis.double().square() @ values

    def _matmat(self, rhs: Tensor) -> Tensor:
        if self.update is not None and self.update.between:
            return self._half_solve(self.update.invert(self._half_transposed(rhs)))
        scale = 1 / self.damping if self.tree.num_kept < self.tree.size else 0.0
        solved = self._by_columns(rhs, self._both, scale)
        return solved if self.update is None else self.update.correct(rhs, solved)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        """G of A without its global part."""
        return self._by_columns(rhs, self._half, self._zero_root)

    def _half_transposed(self, rhs: Tensor) -> Tensor:
        """Gᵀ."""
        return self._by_columns(rhs, self._up, self._zero_root)

    @property
    def _zero_root(self) -> float:
        return self.damping**-0.5 if self.tree.num_kept < self.tree.size else 0.0

    def _by_columns(
        self, rhs: Tensor, run: Callable[[Tensor], Tensor], zero_scale: float
    ) -> Tensor:
        """Apply ``run`` in tree order, some columns at a time; zero rows are scaled."""
        kept = self.tree.permutation
        result = rhs * zero_scale if kept.numel() < self.tree.size else torch.empty_like(rhs)
        step = max(1, _COLUMN_FLOATS // (kept.numel() + 1))
        for start in range(0, rhs.shape[1], step):
            columns = slice(start, start + step)
            inputs = rhs.new_zeros(kept.numel() + 1, rhs[:, columns].shape[1])
            torch.index_select(rhs[:, columns], 0, kept, out=inputs[:-1])
            result[:, columns].index_copy_(0, kept, run(inputs)[:-1])
        return result

    def _both(self, values: Tensor) -> Tensor:
        """The whole solve: up and down the tree."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.up(vectors[-1]))
        return self._down(vectors)

    def _up(self, values: Tensor) -> Tensor:
        """Up the tree only; what each level eliminated stays in its place."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.up(vectors[-1]))
        for number in reversed(range(len(self.levels))):
            self.levels[number].put_back(vectors[number + 1], vectors[number])
        return vectors[0]

    def _half(self, values: Tensor) -> Tensor:
        """Down the tree only."""
        vectors = [values]
        for level in self.levels:
            vectors.append(level.skip(vectors[-1]))
        return self._down(vectors)

    def _down(self, vectors: list[Tensor]) -> Tensor:
        for number in reversed(range(len(self.levels))):
            self.levels[number].down(vectors[number + 1], vectors[number])
        return vectors[0]

    def _refine(self, rhs: Tensor, operator: Any, num_refinements: int) -> Tensor:
        best = torch.zeros_like(rhs)
        residual, least = rhs, torch.linalg.vector_norm(rhs, dim=0, dtype=torch.float64)
        for step in range(num_refinements + 1):
            trial = best + self._matmat(residual.to(self.dtype)).to(rhs.dtype)
            if step == 0 and num_refinements == 0:
                return trial
            new = rhs - (operator @ trial + self.damping * trial)
            norms = torch.linalg.vector_norm(new, dim=0, dtype=torch.float64)
            better = norms < least
            best = torch.where(better, trial, best)
            residual = torch.where(better, new, residual)
            least = torch.where(better, norms, least)
            if not bool(better.any()):
                break
        return best


class _Solve(torch.autograd.Function):
    """x = (A + λI)⁻¹ b; with w = (A + λI)⁻¹ ∂f/∂x: ∂f/∂b = w and ∂f/∂λ = −wᵀx."""

    @staticmethod
    def forward(ctx: Any, rhs: Tensor, damping: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        result = run(rhs.detach())
        ctx.run = run
        ctx.save_for_backward(result, damping)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        result, damping = ctx.saved_tensors
        solved = _Solve.apply(gradients[0].contiguous(), damping, ctx.run)  # type: ignore[no-untyped-call]
        slope = None
        if ctx.needs_input_grad[1]:
            slope = -(solved.double() * result.double()).sum().to(damping)
        return solved, slope, None


class _LogDet(torch.autograd.Function):
    """log det(A + λI); its derivative with respect to λ is the trace of the inverse."""

    @staticmethod
    def forward(ctx: Any, damping: Tensor, factorization: Factorization) -> Tensor:
        ctx.factorization = factorization
        ctx.save_for_backward(damping)
        return factorization._logdet().to(damping.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (damping,) = ctx.saved_tensors
        trace = ctx.factorization._inverse_diagonal().sum()
        return (gradients[0] * trace).to(damping), None
