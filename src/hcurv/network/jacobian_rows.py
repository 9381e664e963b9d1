"""Derivatives at other inputs, one or more rows for each point, as an operator: (n·q) x N.

The rows are those of the Jacobian of the outputs, or the gradients of the losses of single points.
They are never all formed: what is stored, or computed anew for each request, are the factors that
the Gauss-Newton Hessian is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from tqdm import tqdm

from hcurv.arrays import takes_arrays
from hcurv.indexing import check_count
from hcurv.layout import ParameterLayout
from hcurv.losses import HalfSquaredError, Loss
from hcurv.memory import require_bytes
from hcurv.network.batches import Batches, Data
from hcurv.network.loss_rows import RowChoice
from hcurv.network.model_inputs import map_inputs, num_points, split_inputs
from hcurv.network.problem import NUM_TRIED, Problem, check_targets
from hcurv.network.representable import require_finite
from hcurv.network.root import Root
from hcurv.network.root_of_problem import compute_root
from hcurv.precision import FullPrecision

__all__ = ["JacobianRows", "RowChunk", "gradient_rows", "jacobian_rows"]

# Most points whose rows are made at a time.
_MAX_POINTS = 4096
# Factors of all points are kept, for further requests, if they take less than this share of the
# workspace; those of a chunk always do.
_KEPT_SHARE, _CHUNK_SHARE = 1.0, 0.25


@dataclass(frozen=True)
class RowChunk:
    """The rows of some points.

    Attributes:
        points: the range of the points in the data.
        root: their rows, as an object that multiplies and has dense columns.
    """

    points: slice
    root: Root

    def to_dense(self) -> Tensor:
        """All of these rows, (b·q, N)."""
        index = torch.arange(self.root.layout.size, device=self.root.device)
        return self.root.columns(index)


class JacobianRows(FullPrecision):
    """Rows of derivatives with respect to the parameters, q for each of n points: (n·q, N).

    Made by `GaussNewton.jacobian` and `GaussNewton.point_gradients`. Row i·q + a belongs to
    point i.

    Args:
        problem: the model, the loss whose rows these are, and the data.
        workspace: bytes of memory for the factors of some points, and for temporary results.

    Examples:
        >>> J = H.jacobian(inputs)
        >>> J.shape, (J @ b).shape, (J.T @ (J @ b)).shape
        ((60, 51), torch.Size([60]), torch.Size([51]))
        >>> torch.allclose((J @ b)[:3], J.to_dense()[:3] @ b)
        True
    """

    __array_ufunc__ = None

    def __init__(self, problem: Problem, workspace: int) -> None:
        self._problem, self._workspace = problem, workspace
        few = problem.first_points(min(NUM_TRIED, problem.num_points))
        root, checked, _ = compute_root(few, workspace)
        self._problem = replace(problem, network=checked.network)
        self._num_rows = root.num_rows
        self._point_bytes = max(1, root.num_stored_with_entries // root.num_points)
        self._point_bytes *= problem.dtype.itemsize

    @property
    def shape(self) -> tuple[int, int]:
        """``(n·q, N)``."""
        return (self.num_points * self._num_rows, self._problem.layout.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's parameters."""
        return self._problem.dtype

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return self._problem.device

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self._problem.num_points

    @property
    def rows_per_point(self) -> int:
        """The number q of rows of each point."""
        return self._num_rows

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters, which are the columns."""
        return self._problem.layout

    def __repr__(self) -> str:
        """Size in one line."""
        return (
            f"JacobianRows(num_points={self.num_points}, rows_per_point={self._num_rows},"
            f" N={self.shape[1]}, dtype={self.dtype})"
        )

    @property
    def T(self) -> _Transposed:  # noqa: N802
        """The transpose, (N, n·q), for products.

        Examples:
            >>> J = H.jacobian(inputs)
            >>> (J.T @ torch.ones(60, dtype=b.dtype)).shape
            torch.Size([51])
        """
        return _Transposed(self)

    def chunks(self, max_points: int | None = None, progress: bool = False) -> Iterator[RowChunk]:
        """Yield the rows of a few points at a time, in the order of the data.

        Args:
            max_points: most points at a time; None for as many as the workspace allows.
            progress: whether to show a progress bar over the points.

        Examples:
            >>> sum(len(chunk.to_dense()) for chunk in H.jacobian(inputs).chunks(8))
            60
        """
        most = self._chunk_points
        if max_points is not None:
            most = min(check_count(max_points, "max_points"), most)
        with torch.no_grad(), tqdm(total=self.num_points, disable=not progress) as bar:
            for chunk in self._kept if self._keeps else self._fresh(most):
                count = chunk.root.num_points
                for first in range(0, count, most):
                    own = torch.arange(first, min(first + most, count), device=self.device)
                    points = slice(
                        chunk.points.start + first, chunk.points.start + first + len(own)
                    )
                    root = chunk.root
                    if len(own) < count:
                        root = root.select(own, torch.ones(len(own)).to(own.device, self.dtype))
                    yield RowChunk(points, root)
                    bar.update(len(own))

    @property
    def _chunk_points(self) -> int:
        """Points whose factors take no more than their share of the workspace."""
        fitting = int(_CHUNK_SHARE * self._workspace) // self._point_bytes
        return max(1, min(fitting, _MAX_POINTS))

    @property
    def _keeps(self) -> bool:
        """Whether the factors of all points are kept."""
        return self.num_points * self._point_bytes <= _KEPT_SHARE * self._workspace

    @cached_property
    def _kept(self) -> list[RowChunk]:
        return list(self._fresh(self._chunk_points))

    def _fresh(self, most: int) -> Iterator[RowChunk]:
        """Read the data, and make the factors of some points at a time."""
        problem, start = self._problem, 0
        for inputs, targets in problem.batches.reread(problem.survey):
            first = 0
            for some in split_inputs(inputs, most):
                count = num_points(some)
                own = None if targets is None else targets[first : first + count]
                part = problem.over(some, own)
                root, _, _ = compute_root(part, self._workspace)
                yield RowChunk(slice(start, start + count), root)
                first, start = first + count, start + count

    @takes_arrays
    def __matmul__(self, rhs: Tensor) -> Tensor:
        """Multiply by vectors (N,) or (N, k): derivatives along directions, (n·q,) or (n·q, k)."""
        columns = self._columns(rhs, self.shape[1])
        parts = [chunk.root.apply(columns, self._workspace) for chunk in self.chunks()]
        return require_finite(torch.cat(parts), columns).view(self.shape[0], *rhs.shape[1:])

    @takes_arrays
    def _transposed_product(self, values: Tensor) -> Tensor:
        columns = self._columns(values, self.shape[0])
        result = columns.new_zeros(self.shape[1], columns.shape[1])
        for chunk in self.chunks():
            rows = slice(chunk.points.start * self._num_rows, chunk.points.stop * self._num_rows)
            result += chunk.root.apply_transposed(columns[rows], self._workspace)
        return require_finite(result, columns).view(self.shape[1], *values.shape[1:])

    def _columns(self, values: Tensor, size: int) -> Tensor:
        """Vectors as a matrix; refuse those that do not fit."""
        if not isinstance(values, Tensor):
            raise TypeError(f"a product needs a tensor or an array; got {type(values).__name__}")
        if values.ndim not in (1, 2) or values.shape[0] != size or values.dtype != self.dtype:
            raise ValueError(
                f"vectors must have shape ({size},) or ({size}, k) and be {self.dtype};"
                f" got {tuple(values.shape)} of {values.dtype}"
            )
        return values.detach() if values.ndim == 2 else values.detach()[:, None]

    def to_dense(self) -> Tensor:
        """All rows, (n·q, N), if there is memory for them.

        Examples:
            >>> H.jacobian(inputs).to_dense().shape
            torch.Size([60, 51])
        """
        require_bytes(
            self.shape[0] * self.shape[1] * self.dtype.itemsize + self._workspace,
            self.device,
            f"{self.shape[0]} dense rows of {self.shape[1]} derivatives",
            ("use products with J, which never form it", "use chunks() for some rows at a time"),
        )
        return torch.cat([chunk.to_dense() for chunk in self.chunks()])

    def outputs(self) -> Tensor:
        """The outputs of the network at these points, (n, *shape).

        Examples:
            >>> torch.allclose(H.jacobian(inputs).outputs(), model(inputs))
            True
        """
        problem = self._problem
        with torch.no_grad():
            parts = [
                problem.snapshot.outputs(some)
                for inputs in problem.inputs()
                for some in split_inputs(inputs, _MAX_POINTS)
            ]
        return torch.cat(parts)


class _Transposed(FullPrecision):
    """Jᵀ, for products."""

    __array_ufunc__ = None

    def __init__(self, rows: JacobianRows) -> None:
        self._rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, n·q)``."""
        return self._rows.shape[::-1]

    @property
    def T(self) -> JacobianRows:  # noqa: N802
        """J itself."""
        return self._rows

    def __matmul__(self, values: Tensor) -> Tensor:
        """Multiply by vectors (n·q,) or (n·q, k): sums of rows, (N,) or (N, k)."""
        with torch.no_grad():
            return self._rows._transposed_product(values)

    def __repr__(self) -> str:
        """Size in one line."""
        return f"{self._rows!r}.T"


