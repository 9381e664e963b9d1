"""The damping D that is added to a matrix before it is inverted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hcurv.arguments import check_dense
from hcurv.arrays import as_tensor
from hcurv.layout import ParameterLayout

__all__ = ["Damping", "DampingLike", "DeviceLike", "as_damping"]

DeviceLike: TypeAlias = torch.device | str | None
DampingLike: TypeAlias = float | Tensor | np.ndarray | Mapping[str, "float | Tensor"]


@dataclass(frozen=True)
class Damping:
    """The diagonal D that is added to a matrix: one number for all rows, or one for each.

    Attributes:
        tensor: a tensor of no dimension, or of shape (N,), as the user gave it. It may require
            gradients.
    """

    tensor: Tensor

    @property
    def is_number(self) -> bool:
        """Whether D is a multiple of the identity."""
        return self.tensor.ndim == 0

    @property
    def value(self) -> float | Tensor:
        """The number, or the (N,) values in double precision, without gradients."""
        detached = self.tensor.detach()
        return float(detached) if self.is_number else detached.double()

    @property
    def number(self) -> float:
        """The number; only for a damping that is one."""
        return float(self.tensor.detach())

    def rows(self, index: Tensor) -> Tensor:
        """The values for some rows of the matrix, like ``index``, in double precision."""
        values = self.tensor.detach().double().to(index.device)
        return values.expand(index.shape) if self.is_number else values[index]

    def diagonal(self, size: int, device: torch.device) -> Tensor:
        """The values for all rows, (size,), in double precision."""
        return self.tensor.detach().double().to(device).expand(size)

    def require_positive(self, reason: str = "") -> None:
        """Raise a ValueError unless all values are positive."""
        if not bool((self.tensor.detach() > 0).all()):
            lowest = float(self.tensor.detach().min())
            because = f": {reason}" if reason else ""
            raise ValueError(f"damping must be positive{because}; got {lowest}")

    def to(self, device: DeviceLike) -> Damping:
        """This damping on another device."""
        return self if device is None or self.is_number else Damping(self.tensor.to(device))


def as_damping(
    damping: DampingLike | Damping, size: int, layout: ParameterLayout | None = None
) -> Damping:
    """Turn what users pass as ``damping`` into a `Damping`.

    Args:
        damping: a number or a tensor of one number; a tensor or array (N,); or, where the
            parameters have names, a mapping from names of parameters or layers (or patterns of
            them) to numbers. Gradients of tensors are kept.
        size: N.
        layout: names of the parameters, if they are known.

    Raises:
        TypeError, ValueError: it is none of these, or has values that are not finite.
    """
    if isinstance(damping, Damping):
        return damping
    if isinstance(damping, Mapping):
        if layout is None:
            raise TypeError(
                "damping by names needs a matrix that knows the names of its parameters (of a"
                f" GaussNewton, or compressed from one); pass a number or a tensor ({size},)"
            )
        try:
            tensor = layout.expand(damping)
        except KeyError as error:
            raise KeyError(f"damping: {error.args[0]}") from error
    elif isinstance(damping, np.ndarray):
        tensor = as_tensor(damping)
    elif isinstance(damping, Tensor):
        check_dense(damping, "damping")
        tensor = damping
    else:
        try:
            tensor = torch.tensor(float(damping), dtype=torch.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"damping must be a number, a tensor ({size},) or a mapping from names of"
                f" parameters to numbers; got {damping!r}"
            ) from None
    if tensor.numel() == 1 and size != 1:
        tensor = tensor.reshape(())
    if tensor.ndim and tensor.shape != (size,):
        raise ValueError(
            f"damping must be one finite number or have shape ({size},), a number for each row;"
            f" got shape {tuple(tensor.shape)}"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"damping must hold real numbers; got {tensor.dtype}")
    if not bool(torch.isfinite(tensor.detach()).all()):
        raise ValueError(
            f"damping must be one finite number, or finite for every row; got {damping!r}"
            if tensor.ndim == 0
            else "damping must be finite for every row; it has NaN or infinite values"
        )
    return Damping(tensor)
