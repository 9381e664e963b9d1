"""The gradients of the losses of all training points, which may lie on several ranks.

Each rank has those of its own points. The points of all ranks are numbered in the order of the
ranks, and on each of them in the order of its data.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hcurv.network.batches import Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.jacobian_rows import JacobianRows, RowChunk
from hcurv.network.shards import Shard

__all__ = ["TrainingGradients"]


class TrainingGradients:
    """G, with a row for each training point: (n, N). All ranks make the same calls.

    Args:
        matrix: the matrix over these points, whose model, loss and ranks are used.
        data: the training points of this rank, with targets; it may be empty if others have some.

    Raises:
        ValueError: there are no targets, or they do not fit.

    Attributes:
        own: the rows of this rank's points; None if it has none.
    """

    def __init__(self, matrix: GaussNewton, data: Data) -> None:
        self._matrix, self._ranks = matrix, matrix.ranks
        self.own: JacobianRows | None = None
        with self._ranks.agreed():
            if matrix.num_own_points:
                self.own = matrix.point_gradients(data)
        self._shard = Shard(self._ranks, matrix.num_own_points)

    @property
    def num_points(self) -> int:
        """The number n of points of all ranks."""
        return self._shard.num_points

    def gather(self, own: Tensor) -> Tensor:
        """Something for each point, (n, …), of which each rank has that of its own points."""
        return self._ranks.collect(own, self._shard.counts)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """G times (N, k), for the points of all ranks: (n, k)."""
        with self._ranks.agreed(vectors=vectors):
            found = vectors.new_zeros(0, vectors.shape[1])
            if self.own is not None:
                found = self.own @ vectors
        return self.gather(found)

    def transposed_product(self, values: Tensor) -> Tensor:
        """Gᵀ times (n, k): (N, k)."""
        with self._ranks.agreed(values=values):
            found = values.new_zeros(self._matrix.shape[0], values.shape[1])
            if self.own is not None:
                found = self.own.T @ values[self._shard.own]
        return self._ranks.sum(found)

    def panels(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows of G at a time, (b, N), on all ranks: each sends its own in turn.

        Args:
            most: the largest number of rows at a time.
        """
        start = 0
        for source, count in enumerate(self._shard.counts):
            chunks: Iterator[RowChunk] = iter(())
            if self.own is not None and source == self._ranks.rank:
                chunks = self.own.chunks(most)
            stop = start + count
            while start < stop:
                with self._ranks.agreed():
                    chunk = next(chunks, None)
                    rows = None if chunk is None else chunk.to_dense()
                number = int(self._ranks.most([0 if rows is None else len(rows)])[0])
                if rows is None:
                    rows = torch.empty(
                        number,
                        self._matrix.shape[0],
                        dtype=self._matrix.dtype,
                        device=self._matrix.device,
                    )
                yield slice(start, start + number), self._ranks.broadcast(rows, source)
                start += number