def _rows(
    problem: Problem, data: Data, loss: Loss, choice: RowChoice, workspace: int
) -> JacobianRows:
    """Rows at other points."""
    with torch.no_grad():
        batches = Batches(data, problem.dtype, problem.device)
        survey = batches.survey()
        few = map_inputs(lambda tensor: tensor[:NUM_TRIED], survey.first_inputs)
        try:
            shape = problem.snapshot.outputs(few).shape
        except Exception as error:
            raise ValueError(
                f"the model cannot read these inputs: {type(error).__name__}: {error}"
            ) from error
        if tuple(shape[1:]) != problem.point_shape:
            raise ValueError(
                f"the model's outputs at these inputs have the shape {tuple(shape[1:])}, at those"
                f" of the matrix {problem.point_shape}"
            )
        if choice.fisher == "empirical":
            check_targets(loss, (survey.num_points, *shape[1:]), survey.targets, choice)
        other = replace(
            problem, loss=loss, batches=batches, survey=survey, scale=1.0, choice=choice
        )
        return JacobianRows(other, workspace)


def jacobian_rows(problem: Problem, data: Data, workspace: int) -> JacobianRows:
    """The Jacobian of all outputs at some inputs; see `GaussNewton.jacobian`."""
    return _rows(problem, data, HalfSquaredError(reduction="sum"), RowChoice(), workspace)


def gradient_rows(problem: Problem, data: Data, workspace: int) -> JacobianRows:
    """The gradients of the losses of single points; see `GaussNewton.point_gradients`."""
    return _rows(problem, data, problem.loss, RowChoice(fisher="empirical"), workspace)
