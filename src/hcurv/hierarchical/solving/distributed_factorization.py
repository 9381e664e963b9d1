"""DistributedFactorization: (A + D)⁻¹ of a matrix whose subtrees lie on different ranks."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from hcurv.damping import Damping, DeviceLike
from hcurv.factorized import NotFactorizableError
from hcurv.hierarchical.parts.nested_tensors import tensors_of
from hcurv.hierarchical.solving.elimination import IndefiniteError
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.hierarchical.solving.shared_solves import (
    SharedFactors,
    SharedSolves,
    SharedUpdate,
    factorize_shared,
    make_shared_update,
)
from hcurv.hierarchical.solving.tree_solves import TreeSolves

if TYPE_CHECKING:
    from hcurv.hierarchical.matrix.distributed import DistributedHMatrix

__all__ = ["DistributedFactorization", "try_factorize_shared"]


class DistributedFactorization(Factorization):
    """(A + D)⁻¹ as a matrix: ``F @ b`` solves. Made by `DistributedHMatrix.factorize`; immutable.

    Every rank has to make the same calls in the same order, and gets the same results. Right-hand
    sides and solutions are whole on every rank; `own_solve` takes and returns own rows.

    Samples are made of the own rows of the random numbers of each rank. With generators in the same
    state on all ranks, they are those of one process.

    Attributes:
        own_rows: the rows of the matrix that this rank has, in the order of `own_solve`, (m,).
    """

    def __init__(
        self,
        matrix: DistributedHMatrix,
        factors: SharedFactors,
        damping: Damping,
        num_negative: int,
        definite: bool,
    ) -> None:
        share, nodes = matrix.share, matrix.nodes
        top = None
        if matrix.tree.num_kept:
            top = TreeSolves(matrix.top.tree, factors.top, damping)
        cut = 0 if nodes.cut is None else nodes.cut
        self._solves = SharedSolves(
            share,
            factors.own,
            top,
            matrix.exchange,
            nodes.first(cut),
            nodes.num_nodes(cut),
            damping,
        )
        self._shared_update: SharedUpdate | None = None
        logarithm = factors.log_determinant
        if matrix.global_part is not None:
            solves = self._solves
            apply = solves.half_transposed if definite else solves.solve
            update = make_shared_update(matrix.global_part, apply, definite)
            logarithm += update.log_determinant
            num_negative += update.num_negative
            self._shared_update = update
        super().__init__(matrix.tree, factors.own, damping, logarithm, num_negative, matrix.dtype)
        self.own_rows = share.own_rows
        total = share.total(torch.tensor([self._num_own]))
        self._num_total = int(total) + self._num_top

    @property
    def _num_own(self) -> int:
        update = 0 if self._shared_update is None else self._shared_update.basis.numel()
        return update + sum(s.num_stored for level in self.levels for s in level.eliminations)

    @property
    def _num_top(self) -> int:
        """Number of floats that every rank stores."""
        levels = () if self._solves.top is None else self._solves.top.levels
        total = sum(step.num_stored for level in levels for step in level.eliminations)
        if self._shared_update is not None:
            total += self._shared_update.values.numel()
        if not self._damping.is_number:
            total += self.tree.size - self.tree.num_kept  # D itself is needed in the zero rows
        return total

    @property
    def num_stored(self) -> int:
        """Number of floats that solving needs, of all ranks together."""
        return self._num_total

    @property
    def num_own_stored(self) -> int:
        """Number of floats that this rank stores."""
        return self._num_own + self._num_top

    @property
    def nbytes(self) -> int:
        """Number of bytes of all floats and indices that this rank stores."""
        top = () if self._solves.top is None else self._solves.top.levels
        basis = None if self._shared_update is None else self._shared_update.basis
        return sum(t.nbytes for t in tensors_of((self.tree, self.levels, top, basis)))

    def own_solve(self, rhs: Tensor) -> Tensor:
        """The own rows of the solution, from the own rows of right-hand sides, (m, k)."""
        solves, update = self._solves, self._shared_update
        if update is not None and update.between:
            return solves.half(update.invert(solves.half_transposed(rhs)))
        solved = solves.solve(rhs)
        return solved if update is None else update.correct(rhs, solved)

    def to(self, device: DeviceLike = None, dtype: torch.dtype | None = None) -> NoReturn:
        """Refuse: convert the matrix, and factorize that."""
        raise NotFactorizableError(
            "a factorization that is spread over ranks is not converted: convert the matrix with"
            " A.to(…) and factorize that"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Refuse: save the matrix, or the factorization of ``A.gather()``."""
        raise NotFactorizableError(
            "a factorization that is spread over ranks is not written to a file: save the matrix"
            " with A.save(folder), or A.gather().factorize(damping)"
        )

    def _matmat(self, rhs: Tensor) -> Tensor:
        return self._whole(rhs, self.own_solve, -1.0)

    def _half_solve(self, rhs: Tensor) -> Tensor:
        def run(own: Tensor) -> Tensor:
            update = self._shared_update
            return self._solves.half(own if update is None else update.invert_root(own))

        return self._whole(rhs, run, -0.5)

    def _whole(self, rhs: Tensor, run: Callable[[Tensor], Tensor], power: float) -> Tensor:
        """Own rows by ``run``, gathered; rows that are zero in A are multiplied by D^power."""
        share, size = self._solves.share, self.shape[0]
        own = run(rhs[self.own_rows])
        result = rhs
        if share.num_rows < size:
            result = rhs * self._damping.diagonal(size, rhs.device).pow(power).to(rhs)[:, None]
        return result.index_copy(0, share.rows, share.whole(own))

    def _inverse_diagonal(self) -> Tensor:
        share, size, update = self._solves.share, self.shape[0], self._shared_update
        own = self._solves.diagonal()
        if update is not None:
            basis, values = update.basis, -update.values
            if update.between:
                basis, values = self._solves.half(basis), values / (1 - values)
            own = own + basis.double().square() @ values
        result = torch.ones(size, dtype=torch.float64, device=own.device)
        if share.num_rows < size:
            result = 1 / self._damping.diagonal(size, own.device)
        return result.index_copy(0, share.rows, share.whole(own[:, None])[:, 0])


def try_factorize_shared(
    matrix: DistributedHMatrix, damping: Damping, definite: bool
) -> Factorization | None:
    """Factorize A + D; None on all ranks if that is not possible."""
    zero_rows = damping.rows(matrix.tree.zero_rows)
    if bool((zero_rows <= 0).any() if definite else (zero_rows == 0).any()):
        return None
    try:
        factors = factorize_shared(matrix, damping.value, definite)
    except IndefiniteError:
        return None
    negative = factors.num_negative + int((zero_rows < 0).sum())
    return DistributedFactorization(matrix, factors, damping, negative, definite)
