"""The curvature of the negative log-likelihood, inverted with a prior: (H/σ² + D)⁻¹.

H belongs to the sum of the points' losses with noise 1, so that neither the prior nor the noise
changes it: H/σ² + D = (H + σ²D)/σ². One spectrum of H makes log-determinants free for every prior
that is one number, and every noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from hcurv.baselines import KFAC, Diagonal
from hcurv.damping import DampingLike, as_damping
from hcurv.factorized import Factorized
from hcurv.layout import ParameterLayout
from hcurv.losses import Loss
from hcurv.network.batches import Batches, Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.model.snapshot import ForwardFunction, check_parameters
from hcurv.network.model_inputs import map_inputs
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Curvature", "Structure", "check_structure", "checked_prior"]

Structure: TypeAlias = Literal["exact", "kfac", "ekfac", "diagonal"]
# The spectrum of H is computed for a matrix (of parameters or of points) up to this size: always,
# and where a prior is tuned.
_SMALL_SPECTRUM, _LARGE_SPECTRUM = 1000, 6000
# Jacobians alone need a matrix over this many points.
_FEW_POINTS = 3


def check_structure(structure: str) -> None:
    """Raise unless the structure of H is known."""
    if structure not in get_args(Structure):
        known = ", ".join(f'"{name}"' for name in get_args(Structure))
        raise ValueError(f"structure must be one of {known}; got {structure!r}")


def checked_prior(prior: DampingLike, layout: ParameterLayout) -> DampingLike:
    """A prior precision as numbers, or as a tensor, without gradients.

    Raises:
        TypeError, ValueError: it does not fit the parameters, or is not positive.
    """
    try:
        resolved = as_damping(prior, layout.size, layout)
        resolved.require_positive()
    except (TypeError, ValueError) as error:
        message = str(error).replace("damping", "prior_precision")
        raise type(error)(message) from None
    if resolved.is_number:
        return resolved.number
    if isinstance(prior, Tensor):
        return prior.detach().clone()
    assert isinstance(prior, Mapping)
    return {name: float(torch.as_tensor(value).detach()) for name, value in prior.items()}


def scaled(prior: DampingLike, factor: float | Tensor) -> DampingLike:
    """A prior precision, or a damping, times a number."""
    if isinstance(prior, Mapping):
        return {name: value * factor for name, value in prior.items()}
    return prior * factor


class Curvature:
    """H in one of several structures.

    Args:
        module: the network, whose trainable parameters are those of the posterior.
        loss: the summed loss.
        data: the data.
        structure: "exact", "kfac", "ekfac" or "diagonal".
        tolerance: of `GaussNewton.factorize`.
        forward_fn, workspace, seed, progress, process_group: as for `GaussNewton`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        data: Data,
        structure: Structure,
        *,
        tolerance: float,
        forward_fn: ForwardFunction | None,
        workspace: int,
        seed: int,
        progress: bool,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_structure(structure)
        self.structure, self._tolerance, self._seed = structure, tolerance, seed
        options: dict[str, Any] = {"forward_fn": forward_fn, "progress": progress}
        self._approximation: KFAC | Diagonal | None = None
        if structure in ("kfac", "ekfac"):
            ekfac = structure == "ekfac"
            self._approximation = KFAC(module, loss, data, num_samples=None, ekfac=ekfac, **options)
            data = _few_points(module, data)
        self.matrix = GaussNewton(
            module, loss, data, workspace=workspace, process_group=process_group, **options
        )
        if structure == "diagonal":
            self._approximation = Diagonal(self.matrix)

    @property
    def ranks(self) -> OneRank:
        """The processes that have the data."""
        return self.matrix.ranks

    @property
    def layout(self) -> ParameterLayout:
        """Names and places of the parameters."""
        return self.matrix.layout

    @property
    def size(self) -> int:
        """The number N of parameters."""
        return self.matrix.shape[0]

    def factorize(self, prior: DampingLike, noise: float | Tensor) -> Factorized:
        """(H + σ²D)⁻¹, which is the covariance over σ²."""
        damping = scaled(prior, noise**2)
        if self._approximation is None:
            return self.matrix.factorize(damping, self._tolerance, seed=self._seed)
        if isinstance(self._approximation, KFAC):
            return self._approximation.factorize(damping, factored=False)
        return self._approximation.factorize(damping)

    def logdet(self, prior: DampingLike, noise: Tensor, *, many: bool = False) -> Tensor:
        """log|H/σ² + D|, with derivatives with respect to the prior and the noise.

        Args:
            prior: D.
            noise: σ.
            many: whether more such calls are to come, for which a spectrum pays.
        """
        damping = as_damping(scaled(prior, noise**2), self.size, self.layout)
        shift = 2 * self.size * noise.log()
        if damping.is_number and self.has_spectrum(many):
            values = self.spectrum
            number = damping.tensor.double()
            # The other N − r eigenvalues are zero.
            rest = (self.size - values.numel()) * number.log()
            return (values + number).log().sum() + rest - shift
        return self.factorize(prior, noise).logdet() - shift

    def has_spectrum(self, many: bool) -> bool:
        """Whether the eigenvalues of H are known, or cheap enough to compute."""
        if self._approximation is not None:
            return False
        limit = _LARGE_SPECTRUM if many else _SMALL_SPECTRUM
        return "spectrum" in vars(self) or self._spectrum_size <= limit

    @cached_property
    def _nonzero(self) -> Tensor:
        return self.matrix.diagonal().nonzero().squeeze(1)

    @property
    def _spectrum_size(self) -> int:
        return min(self._nonzero.numel(), self.matrix.num_root_rows)

    @cached_property
    def spectrum(self) -> Tensor:
        """The eigenvalues of H that may differ from zero, in double precision."""
        exact = self.matrix.in_precision(torch.float64)
        if self._nonzero.numel() <= self.matrix.num_root_rows:
            dense = exact.block(self._nonzero, self._nonzero)
        else:
            dense = exact.kernel().to_dense()
        values: Tensor = torch.linalg.eigvalsh(dense)
        return values.clamp(min=0).cpu()


def _few_points(module: nn.Module, data: Data) -> Data:
    """The first points of the data, without copies of the rest."""
    dtype, device = check_parameters(module)
    inputs, targets = next(iter(Batches(data, dtype, device)))
    few = map_inputs(lambda tensor: tensor[:_FEW_POINTS], inputs)
    return few if targets is None else (few, targets[:_FEW_POINTS])
