"""The root of points that are not all in this process's memory.

Every quantity is a sum, or a list, over batches of points. A `PointSum` is the only place that
knows where they are: in memory, to be recomputed from the model and the data, or on other ranks. It
asks one batch after the other, a `Root` each, and adds up or joins what it hears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from hcurv.layout import ParameterLayout
from hcurv.network.model.compute import ModelBatches
from hcurv.network.model_inputs import Inputs, map_inputs, num_points, split_inputs, tensors_of
from hcurv.network.problem import Problem
from hcurv.network.root import KernelParts, PairTerms, Root
from hcurv.network.root_of_problem import compute_root
from hcurv.network.shards import Shard, gather_inputs
from hcurv.ranks import OneRank

__all__ = ["PointSum"]


class PointSum(Root):
    """S, by batches of points that are recomputed or lie on other ranks.

    All ranks make the same calls with the same arguments, and all receive the same results.

    Args:
        like: the root of a few points, which says what those of all points have in common.
        batches: the points of this rank, batch by batch; it can be read again and again.
        shard: which points these are.
        ranks: the processes.
        problem: the model, the loss and the points of this rank.
        read_size: the points that are read at a time, which share the random numbers of sampled
            targets.
        workspace: bytes of temporary memory for making roots of some points.
        dtype: the precision of all results; None for that of the model.
    """

    def __init__(
        self,
        like: Root,
        batches: Iterable[Root],
        shard: Shard,
        ranks: OneRank,
        problem: Problem,
        read_size: int,
        workspace: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._like, self._batches, self._shard, self._ranks = like, batches, shard, ranks
        self._problem, self._read_size, self._workspace = problem, read_size, workspace
        self._dtype = like.dtype if dtype is None else dtype
        self._own_diagonal: Tensor | None = None  # of this rank's points
        self._diagonal: Tensor | None = None

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""
        return self._like.layout

    @property
    def num_points(self) -> int:
        """The number of points of all ranks."""
        return self._shard.num_points

    @property
    def num_rows(self) -> int:
        """The number q of rows of each point."""
        return self._like.num_rows

    @property
    def dtype(self) -> torch.dtype:
        """The type of the entries."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where they are computed."""
        return self._like.device

    @property
    def is_recomputed(self) -> bool:
        """Whether rows are recomputed at each call."""
        return not isinstance(self._batches, tuple)

    @property
    def _stored(self) -> tuple[Root, ...]:
        """What is in memory."""
        return self._batches if isinstance(self._batches, tuple) else ()

    @property
    def num_stored(self) -> int:
        """The number of floats that this rank stores at this time."""
        return sum(root.num_stored for root in self._stored)

    @property
    def num_stored_with_entries(self) -> int:
        """The number of floats that this rank stores once entries were asked for."""
        return sum(root.num_stored_with_entries for root in self._stored)

    @property
    def ranks(self) -> OneRank:
        """The processes that have the points."""
        return self._ranks

    @property
    def kernel_flops(self) -> float:
        """Those of any points."""
        return self._like.kernel_flops

    def _roots(self, with_diagonal: bool = False) -> Iterator[Root]:
        """The points of this rank, batch by batch: one pass over the data, if recomputed.

        The first pass over recomputed points adds up the diagonal as well, if that costs less than
        the pass that it would take later.

        Args:
            with_diagonal: add up the diagonal whatever it costs.
        """
        is_wanted = with_diagonal or (self.is_recomputed and self._own_diagonal is None)
        diagonal = torch.zeros(self.layout.size, dtype=self._dtype, device=self.device)
        for batch in self._batches:
            root = batch.to(self._dtype) if batch.dtype != self._dtype else batch
            is_wanted = is_wanted and (with_diagonal or root.has_quick_diagonal)
            if is_wanted:
                diagonal += root.diagonal(self._workspace)
            yield root
        if is_wanted:
            self._own_diagonal = diagonal

    def _sum(
        self, part: Callable[[Root], Tensor], shape: tuple[int, ...], **same: Tensor
    ) -> Tensor:
        """The sum of something over all points, in one pass."""
        return self._ranks.sum(self._own_sum(part, shape, **same))

    def _own_sum(
        self, part: Callable[[Root], Tensor], shape: tuple[int, ...], **same: Tensor
    ) -> Tensor:
        """The sum of something over the points of this rank.

        The first term is overwritten: ``part`` must give tensors that nothing else holds.
        """
        with self._ranks.agreed(**same):
            return self._total(part, shape)

    def _total(self, part: Callable[[Root], Tensor], shape: tuple[int, ...]) -> Tensor:
        """The same, without an agreement of the ranks."""
        result: Tensor | None = None
        for root in self._roots():
            term = part(root)
            result = term if result is None else result.add_(term)
            del term  # before that of the next batch is made
        if result is None:
            result = torch.zeros(shape, dtype=self._dtype, device=self.device)
        return result

    def _list(
        self,
        part: Callable[[Root], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        **same: Tensor,
    ) -> Tensor:
        """Something for each point or row, joined in the order of the points, in one pass.

        Args:
            part: gives it for the points of a root.
            shape: the shape for each of them.
            dtype: its type.
            same: arguments that all ranks must have passed alike.
        """
        with self._ranks.agreed(**same):
            none = torch.zeros(0, *shape, dtype=dtype, device=self.device)
            own = torch.cat([none, *(part(root) for root in self._roots())])
        return torch.cat(self._ranks.gather(own)) if self._ranks.size > 1 else own

    def product(self, rhs: Tensor, workspace: int) -> Tensor:
        """SᵀS times (N, k): all columns in one pass."""
        return self._ranks.sum(self.partial_product(rhs, workspace))

    def partial_product(self, rhs: Tensor, workspace: int) -> Tensor:
        """The term of this rank's points in SᵀS, times (N, k)."""
        found: Tensor | None = None
        with self._ranks.agreed(vectors=rhs):
            if isinstance(self._batches, ModelBatches) and self._dtype == self._like.dtype:
                found = self._batches.product(rhs)
            if found is None:
                found = self._total(lambda root: root.product(rhs, workspace), tuple(rhs.shape))
        return found

    def partial_blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of the term of this rank's points in SᵀS."""
        shape = (*rows.shape, cols.shape[1])
        return self._own_sum(
            lambda root: root.blocks(rows, cols, workspace), shape, rows=rows, columns=cols
        )

    def apply(self, rhs: Tensor, workspace: int) -> Tensor:
        """S times (N, k)."""
        width = rhs.shape[1:]
        return self._list(lambda root: root.apply(rhs, workspace), width, self._dtype, vectors=rhs)

    def apply_transposed(self, values: Tensor, workspace: int) -> Tensor:
        """Sᵀ times (n·q, k)."""
        start = self._shard.offset * self.num_rows

        def part(root: Root) -> Tensor:
            nonlocal start
            stop = start + root.num_points * self.num_rows
            own, start = values[start:stop], stop
            return root.apply_transposed(own, workspace)

        return self._sum(part, (self.layout.size, values.shape[1]), vectors=values)

    def columns(self, index: Tensor) -> Tensor:
        """Columns of S, (n·q, k)."""
        width = tuple(index.shape)
        return self._list(lambda root: root.columns(index), width, self._dtype, index=index)

    def diagonal(self, workspace: int) -> Tensor:
        """The diagonal of SᵀS, (N,); it is kept, because it is asked for often."""
        if self._diagonal is None:
            with self._ranks.agreed():
                if self._own_diagonal is None:
                    for _ in self._roots(with_diagonal=True):
                        pass
                assert self._own_diagonal is not None
            self._diagonal = self._ranks.sum(self._own_diagonal.clone())
        return self._diagonal.clone()

    def block(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """A block of SᵀS."""
        shape = (rows.numel(), cols.numel())
        return self._sum(
            lambda root: root.block(rows, cols, workspace), shape, rows=rows, columns=cols
        )

    def blocks(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Many blocks of equal size, all of them in one pass."""
        shape = (*rows.shape, cols.shape[1])
        return self._sum(
            lambda root: root.blocks(rows, cols, workspace), shape, rows=rows, columns=cols
        )

    def pairs(self, rows: Tensor, cols: Tensor, workspace: int) -> Tensor:
        """Entries of SᵀS, one for each pair of indices."""
        return self._sum(
            lambda root: root.pairs(rows, cols, workspace), (rows.numel(),), rows=rows, columns=cols
        )

    def orders(self) -> dict[str, Tensor]:
        """Those of any points."""
        return self._like.orders()

    def point_norms(self) -> Tensor:
        """‖S_i‖_F² of each point, (n,)."""
        return self._list(lambda root: root.point_norms(), (), torch.float64)

    def point_features(self, num_features: int, generator: torch.Generator) -> Tensor:
        """Those of each batch, from the same random numbers."""
        state = generator.get_state()

        def part(root: Root) -> Tensor:
            return root.point_features(num_features, generator.set_state(state)).T

        width = self._like.point_features(num_features, generator.set_state(state)).shape[0]
        return self._list(part, (width,), self._dtype).T.contiguous()

    def select(self, points: Tensor, scale: Tensor) -> Root:
        """The rows of some points, in the memory of every rank: their inputs are sent to all."""
        distinct, places = points.unique(return_inverse=True)
        with self._ranks.agreed(points=points, scale=scale):
            own = distinct[(distinct >= self._shard.own.start) & (distinct < self._shard.own.stop)]
            inputs, targets, samples = self._read(own - self._shard.offset)
        inputs = map_inputs(
            lambda tensor: tensor.to(self.device), gather_inputs(self._ranks, inputs)
        )
        if self._problem.targets is not None:
            assert targets is not None
            targets = torch.cat(self._ranks.gather(targets))[places]
        if samples is not None:
            samples = torch.cat(self._ranks.gather(samples))[places]
        with self._ranks.agreed():
            chosen = map_inputs(lambda tensor: tensor[places], inputs)
            problem = self._problem.over(chosen, targets, samples)
            root, _, _ = compute_root(problem, self._workspace)
            if not bool((scale == 1).all()):
                root = root.select(torch.arange(len(points), device=self.device), scale)
            return root.to(self._dtype)

    def _read(self, own: Tensor) -> tuple[Inputs, Tensor | None, Tensor | None]:
        """Inputs, targets and sampled rows of some points of this rank, in increasing order."""
        problem = self._problem
        found: list[Inputs] = [map_inputs(lambda tensor: tensor[:0], problem.survey.first_inputs)]
        sampled = problem.choice.num_samples is not None
        rows: list[Tensor] = []
        start = 0
        if own.numel() or sampled:
            for inputs in problem.inputs():
                for some in split_inputs(inputs, self._read_size):
                    stop = start + num_points(some)
                    chosen = own[(own >= start) & (own < stop)] - start
                    if chosen.numel():
                        found.append(map_inputs(lambda tensor: tensor[chosen], some))  # noqa: B023
                        if sampled:
                            rows.append(self._samples(some, slice(start, stop))[chosen])
                    start = stop
        parts = [torch.cat(some) for some in zip(*map(tensors_of, found), strict=True)]
        remaining = iter(parts)
        inputs = map_inputs(lambda _: next(remaining), found[0])
        targets = None if problem.targets is None else problem.targets[own]
        if not sampled:
            return inputs, targets, None
        shape = (0, problem.choice.num_samples, *self._samples_shape())
        none = torch.zeros(shape, dtype=problem.dtype, device=self.device)
        return inputs, targets, torch.cat([none, *rows])

    def _samples(self, inputs: Inputs, points: slice) -> Tensor:
        """The rows of the sampled targets of some points of this rank, (b, m, t, d)."""
        with torch.no_grad():
            outputs = self._problem.loss.split_outputs(self._problem.snapshot.outputs(inputs))
            return self._problem.loss_rows(outputs, points).samples

    def _samples_shape(self) -> torch.Size:
        """The shape (t, d) of the outputs of a point, as the loss sees them."""
        problem = self._problem
        one = map_inputs(lambda tensor: tensor[:1], problem.survey.first_inputs)
        return problem.loss.split_outputs(problem.snapshot.outputs(one)).shape[1:]

    def to(self, dtype: torch.dtype) -> PointSum:
        """The same root in another precision; rows are computed in that of the model."""
        return PointSum(
            self._like,
            self._batches,
            self._shard,
            self._ranks,
            self._problem,
            self._read_size,
            self._workspace,
            dtype,
        )

    def kernel_parts(self, inverse_damping: Tensor) -> KernelParts:
        """Those of all points. The diagonal is one pass; entries bring all points into memory."""
        return _GatheredKernelParts(self, inverse_damping)

    def kernel_diagonal(self, inverse_damping: Tensor) -> Tensor:
        """The diagonal of S D⁻¹ Sᵀ, (n·q,), without bringing points together."""
        return self._list(
            lambda root: root.kernel_parts(inverse_damping).diagonal(), (), self._dtype
        )

    def everything(self) -> Root:
        """All points, in the memory of every rank."""
        points = torch.arange(self.num_points, device=self.device)
        return self.select(points, torch.ones(len(points), device=self.device).to(self._dtype))

    def cross(self, other: Root, inverse_damping: Tensor, workspace: int) -> Tensor:
        """S D⁻¹ S'ᵀ with the root S' of other points, (n·q, n'·q')."""
        width = (other.num_points * other.num_rows,)
        return self._list(
            lambda root: root.cross(other, inverse_damping, workspace), width, self._dtype
        )

    def pair_terms(self, order: Tensor | None, workspace: int) -> PairTerms:
        """Those of all points, which are brought into memory: any of them may be drawn."""
        return self.everything().pair_terms(order, workspace)


class _GatheredKernelParts:
    """Entries of a kernel whose points are recomputed or lie on several ranks.

    Any two points may meet in an entry, so that the first request for entries brings all points
    into the memory of every rank. Each rank then computes its share of the entries.

    Args:
        root: the points.
        inverse_damping: 1/D, (N,).
    """

    def __init__(self, root: PointSum, inverse_damping: Tensor) -> None:
        self._root, self._inverse_damping = root, inverse_damping
        self._num_rows, self._dtype, self._ranks = root.num_rows, root.dtype, root.ranks

    @cached_property
    def _parts(self) -> KernelParts:
        return self._root.everything().kernel_parts(self._inverse_damping)

    @property
    def tile_points(self) -> int:
        """That of the parts."""
        return self._parts.tile_points

    def diagonal(self) -> Tensor:
        """The n·q diagonal entries."""
        return self._root.kernel_diagonal(self._inverse_damping)

    def batch_floats(self, num_rows: int, num_cols: int) -> int:
        """Those of the parts."""
        return self._parts.batch_floats(num_rows, num_cols)

    def _share(self, count: int) -> slice:
        """The part of ``count`` things that this rank computes."""
        rank, size = self._ranks.rank, self._ranks.size
        return slice(count * rank // size, count * (rank + 1) // size)

    def tile(self, first: slice, second: slice, out: Tensor, space: Tensor) -> None:
        """Write K between all rows of some points and all rows of others."""
        parts, own = self._parts, self._share(first.stop - first.start)
        points = slice(first.start + own.start, first.start + own.stop)
        found = out[own.start * self._num_rows : own.stop * self._num_rows]
        with self._ranks.agreed():
            if points.stop > points.start:
                parts.tile(points, second, found, space)
        out.copy_(torch.cat(self._ranks.gather(found.contiguous())))

    def entries(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Blocks between any rows (B, m) and columns (B, k): (B, m, k)."""
        parts, own = self._parts, self._share(len(rows))
        with self._ranks.agreed(rows=rows, columns=cols):
            found = torch.zeros(
                0, rows.shape[1], cols.shape[1], dtype=self._dtype, device=rows.device
            )
            if own.stop > own.start:
                found = parts.entries(rows[own], cols[own])
        return torch.cat(self._ranks.gather(found))
