"""The exact Gauss-Newton matrix as a Hessian structure of laplace-torch: "hcurv".

After ``import hcurv.interop.laplace``, laplace-torch knows the structure:

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="hcurv")

It is the same posterior as that of its "full" structure, for networks whose full matrix could not
be stored: no N x N matrix and no Jacobian of a whole batch is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, SequentialSampler

from hcurv.diagonal import Diagonal
from hcurv.factorized import Factorized
from hcurv.losses import HalfSquaredError
from hcurv.network.gauss_newton import GaussNewton
from hcurv.operators import SymmetricOperator

try:
    from laplace import ParametricLaplace
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hcurv.interop.laplace needs laplace-torch: pip install 'hcurv[laplace-torch]'",
        name=error.name,
    ) from error

__all__ = ["HCurvLaplace"]


class HCurvLaplace(ParametricLaplace):
    """The posterior N(θ, P⁻¹) with P = H/(σ² T) + D: all of H, the Gauss-Newton matrix of the data.

    With h = 1/(σ² T), every quantity follows from (H + D/h)⁻¹, which `GaussNewton.factorize` makes
    in parameter space, in the space of the points, or by conjugate gradients.

    Args:
        model: any model that treats its points independently.
        likelihood: "classification" or "regression".
        gauss_newton_kwargs: passed on to `hcurv.GaussNewton`.
        factorize_kwargs: passed on to `hcurv.GaussNewton.factorize`, such as ``tolerance``.
        kwargs: those of laplace-torch's other structures.

    Examples:
        >>> from laplace import Laplace
        >>> import hcurv.interop.laplace
        >>> data = torch.utils.data.TensorDataset(inputs, targets)
        >>> la = Laplace(model, "classification", "all", "hcurv")
        >>> la.fit(torch.utils.data.DataLoader(data, batch_size=8))
        >>> la(inputs[:5]).shape, la.sample(3).shape
        (torch.Size([5, 3]), torch.Size([3, 51]))
    """

    _key = ("all", "hcurv")
    H: GaussNewton | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        *args: Any,
        gauss_newton_kwargs: dict[str, Any] | None = None,
        factorize_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, likelihood, *args, **kwargs)
        if likelihood not in ("classification", "regression"):
            raise ValueError(
                'the structure "hcurv" is for the likelihoods "classification" and "regression";'
                f" got {str(likelihood)!r}"
            )
        if self.enable_backprop:
            raise ValueError(
                'the structure "hcurv" does not differentiate predictions with respect to inputs:'
                " pass enable_backprop=False"
            )
        self._gauss_newton_kwargs = dict(gauss_newton_kwargs or {})
        self._factorize_kwargs = dict(factorize_kwargs or {})
        self._last: tuple[Tensor, Factorized] | None = None

    def _init_H(self) -> None:  # noqa: N802
        self.H = None

    def fit(
        self, train_loader: DataLoader[Any], override: bool = True, progress_bar: bool = False
    ) -> None:
        """Read the Gauss-Newton matrix of all batches at the weights of the model.

        Args:
            train_loader: batches (inputs, targets), or mappings as the other structures take them.
                If it does not yield the same batches in the same order each time, they are kept.
            override: must be True: the matrices of several data sets at different weights do not
                add up to one that can be factorized.
            progress_bar: whether to show a progress bar.
        """
        if not override:
            raise ValueError(
                'the structure "hcurv" cannot add to an earlier fit (override=False): fit all data'
                " together"
            )
        self.model.eval()
        self._last = None
        self.mean = parameters_to_vector(self.params).detach()
        batches: Iterable[Any] = _Pairs(train_loader, self.dict_key_y, self._device)
        if not isinstance(getattr(train_loader, "sampler", None), SequentialSampler):
            batches = list(batches)
        is_regression = self.likelihood == "regression"
        own: nn.Module | HalfSquaredError = nn.CrossEntropyLoss(reduction="sum")
        if is_regression:
            own = HalfSquaredError(reduction="sum")
        self.loss, self.n_data = torch.zeros((), dtype=self._dtype, device=self._device), 0
        with torch.no_grad():
            for inputs, targets in batches:
                outputs = self.model(inputs)
                if is_regression and targets.ndim != outputs.ndim:
                    raise ValueError(
                        f"targets of a regression must have the shape of the outputs,"
                        f" {tuple(outputs.shape)}; got {tuple(targets.shape)}"
                    )
                self.loss += _loss(outputs, targets, is_regression)
                self.n_data += len(targets)
        self.n_outputs = outputs.shape[-1]
        self.model.output_size = self.n_outputs  # as the other structures do
        self.H = GaussNewton(
            self.model,
            own,
            batches,
            forward_fn=_call if isinstance(inputs, dict) else None,
            progress=progress_bar,
            **self._gauss_newton_kwargs,
        )

    @property
    def _matrix(self) -> GaussNewton:
        self._check_H_init()
        assert self.H is not None
        return self.H

    @property
    def _weight(self) -> Tensor:
        """h = 1/(σ² T), a tensor of no dimension."""
        factor: Tensor = self._H_factor
        return factor.reshape(())

    def _factors(self) -> Factorized:
        """(H + D/h)⁻¹. The last one is kept, unless it passes gradients on."""
        ratio = self.prior_precision_diag / self._weight
        if torch.is_grad_enabled() and ratio.requires_grad:
            return self._matrix.factorize(ratio, **self._factorize_kwargs)
        ratio = ratio.detach()
        if self._last is None or not torch.equal(self._last[0], ratio):
            found = self._matrix.factorize(ratio, **self._factorize_kwargs)
            self._last = (ratio.clone(), found)
        return self._last[1]

    @property
    def posterior_precision(self) -> SymmetricOperator:
        """P = h·H + D, as an operator."""
        diagonal = Diagonal(self.prior_precision_diag.detach().to(self._dtype))
        return float(self._weight) * self._matrix + diagonal

    @property
    def posterior_variance(self) -> Tensor:
        """The diagonal of P⁻¹, (N,)."""
        with torch.no_grad():
            return self._factors().inverse_diagonal() / self._weight

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """log|P|, with gradients to the prior precision and the noise."""
        return self._factors().logdet().to(self._dtype) + self.n_params * self._weight.log()

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ' − θ)ᵀ P (θ' − θ)."""
        delta = value - self.mean
        product = self._weight * (self._matrix @ delta) + self.prior_precision_diag * delta
        return delta @ product

    def functional_variance(self, Js: Tensor) -> Tensor:
        """J_i P⁻¹ J_iᵀ for Jacobians (batch, outputs, N): (batch, outputs, outputs)."""
        return torch.einsum("ncp,nkp->nck", Js, self._solved(Js))

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ for all rows of Jacobians (batch, outputs, N) together."""
        return Js.flatten(0, 1) @ self._solved(Js).flatten(0, 1).T

    def _solved(self, Js: Tensor) -> Tensor:
        self._check_jacobians(Js)
        with torch.no_grad():
            solved = self._factors().solve(Js.flatten(0, 1).T.contiguous()) / self._weight
        return solved.T.view_as(Js)

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        X = X.to(self._device) if isinstance(X, Tensor) else X
        with torch.no_grad():
            mean, factors = self.model(X), self._factors()
            rows = self._matrix.jacobian(X)
            if joint:
                return mean.flatten(), factors.quadratic(rows) / self._weight
            variance = factors.point_covariances(rows) / self._weight
        if diagonal_output:
            variance = torch.diagonal(variance, dim1=-2, dim2=-1)
        return mean, variance

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the weights, (n_samples, N)."""
        with torch.no_grad():
            scatter = self._factors().sample(n_samples, generator) / self._weight.sqrt()
            return self.mean + scatter

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the matrix is made from model and data by `fit`."""
        raise NotImplementedError(
            'the structure "hcurv" has no state to save but its model and data: fit() again, or use'
            " hcurv.laplace(...).save(path)"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, as `state_dict` does."""
        self.state_dict()


def _call(model: nn.Module, inputs: Any) -> Any:
    """laplace-torch passes one argument, which may be a mapping."""
    return model(inputs)


def _loss(outputs: Tensor, targets: Tensor, is_regression: bool) -> Tensor:
    if is_regression:
        return 0.5 * (outputs - targets).square().sum()
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class _Pairs:
    """The batches of a loader as (inputs, targets), as often as they are asked for."""

    def __init__(self, loader: Iterable[Any], key: str, device: torch.device) -> None:
        self._loader, self._key, self._device = loader, key, device

    def __iter__(self) -> Any:
        for batch in self._loader:
            if isinstance(batch, MutableMapping):
                inputs = {name: _moved(value, self._device) for name, value in batch.items()}
                yield inputs, inputs[self._key]
            else:
                yield tuple(_moved(value, self._device) for value in batch)


def _moved(value: Any, device: torch.device) -> Any:
    move: Callable[..., Any] | None = getattr(value, "to", None)
    return value if move is None else move(device)
