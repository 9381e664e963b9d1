"""What losses have in common that are sums over single values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from hcurv.losses.loss import Loss, check_same_shape

__all__ = ["ElementwiseLoss"]


class ElementwiseLoss(Loss):
    """A sum over single values, f(x, y) = Σ_j f_j(x_j, y_j), whose "mean" divides by their number.

    Some of these losses have factors of the outputs, such as weights. These are scalars, or have
    one value for each entry of the last axis of the outputs, which is how torch broadcasts them.
    """

    # The lengths of the factors that are no scalars, by their names.
    _lengths: Mapping[str, int] = MappingProxyType({})

    def _check_factors(self, **factors: Tensor | None) -> None:
        """Refuse factors that have several axes or are negative, and note their lengths."""
        given = {name: values for name, values in factors.items() if values is not None}
        for name, values in given.items():
            if values.ndim > 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a scalar or one value per output, for"
                    f" the last axis of the outputs; got shape {tuple(values.shape)} (if it belongs"
                    " to another axis, let the network return that axis last)"
                )
            if not bool((values >= 0).all()):
                raise ValueError(f"{type(self).__name__}: {name} must not be negative")
        self._lengths = {name: len(v) for name, v in given.items() if v.numel() != 1}

    def split_outputs(self, outputs: Tensor) -> Tensor:
        """Split along the last axis if that has factors of its own; else a point is one row.

        Examples:
            >>> weighted = hcurv.losses.BinaryCrossEntropy(weight=torch.ones(8))
            >>> weighted.split_outputs(torch.zeros(2, 5, 8)).shape
            torch.Size([2, 5, 8])
            >>> hcurv.losses.BinaryCrossEntropy().split_outputs(torch.zeros(2, 5, 8)).shape
            torch.Size([2, 1, 40])
        """
        if not self._lengths:
            return super().split_outputs(outputs)
        shape = tuple(outputs.shape)
        self._check_lengths(shape)
        return outputs.reshape(shape[0], math.prod(shape[1:-1]), shape[-1])

    def divisor(self, outputs_shape: tuple[int, ...], targets: Tensor | None) -> float:
        """Return the number of output values.

        Examples:
            >>> hcurv.losses.MeanSquaredError().divisor((20, 3, 8), None)
            480.0
        """
        return float(math.prod(outputs_shape))

    def check_targets(self, outputs_shape: tuple[int, ...], targets: Tensor) -> None:
        """Targets must have the shape of the outputs.

        Examples:
            >>> hcurv.losses.MeanSquaredError().check_targets((2, 3), torch.zeros(2, 3))
        """
        self._check_lengths(outputs_shape)
        check_same_shape(outputs_shape, targets)

    def _check_lengths(self, outputs_shape: tuple[int, ...]) -> None:
        """Refuse factors that do not fit the last axis of the outputs."""
        num_outputs = outputs_shape[-1] if len(outputs_shape) > 1 else 1
        for name, length in self._lengths.items():
            if length != num_outputs:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be a scalar or have one value per output,"
                    f" ({num_outputs},), for outputs of shape {tuple(outputs_shape)};"
                    f" got ({length},)"
                )
