"""The rows of R_i by which outputs are weighted: exact, sampled, or of the empirical Fisher."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hcurv.losses import Loss

__all__ = ["Fisher", "LossRows", "RowChoice"]

Fisher: TypeAlias = Literal["exact", "empirical"]

# Entries of the matrix are squares of R_i times derivatives of outputs. Derivatives up to this size
# must not make them overflow; where larger ones are to be expected, entries are looked at.
_DERIVATIVES = 1e6


@dataclass(frozen=True)
class RowChoice:
    """Which rows R_i has.

    Attributes:
        num_samples: m sampled targets for each point, (1/m) Σ g gᵀ over their gradients g, which is
            unbiased; None for the exact Hessian of the loss.
        fisher: "exact" for the matrix of the loss's Hessian, or "empirical" for that of the
            gradients at the targets of the data.
        seed: the seed of the samples.
    """

    num_samples: int | None = None
    fisher: Fisher = "exact"
    seed: int = 0


class LossRows:
    """The q rows of R_i at some points; the loss's reduction is included.

    Args:
        loss: the loss.
        outputs: rows of outputs of each point, (b, t, d).
        targets: the targets of these b·t rows, or None.
        scale: the number by which the sum of the points' losses is multiplied.
        choice: which rows are wanted.
        start: the number of the first point in the data, by which samples are told apart.

    Raises:
        ValueError: the loss returned another shape, or values that are not finite.
    """

    def __init__(
        self,
        loss: Loss,
        outputs: Tensor,
        targets: Tensor | None,
        scale: float,
        choice: RowChoice,
        start: int = 0,
    ) -> None:
        self._shape = outputs.shape
        rows = outputs.flatten(0, 1)
        name = type(loss).__name__
        self._samples: list[Tensor] | None = None
        if choice.fisher == "empirical":
            assert targets is not None
            self._samples = [loss.gradient(rows, targets)]
        elif choice.num_samples is not None:
            # Each batch has random numbers of its own, which its samples take one after the other.
            # Generators look at the last 32 bits of a seed alone.
            seeds = torch.Generator().manual_seed(choice.seed)
            first = int(torch.randint(2**32, (1,), generator=seeds))
            generator = torch.Generator().manual_seed((first + start) % 2**32)
            self._samples = [
                loss.sample_gradient(rows, targets, generator) for _ in range(choice.num_samples)
            ]
            scale /= choice.num_samples
        if self._samples is None:
            root = loss.hessian_sqrt(rows, targets)
            if tuple(root.shape) != tuple(rows.shape) and (
                root.ndim != 3 or (root.shape[0], root.shape[2]) != tuple(rows.shape)
            ):
                raise ValueError(
                    f"{name}.hessian_sqrt must return {tuple(rows.shape)} for a diagonal or"
                    f" ({rows.shape[0]}, q, {rows.shape[1]}) for a dense square root;"
                    f" got {tuple(root.shape)}"
                )
            self._root = root * math.sqrt(scale)
            values = [self._root]
        else:
            self._samples = values = [sample * math.sqrt(scale) for sample in self._samples]
        largest = max((float(value.abs().max()) for value in values if value.numel()), default=0.0)
        if not math.isfinite(largest):
            raise ValueError(f"{name} has NaN or infinite derivatives: is the loss convex?")
        if largest > math.sqrt(torch.finfo(rows.dtype).max) / _DERIVATIVES:
            raise ValueError(
                f"{name} has a curvature of {largest:.1e} squared at some outputs, which overflows"
                f" {rows.dtype} in the matrix: outputs of {float(rows.abs().max()):.1e} are too"
                " large for this loss (scale the inputs or the weights)"
            )

    @classmethod
    def given(cls, samples: Tensor) -> LossRows:
        """Rows that are known already, (b, m, t, d), as `samples` gives them."""
        rows = cls.__new__(cls)
        rows._shape = torch.Size((samples.shape[0], *samples.shape[2:]))
        rows._samples = [sample.flatten(0, 1) for sample in samples.unbind(1)]
        return rows

    @property
    def samples(self) -> Tensor:
        """The rows of sampled targets, the scale included, (b, m, t, d)."""
        assert self._samples is not None
        return torch.stack([sample.view(self._shape) for sample in self._samples], 1)

    @classmethod
    def random(cls, outputs: Tensor) -> LossRows:
        """One row of random numbers at each point, to try something with, for outputs (b, t, d)."""
        rows = cls.__new__(cls)
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
        rows._shape, rows._samples = outputs.shape, [numbers.to(outputs).flatten(0, 1)]
        return rows

    @property
    def root(self) -> Tensor:
        """R_i of all rows of outputs, (b·t, q', d), or (b·t, d) if every R_i is diagonal."""
        return self._root if self._samples is None else torch.stack(self._samples, 1)

    @property
    def num_rows(self) -> int:
        """The number q of rows of each point."""
        if self._samples is not None:
            return len(self._samples)
        return self._shape[1] * self._root.shape[1]

    def row(self, number: int) -> Tensor:
        """One row of R_i at every point, in the shape of the outputs, (b, t, d)."""
        if self._samples is not None:
            return self._samples[number].view(self._shape)
        count, positions = self._shape[:2]
        position, own = divmod(number, self._root.shape[1])
        result = self._root.new_zeros(self._shape)
        root = self._root.view(count, positions, *self._root.shape[1:])[:, position]
        if root.ndim == 3:
            result[:, position] = root[:, own]
        else:
            result[:, position, own] = root[:, own]
        return result

    def weigh(self, values: Tensor) -> Tensor:
        """R_i times values in the shape of the outputs, (b, t, d): (b, q)."""
        if self._samples is not None:
            return torch.einsum("bmtd,btd->bm", self.samples, values)
        by_row = values.reshape(self._root.shape[0], -1)
        if self._root.ndim == 2:
            return (by_row * self._root).view(len(values), -1)
        return torch.bmm(self._root, by_row[:, :, None]).view(len(values), -1)

    def combine(self, weights: Tensor) -> Tensor:
        """Σ_a weights[i, a] R_i[a], in the shape of the outputs, (b, t, d)."""
        if self._samples is not None:
            stacked = torch.stack([sample.view(self._shape) for sample in self._samples])
            return torch.einsum("ba,abtd->btd", weights, stacked)
        by_row = weights.reshape(self._root.shape[0], -1)
        if self._root.ndim == 2:
            return (by_row * self._root).view(self._shape)
        return torch.bmm(by_row[:, None], self._root).view(self._shape)
