"""Block conjugate gradients: many right-hand sides that share one Krylov space.

Ordinary conjugate gradients for k right-hand sides build k Krylov spaces, and each column uses its
own alone. The block method minimises the error of every column over the sum of all of them, so
that k columns take away k of the largest eigenvalues at once, and the number of iterations falls:
on a classifier of 15,910 parameters, 16 columns needed a third of the iterations
(`benchmarks/trusted.py`).

The iteration keeps its residuals as R = Q C with Qᵀ M⁻¹ Q = I, M the preconditioner, which is
Dubrulle's stable form (Retooling the method of block conjugate gradients, 2001): with directions S,

    X += S (SᵀPS)⁻¹ C,   Q ζ = Q − P S (SᵀPS)⁻¹,   S = M⁻¹Q + S ζᵀ,   C = ζ C.

Columns of Q that have become dependent are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.linalg.nystrom import double_gram
from hcurv.operators import PROBE_SEED

__all__ = ["BLOCK_COLUMNS", "BlockResult", "block_cg"]

Product = Callable[[Tensor], Tensor]

# More columns than this are solved one block after the other. Wider blocks need fewer iterations,
# but their own work grows with the square of the width.
BLOCK_COLUMNS = 64
# Directions whose squared length, relative to the others, is below this many units of rounding
# are dependent on them, and below this many need a second round to be made orthonormal.
_DEPENDENT, _GRADED = 100.0, 1e5
# A relative residual of this many units of rounding is zero.
_ROUNDING = 10.0
# The recursion loses the true residual by and by. It is started again from the true one so often.
_MAX_RESTARTS = 20
# The recursion ends when the residual, in the norm of M⁻¹, has grown by eps to this power. Ordinary
# growth is by √κ(M⁻¹P) at most, and nothing can be solved where κ is more than 1/eps.
_GROWTH_POWER = -0.5
# A restart that does not take the residual below this share of what it was is the last.
_PROGRESS = 0.5
# The recursion's residuals are believed if a sum of them with random signs differs from the true
# one by less than this share of the tolerance. Signs that cancel nine tenths of a difference are
# rare, and the rest, 30 % of the tolerance, is harmless.
_DRIFT = 0.03
# A product with one column takes about as long as with a few, so that the test pays from here on.
_SEVERAL = 4
# The error is estimated by what the last iterations changed, this share of all of them.
_WINDOW_SHARE = 0.125
# Changes that fall more slowly than by this share from one window to the next are taken to fall so.
_SLOWEST = 0.1


@dataclass(frozen=True)
class BlockResult:
    """What block conjugate gradients found.

    Attributes:
        solution: X, (N, k).
        residuals: relative residuals ‖b − P x‖/‖b‖, (k,): computed from the solution, or those of
            the recursion where a product with a sum of the solutions confirms them.
        errors: estimates of the relative error ‖x − P⁻¹b‖_P/‖P⁻¹b‖_P, (k,).
        num_iterations: number of iterations, of all blocks together.
        converged: whether every column reached the tolerance, in both measures.
    """

    solution: Tensor
    residuals: Tensor
    errors: Tensor
    num_iterations: int
    converged: bool


def block_cg(
    product: Product,
    rhs: Tensor,
    *,
    precondition: Product | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    start: Tensor | None = None,
) -> BlockResult:
    """Solve P X = B for a positive definite P, known by its products.

    A column is finished when its relative residual is below the tolerance, and the relative error
    of x in the norm of P is too. The second matters for small dampings: a residual of 1e-2 can go
    with an error of 100 % in the directions of small eigenvalues, which decide variances bᵀP⁻¹b.

    Args:
        product: P times (N, j), for any j.
        rhs: B, (N, k).
        precondition: M⁻¹ times (N, j), symmetric and positive definite; None for the identity.
        tolerance: of residuals and of errors.
        max_iterations: most iterations of one block of columns.
        start: first guess, (N, k); None for zero.
    """
    solution = torch.zeros_like(rhs) if start is None else start.clone()
    residuals = torch.zeros(rhs.shape[1], dtype=torch.float64, device=rhs.device)
    errors = torch.zeros_like(residuals)
    total = 0
    for first in range(0, rhs.shape[1], BLOCK_COLUMNS):
        part = slice(first, first + BLOCK_COLUMNS)
        run = _Block(product, precondition, rhs[:, part], solution[:, part], start is not None)
        run.iterate(tolerance, max_iterations)
        solution[:, part] = run.solution
        residuals[part], errors[part] = run.residuals, run.errors
        total += run.num_iterations
    # The recursion's residual is compared with the tolerance, and the true one is a little larger.
    converged = bool((residuals <= 1.1 * tolerance).all() & (errors <= tolerance).all())
    return BlockResult(solution, residuals, errors, total, converged)


class _Block:
    """The iteration of one block of columns."""

    def __init__(
        self,
        product: Product,
        precondition: Product | None,
        rhs: Tensor,
        start: Tensor,
        is_started: bool,
    ) -> None:
        self._product, self._precondition = product, precondition
        self._rhs, self.solution = rhs, start.clone()
        self._norms = _norms(rhs)
        self._safe = torch.where(self._norms > 0, self._norms, 1.0)
        self._is_started = is_started
        self.num_iterations = 0
        # ‖x_{j+1} − x_j‖²_P of every iteration and column: they add up to ‖x − x_0‖²_P.
        self._changes: list[Tensor] = []
        self.residuals = torch.where(self._norms > 0, 1.0, 0.0).double()
        self.errors = self.residuals.clone()

    def iterate(self, tolerance: float, max_iterations: int) -> None:
        """Iterate until all columns are finished, or nothing more can be gained."""
        residual = self._rhs - self._product(self.solution) if self._is_started else self._rhs
        self.residuals = _norms(residual) / self._safe
        self.errors = torch.where(self.residuals > 0, 1.0, 0.0).double()
        for _ in range(_MAX_RESTARTS):
            before, earlier = self.residuals, self.solution.clone()
            gain = self._gain(residual)
            recursive = self._run(residual, tolerance, max_iterations)
            residual = self._true_residual(recursive, tolerance)
            self.residuals = _norms(residual) / self._safe
            # An iterate can have a larger residual than zero has, and yet a smaller error.
            spoilt = ~((self.residuals <= before.clamp(min=1.0)) | (self._gain(residual) > gain))
            if bool(spoilt.any()):  # rounding made these columns worse: take them back
                self.solution[:, spoilt] = earlier[:, spoilt]
                self.residuals[spoilt], self.errors[spoilt] = before[spoilt], 1.0
                return
            lacking = self.residuals > 1.1 * tolerance
            if not bool(lacking.any()) and not bool((self.errors > tolerance).any()):
                return
            gained = (self.residuals <= _PROGRESS * before) | ~lacking
            if self.num_iterations >= max_iterations or not bool(gained.all()):
                return

    def _true_residual(self, recursive: Tensor | None, tolerance: float) -> Tensor:
        """B − P X: what the recursion says that it is, if a product with one column confirms that.

        For random signs w, the length of a sum D w of columns is ‖D‖_F in the mean square. So one
        product shows how far the residuals of all columns are from the truth.
        """
        if recursive is not None and recursive.shape[1] >= _SEVERAL:
            generator = torch.Generator().manual_seed(PROBE_SEED)
            signs = 2 * torch.randint(0, 2, (recursive.shape[1], 1), generator=generator) - 1
            mixing = (signs.to(self._safe) / self._safe[:, None]).to(recursive.dtype)
            drift = (self._rhs - recursive) @ mixing - self._product(self.solution @ mixing)
            if float(_norms(drift)) <= _DRIFT * tolerance:
                return recursive
        return self._rhs - self._product(self.solution)

    def _gain(self, residual: Tensor) -> Tensor:
        """‖P⁻¹b‖² − ‖x − P⁻¹b‖² in the norm of P, (k,), which is xᵀ(b + r).

        It is −∞ where rounding has made xᵀPx = xᵀ(b − r) negative.
        """
        columns, rhs = self.solution.double(), self._rhs.double()
        gain = torch.linalg.vecdot(columns, rhs + residual.double(), dim=0)
        curvature = torch.linalg.vecdot(columns, rhs - residual.double(), dim=0)
        return torch.where(curvature >= 0, gain, -torch.inf)

    def _run(self, residual: Tensor, tolerance: float, max_iterations: int) -> Tensor | None:
        """Iterate from a residual until the recursion reports convergence.

        Returns:
            The residual that the recursion ends with, or None if it did not converge.
        """
        basis, directions, mixing = self._orthonormal(residual)
        sizes = mixing.norm(dim=0)
        sizes, least = torch.where(sizes > 0, sizes, 1.0), 1.0
        growth = torch.finfo(residual.dtype).eps ** _GROWTH_POWER
        while self.num_iterations < max_iterations and mixing.shape[0]:
            image = self._product(directions)
            curvature = double_gram(directions, image)
            factor, failed = torch.linalg.cholesky_ex((curvature + curvature.T) / 2)
            if int(failed) or not bool(torch.isfinite(factor).all()):
                return None  # dependent directions: start again from the true residual
            halves = torch.linalg.solve_triangular(factor, mixing, upper=False)
            steps = torch.linalg.solve_triangular(factor.T, halves, upper=True)
            inverse = torch.cholesky_inverse(factor).to(image.dtype)
            self.solution.addmm_(directions, steps.to(directions.dtype))
            self._changes.append(halves.square().sum(0))
            self.num_iterations += 1
            basis, preconditioned, change = self._orthonormal(basis.addmm(image, inverse, alpha=-1))
            directions = preconditioned.addmm_(directions, change.T.to(directions.dtype))
            mixing = change @ mixing
            lengths = (mixing * (double_gram(basis, basis) @ mixing)).sum(0).clamp(min=0).sqrt()
            self._estimate_errors(lengths)
            worst = float((mixing.norm(dim=0) / sizes).max())
            if not worst <= growth * least:
                return None  # rounding has spoilt the recursion: start again from the true residual
            least = min(least, worst)
            if bool((lengths <= tolerance * self._safe).all()) and bool(
                (self.errors <= tolerance).all()
            ):
                return basis @ mixing.to(basis.dtype)
        return None

    def _estimate_errors(self, lengths: Tensor) -> None:
        """Estimate the squared error that is left from how fast the changes fall.

        The error of an iterate is the sum of all changes that follow it. With the sum s₁ of the
        last few changes and the sum s₀ of as many before them, a geometric decay leaves
        s₁ q/(1 − q), q = s₁/s₀. Where the changes do not fall, ten times s₁ are taken, since the
        changes of conjugate gradients go up and down. Of a residual that is zero up to rounding,
        nothing is left.

        Args:
            lengths: the norms of the residuals, (k,).
        """
        count = max(1, int(_WINDOW_SHARE * len(self._changes)))
        last = torch.stack(self._changes[-count:]).sum(0)
        before = torch.stack([*self._changes, 0 * last][-2 * count - 1 : -count - 1] or [last])
        ratio = last / before.sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        left = last * ratio / (1 - ratio).clamp(min=_SLOWEST)
        if self._is_started:
            # The changes add up to the energy of what the start lacked. Take that of the solution.
            energy = torch.linalg.vecdot(self.solution.double(), self._rhs.double(), dim=0)
            energy = energy.clamp(min=0)
        else:
            energy = torch.stack(self._changes).sum(0)
        errors = (left / torch.where(energy > 0, energy, 1.0)).sqrt()
        relative = lengths / self._safe
        rounding = _ROUNDING * torch.finfo(self._rhs.dtype).eps
        self.errors = torch.where(relative <= rounding, relative, errors)

    def _orthonormal(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q and M⁻¹Q with Qᵀ M⁻¹ Q = I, and ζ with Q ζ = columns, in double precision."""
        images = columns.clone() if self._precondition is None else self._precondition(columns)
        basis, images, mixing, smallest = _whiten(columns, images)
        if smallest < _GRADED * torch.finfo(columns.dtype).eps:
            # Rounding is large in the directions that were short. Once more makes them orthonormal.
            basis, images, again, _ = _whiten(basis, images)
            mixing = again @ mixing
        return basis, images, mixing


def _whiten(columns: Tensor, images: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """One round of `_Block._orthonormal`, and the smallest squared length that was kept."""
    gram = double_gram(columns, images)
    gram = (gram + gram.T) / 2
    lengths = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
    keep = values > _DEPENDENT * torch.finfo(columns.dtype).eps
    values, vectors = values[keep], vectors[:, keep]
    roots = values.sqrt()
    mixing = (scale[:, None] * vectors / roots).to(columns.dtype)
    smallest = float(values[0]) if values.numel() else 1.0
    return columns @ mixing, images @ mixing, roots[:, None] * vectors.T * lengths, smallest


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=0, dtype=torch.float64)
    return norms
