"""Factorization: (A + D)⁻¹ of a hierarchical matrix A, to solve and sample with."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hcurv.arguments import check_number
from hcurv.arrays import takes_arrays
from hcurv.damping import Damping, DeviceLike
from hcurv.factorized import Factorized, check_float_type
from hcurv.hierarchical.parts.global_part import GlobalPart, GlobalUpdate, make_update
from hcurv.hierarchical.parts.nested_tensors import map_tensors, tensors_of
from hcurv.hierarchical.solving.definite import indefinite_error, overflow_error
from hcurv.hierarchical.solving.elimination import IndefiniteError, LevelFactor
from hcurv.hierarchical.solving.factorize import factorize_levels
from hcurv.hierarchical.solving.refinement import default_tolerance, refined_solve
from hcurv.hierarchical.solving.tree_solves import TreeSolves
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
from hcurv.indexing import check_count
from hcurv.operators import SymmetricOperator
from hcurv.sources import as_operator

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix
    from hcurv.hierarchical.matrix.hmatrix import HMatrix

__all__ = ["Factorization", "factorize", "try_factorize"]


class Factorization(Factorized):
    """(A + D)⁻¹ as a matrix: ``F @ b`` solves. Made by `HMatrix.factorize`; immutable.

    `solve` and `logdet` pass gradients on to a damping (and right-hand side) that requires them.
    The first solve for a single vector copies small blocks into a few sparse matrices, as the first
    product of an `HMatrix` does.

    Attributes:
        tree: order and clusters of the rows.
        levels: what was eliminated on each level, from the leaves to the root.
        log_determinant: log |det| over the rows that the tree holds.
        num_negative: number of negative eigenvalues of A + D. With D = λI these are the
            eigenvalues of A below −λ (Sylvester's law of inertia). It is 0 unless
            ``definite=False``.
        update: what a global part of A changes, or None.

    Examples:
        >>> F = A.factorize(damping=1e-2)
        >>> F
        Factorization(N=51, damping=0.01, ...)
        >>> x = F.solve(b)
        >>> torch.allclose(A @ x + 1e-2 * x, b)
        True
        >>> F.sample(3).shape, F.inverse_diagonal().shape
        (torch.Size([3, 51]), torch.Size([51]))
    """

    def __init__(
        self,
        tree: ClusterTree,
        levels: tuple[LevelFactor, ...],
        damping: Damping,
        log_determinant: float,
        num_negative: int,
        dtype: torch.dtype,
        update: GlobalUpdate | None = None,
    ) -> None:
        super().__init__(damping)
        self.tree = tree
        self.levels = levels
        self.log_determinant = log_determinant
        self.num_negative = num_negative
        self.update = update
        self._dtype = dtype
        self._tree_solves = TreeSolves(tree, levels, damping)

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
        """Number of floats that solving needs, with the bases that it shares with the matrix."""
        total = sum(step.num_stored for level in self.levels for step in level.eliminations)
        if self.update is not None:
            total += self.update.num_stored
        if not self._damping.is_number:
            total += self.tree.size - self.tree.num_kept  # D itself is needed in the zero rows
        return total

    @property
    def nbytes(self) -> int:
        """Number of bytes of all of these floats and of all indices."""
        total = sum(t.nbytes for t in tensors_of((self.tree, self.levels, self.update)))
        return total if self._damping.is_number else total + self._damping.tensor.nbytes

    @property
    def is_definite(self) -> bool:
        """Whether A + D is positive definite."""
        return self.num_negative == 0

    @takes_arrays
    def solve(
        self,
        rhs: Tensor,
        *,
        operator: SymmetricOperator | Tensor | None = None,
        num_refinements: int = 50,
        tolerance: float | None = None,
    ) -> Tensor:
        """Solve (A + D) x = rhs, or the same system with another matrix than A.

        Args:
            rhs: the right-hand sides, (N,) or (N, k).
            operator: H, a matrix near A, without the damping: the matrix that A approximates, or A
                itself in a higher precision. The solution is then refined until it solves
                (H + D) x = rhs, by conjugate gradients with this factorization as the
                preconditioner. Right-hand side and solution have the type of this operator.
            num_refinements: largest number of refinement steps, each with one product with H. The
                residual is never larger than that of the solution without refinement.
            tolerance: relative residual ‖rhs − (H + D) x‖/‖rhs‖ at which a column is finished.
                None means 1e-6 in double and 1e-4 in single precision.

        Warns:
            ConvergenceWarning: a refined solution did not reach the tolerance.

        Examples:
            >>> x = F.solve(b)
            >>> torch.allclose(A @ x + 1e-2 * x, b)
            True
            >>> x = F.solve(b, operator=H)
            >>> bool((H @ x + 1e-2 * x - b).norm() < 2e-6 * b.norm())
            True
        """
        num_steps = check_count(num_refinements, "num_refinements", least=0)
        if tolerance is not None:
            tolerance = check_number(tolerance, "tolerance", above=0)
        if operator is None:
            return super().solve(rhs)
        exact = as_operator(operator)
        if exact.shape != self.shape:
            raise ValueError(f"the operator must have shape {self.shape}; got {exact.shape}")
        wanted = default_tolerance(exact.dtype) if tolerance is None else tolerance
        self._check_vectors(rhs, exact.dtype)

        def run(values: Tensor) -> Tensor:
            columns = values if values.ndim == 2 else values[:, None]
            solved = refined_solve(self, exact, self._damping, columns, num_steps, wanted)
            return solved.view_as(values)

        return self._differentiable_solve(rhs, run)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> Factorization:
        """Return this factorization on another device or in another precision.

        Examples:
            >>> F.to(dtype=torch.float32).solve(b.float()).dtype
            torch.float32
        """
        check_float_type(dtype, device)
        dtype = self.dtype if dtype is None else dtype

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None)

        tree, levels, update = map_tensors(move, (self.tree, self.levels, self.update))
        if self.update is not None and update is not None:
            # These few numbers are kept in double precision, whatever the factors are stored in.
            update = replace(update, values=self.update.values.to(device))
        damping = self._damping.to(device)
        return Factorization(
            tree, levels, damping, self.log_determinant, self.num_negative, dtype, update
        )

    def with_global_part(self, part: GlobalPart, definite: bool) -> Factorization:
        """Return the factorization with a global part V Vᵀ added to A.

        Args:
            part: V Vᵀ.
            definite: whether A + D is known to be positive definite.

        Examples:
            >>> tree = A.hierarchical_part.factorize(1e-2, warn=False)
            >>> F = tree if A.global_part is None else tree.with_global_part(A.global_part, True)
            >>> torch.allclose(F.solve(b), A.factorize(1e-2).solve(b))
            True
        """
        tree = self._tree_solves
        apply = tree.half_transposed if definite else tree.solve
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
        """Write this factorization to a safetensors file, which `hcurv.load` reads.

        An existing file is replaced only once the new one is complete.

        Examples:
            >>> F.save("F.safetensors")
            >>> torch.equal(hcurv.load("F.safetensors").solve(b), F.solve(b))
            True
        """
        from hcurv.hierarchical.matrix.storage import save

        save(self, path)

    @takes_arrays
    def sqrt_solve(self, rhs: Tensor) -> Tensor:
        """Return G times ``rhs``, (N,) or (N, k), where G Gᵀ = (A + D)⁻¹.

        Examples:
            >>> G = F.sqrt_solve(torch.eye(51, dtype=b.dtype))
            >>> torch.allclose(G @ (G.T @ b), F.solve(b))
            True
        """
        self._require_definite("sqrt_solve")
        return super().sqrt_solve(rhs)

    def sample(self, num: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Return samples from the normal distribution N(0, (A + D)⁻¹), (num, N).

        Args:
            num: number of samples.
            generator: generator of the random numbers; None for torch's own.

        Examples:
            >>> F.sample(10, generator=torch.Generator().manual_seed(0)).shape
            torch.Size([10, 51])
        """
        self._require_definite("sample")
        return super().sample(num, generator)

    def _require_definite(self, what: str) -> None:
        if self.num_negative:
            raise ValueError(
                f"{what} needs a positive definite matrix; this one has {self.num_negative}"
                " negative eigenvalues"
            )

    def _logdet(self) -> Tensor:
        zero_rows = self._damping.rows(self.tree.zero_rows)
        return self.log_determinant + zero_rows.abs().log().sum().cpu()

    def _inverse_diagonal(self) -> Tensor:
        result = self._tree_solves.diagonal()
        return result if self.update is None else result + self._diagonal_change(self.update)

    def _diagonal_change(self, update: GlobalUpdate) -> Tensor:
        """What the global part adds to the diagonal of the inverse, (N,)."""
        basis = GlobalPart(update.rows, update.basis).whole(self.shape[0])
        values = -update.values
        if update.between:
            basis, values = self._tree_solves.half(basis), values / (1 - values)
        return basis.double().square() @ values

    def _matmat(self, rhs: Tensor) -> Tensor:
        tree = self._tree_solves
        if self.update is not None and self.update.between:
            return tree.half(self.update.invert(tree.half_transposed(rhs)))
        solved = tree.solve(rhs)
        return solved if self.update is None else self.update.correct(rhs, solved)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        if self.update is not None:
            rhs = self.update.invert_root(rhs.clone())
        return self._tree_solves.half(rhs)


def factorize(matrix: HMatrix, damping: Damping, definite: bool) -> Factorization:
    """Factorize A + D.

    Args:
        matrix: A.
        damping: D.
        definite: whether A + D must be positive definite, or just regular.

    Raises:
        NotPositiveDefiniteError: it is not.
        ValueError: A has entries that are not finite.
    """
    result = try_factorize(matrix, damping, definite)
    if result is None:
        raise indefinite_error(matrix, damping, definite)
    return result


def try_factorize(matrix: HMatrix, damping: Damping, definite: bool = True) -> Factorization | None:
    """Factorize A + D as `factorize` does; None if that is not possible."""
    if matrix.nodes is not None:
        return _try_shared(matrix, damping, definite)
    _check_finite(matrix)
    zero_rows = damping.rows(matrix.tree.zero_rows)
    if bool((zero_rows <= 0).any() if definite else (zero_rows == 0).any()):
        return None
    try:
        factors = factorize_levels(matrix, damping.value, definite)
    except IndefiniteError:
        return None
    result = Factorization(
        matrix.tree,
        factors.levels,
        damping,
        factors.log_determinant,
        factors.num_negative + int((zero_rows < 0).sum()),
        matrix.dtype,
    )
    if matrix.global_part is None:
        return result
    return result.with_global_part(matrix.global_part, definite)


def _try_shared(matrix: HMatrix, damping: Damping, definite: bool) -> Factorization | None:
    """The same for a matrix that is spread over ranks."""
    from hcurv.hierarchical.solving.distributed_factorization import try_factorize_shared

    shared = cast("DistributedHMatrix", matrix)
    with shared.share.ranks.agreed():
        _check_finite(matrix)
    return try_factorize_shared(shared, damping, definite)


def _check_finite(matrix: HMatrix) -> None:
    stored = tensors_of((matrix.leaves, matrix.levels, matrix.global_part))
    if not all(bool(torch.isfinite(values).all()) for values in stored):
        raise overflow_error(matrix.dtype)
