"""What K-FAC needs of a chain of Linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hcurv.baselines.kronecker_chain import KroneckerPair
from hcurv.baselines.kronecker_moments import (
    GradientBatch,
    LayerMatrix,
    Moments,
    ParameterMatrix,
    add_moments,
    gradient_batches,
)
from hcurv.network.problem import Problem

__all__ = ["ChainFactors"]


class ChainFactors:
    """Passes over the data of a chain of Linear layers.

    Args:
        problem: the network, the loss and the data.
        num_samples: the number of targets to draw for each point; None for the exact expectation.
        seed: the seed of the draws.

    Attributes:
        layers: the parameters of each trainable layer.
        others: parameters with a diagonal block, of which there are none.
    """

    def __init__(self, problem: Problem, num_samples: int | None, seed: int) -> None:
        assert problem.network is not None
        layers = problem.network.layers
        self._problem, self._num_samples, self._seed = problem, num_samples, seed
        self.layers: Sequence[ParameterMatrix] = [
            LayerMatrix(layer.parameters) for layer in layers if layer.trainable
        ]
        self.others: Sequence[ParameterMatrix] = []

    def _batches(self) -> Iterator[GradientBatch]:
        """The inputs and gradients of all points; the same ones in every pass."""
        return gradient_batches(self._problem, self._num_samples, self._seed)

    def moments(
        self, pairs: list[tuple[int, int]], progress: Callable[[int], object]
    ) -> tuple[Moments, list[Tensor]]:
        """Add up the moments of some pairs of layers.

        Args:
            pairs: the pairs of layers.
            progress: called with the number of points of each batch.

        Returns:
            The moments, and the values of all diagonal blocks.
        """
        found = add_moments(self._batches(), pairs, self._problem.num_points, progress)
        return found, []

    def eigenvalues(
        self, bases: Sequence[KroneckerPair], progress: Callable[[int], object]
    ) -> list[Tensor]:
        """Measure the curvature along products of the eigenvectors of A and G of each layer.

        Args:
            bases: the eigenvectors.
            progress: called with the number of points of each batch.

        Returns:
            The values (units, columns) of each layer.
        """
        values = [torch.zeros_like(basis.gradients[:, :1] @ basis.inputs[:1]) for basis in bases]
        for batch in self._batches():
            for number, basis in enumerate(bases):
                features = (batch.features[number] @ basis.inputs).square_()
                rows = batch.gradients[number]
                if rows.ndim == 2:  # The gradients of a point are a diagonal matrix.
                    turned = rows.square() @ basis.gradients.square()
                else:
                    turned = (rows @ basis.gradients).square_().sum(1)
                values[number].addmm_(turned.T, features)
            progress(batch.num_points)
        return values
