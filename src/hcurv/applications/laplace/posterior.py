"""The Laplace approximation: a normal distribution of the weights around the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.applications.fingerprints import require_same_data
from hcurv.applications.laplace.curvature import Curvature, checked_prior
from hcurv.applications.laplace.likelihood import DataFit, Likelihood, check_noise
from hcurv.applications.laplace.predictive import (
    METHODS,
    Method,
    Prediction,
    outputs_with,
    probabilities,
)
from hcurv.applications.laplace.scores import Score, score
from hcurv.applications.laplace.tuning import Grouping, Tuning, maximise
from hcurv.arguments import check_number
from hcurv.damping import DampingLike, as_damping
from hcurv.factorized import Factorized
from hcurv.indexing import check_count, check_seed
from hcurv.inversion.accuracy import Accuracy
from hcurv.layout import ParameterLayout
from hcurv.losses import Loss
from hcurv.network.batches import Batches, Data
from hcurv.network.model.snapshot import ForwardFunction, ModelSnapshot
from hcurv.network.model_inputs import Inputs, num_points, split_inputs
from hcurv.precision import FullPrecision
from hcurv.ranks import OneRank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LaplacePosterior"]

# Covariances of outputs are computed for so many floats at a time.
_COVARIANCE_FLOATS = 2**24


class LaplacePosterior(FullPrecision):
    """A normal distribution of the weights, and what it says about outputs. Made by `laplace`.

    Attributes:
        layout: names and places of the N parameters that are uncertain.
        weights: θ, the mean, (N,).
        structure: that of H.
        tuning: the record of the last `tune`, or None.

    Examples:
        >>> post = hcurv.laplace(model, loss, (inputs, targets), prior_precision=2.0)
        >>> post
        LaplacePosterior(N=51, structure='exact', prior_precision=2, likelihood='classes')
        >>> post.log_marginal_likelihood() < post.tune().log_marginal_likelihood()
        tensor(True)
    """

    def __init__(
        self,
        snapshot: ModelSnapshot,
        likelihood: Likelihood,
        curvature: Curvature,
        fit: DataFit,
        prior_precision: DampingLike,
        noise: float,
    ) -> None:
        self._snapshot, self._likelihood = snapshot, likelihood
        self._curvature, self._fit = curvature, fit
        self.layout: ParameterLayout = curvature.layout
        named = {name: p.detach() for name, p in snapshot.trainable.items()}
        self.weights: Tensor = self.layout.flatten(named).clone()
        self.structure = curvature.structure
        self.tuning: Tuning | None = None
        self._set(checked_prior(prior_precision, self.layout), noise)

    def _set(self, prior: DampingLike, noise: float) -> None:
        self._prior, self._noise = prior, noise
        self._factorized: Factorized | None = None

    def __repr__(self) -> str:
        """Size, structure, prior and likelihood in one line."""
        prior = f"{self._prior:.3g}" if isinstance(self._prior, float) else "several"
        noise = f", noise={self._noise:.3g}" if self._likelihood.is_noisy else ""
        return (
            f"LaplacePosterior(N={self.layout.size}, structure={self.structure!r},"
            f" prior_precision={prior}{noise}, likelihood={self._likelihood.name!r})"
        )

    @property
    def _ranks(self) -> OneRank:
        return self._curvature.ranks

    @property
    def prior_precision(self) -> DampingLike:
        """D, as it was given or tuned."""
        return self._prior

    @property
    def noise(self) -> float | None:
        """σ of a regression; None for other likelihoods."""
        return self._noise if self._likelihood.is_noisy else None

    @property
    def factorized(self) -> Factorized:
        """(H + σ²D)⁻¹ at the current prior and noise; ``σ²`` times it is the covariance.

        ``print(post.factorized.plan)`` shows how it is inverted.
        """
        if self._factorized is None:
            self._factorized = self._curvature.factorize(self._prior, self._noise)
        return self._factorized

    @property
    def accuracy(self) -> Accuracy:
        """Estimated errors of variances and of the log-determinant, from probes.

        Examples:
            >>> hcurv.laplace(model, loss, (inputs, targets)).accuracy.variance.value < 1e-6
            True
        """
        found: Accuracy = self.factorized.accuracy
        return found

    def predict(
        self,
        inputs: Data,
        method: Method = "probit",
        *,
        covariances: bool = False,
        num_samples: int = 1000,
        seed: int = 0,
        progress: bool = False,
    ) -> Prediction:
        """Predict with the linearised network: means and variances of outputs and of targets.

        Memory does not grow with N times the number of points: rows of Jacobians are made for some
        points at a time.

        Args:
            inputs: inputs, or an iterable of batches; targets are not used.
            method: how a classifier's probabilities are averaged over normally distributed logits.
                "probit" divides logits by √(1 + π/8·variance), "samples" takes the mean over
                samples of the logits, and "bridge" that of the Dirichlet distribution of the
                Laplace bridge (Hobbhahn and others 2022).
            covariances: whether to keep the covariances of the outputs of each point.
            num_samples: the number of samples of "samples".
            seed: their seed.
            progress: whether to show a progress bar over the points.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets))
            >>> found = post.predict(inputs, "samples", covariances=True)
            >>> found.covariances.shape, torch.allclose(found.mean.sum(1), torch.ones(20).double())
            (torch.Size([20, 3, 3]), True)
        """
        self._check_method(method)
        num_samples = check_count(num_samples, "num_samples")
        generator = torch.Generator().manual_seed(check_seed(seed))
        require_same_data(self._ranks, inputs, self.weights.dtype, "the inputs to predict at")
        parts = []
        hidden = not progress or not self._ranks.first
        with torch.no_grad(), tqdm(unit="points", disable=hidden) as bar:
            for some in self._chunks(inputs):
                parts.append(self._predict_some(some, method, covariances, num_samples, generator))
                bar.update(num_points(some))
        if not parts:
            raise ValueError("inputs are empty: at least one point is needed")
        return Prediction.join(parts)

    def _check_method(self, method: str) -> None:
        if method not in METHODS:
            known = ", ".join(f'"{name}"' for name in METHODS)
            raise ValueError(f"method must be one of {known}; got {method!r}")
        if method == "bridge" and self._likelihood.name != "classes":
            raise ValueError('method="bridge" is for one class out of several (CrossEntropyLoss)')

    def _chunks(self, data: Data) -> Iterator[Inputs]:
        """The inputs of some points at a time, so that their covariances fit into memory."""
        matrix = self._curvature.matrix
        num_outputs = matrix.num_root_rows // matrix.num_points
        step = max(1, _COVARIANCE_FLOATS // num_outputs**2)
        for inputs, _ in self._batches(data):
            yield from split_inputs(inputs, step)

    def _batches(self, data: Data) -> Batches:
        return Batches(data, self.weights.dtype, self.weights.device)

    def _predict_some(
        self,
        inputs: Inputs,
        method: Method,
        covariances: bool,
        num_samples: int,
        generator: torch.Generator,
    ) -> Prediction:
        jacobian = self._curvature.matrix.jacobian(inputs)
        outputs = jacobian.outputs()
        found = self.factorized.point_covariances(jacobian) * self._noise**2
        variances = found.diagonal(dim1=1, dim2=2).clamp(min=0).clone()
        likelihood = self._likelihood
        if likelihood.is_classifier:
            mean = probabilities(
                outputs,
                found,
                method=method,
                several=likelihood.name == "classes",
                num_samples=num_samples,
                generator=generator,
            )
        else:
            mean = likelihood.target_mean(outputs, variances)
        scatter = likelihood.target_variances(outputs, variances, self._noise)
        return Prediction(outputs, variances, found if covariances else None, mean, scatter)

    def sample(self, num: int = 1, seed: int = 0) -> Tensor:
        """Draw weights from the posterior, (num, N).

        ``post.layout.unflatten(sample)`` gives them names and shapes.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets))
            >>> samples = post.sample(10)
            >>> samples.shape, post.layout.unflatten(samples[0])["0.weight"].shape
            (torch.Size([10, 51]), torch.Size([6, 4]))
        """
        return self.weights + self._changes(num, seed)

    def _changes(self, num: int, seed: int) -> Tensor:
        """Samples of the weights, less their mean, (num, N)."""
        generator = torch.Generator().manual_seed(check_seed(seed))
        return self._noise * self.factorized.sample(num, generator)

    def predictive_samples(
        self, inputs: Data, num: int = 100, *, seed: int = 0, linearised: bool = True
    ) -> Tensor:
        """Outputs at sampled weights, (num, n, outputs): the same weights at all points.

        Args:
            inputs: inputs of n points, or an iterable of batches.
            num: the number of samples of the weights.
            seed: their seed.
            linearised: whether outputs are those of the network linearised at its weights, which
                is what `predict` is about, or of the network itself.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets))
            >>> post.predictive_samples(inputs, 10).shape
            torch.Size([10, 20, 3])
        """
        require_same_data(self._ranks, inputs, self.weights.dtype, "the inputs to predict at")
        changes = self._changes(num, seed)
        with torch.no_grad():
            if linearised:
                jacobian = self._curvature.matrix.jacobian(inputs)
                outputs = jacobian.outputs()
                moved = jacobian @ changes.T.contiguous()
                return outputs + moved.T.reshape(num, *outputs.shape)
            batches = [some for some, _ in self._batches(inputs)]
            samples = (self.layout.unflatten(self.weights + change) for change in changes)
            return torch.stack(
                [outputs_with(self._snapshot, values, batches) for values in samples]
            )

    def log_marginal_likelihood(
        self,
        prior_precision: DampingLike | None = None,
        noise: float | Tensor | None = None,
    ) -> Tensor:
        """The Laplace approximation of log p(targets), in double precision.

        log p(targets|θ) − ½ θᵀDθ + ½ log|D| − ½ log|H/σ² + D|. Derivatives pass to tensors that
        require them. For a linear model at its optimum it is exact.

        Args:
            prior_precision: D; None for the current one.
            noise: σ; None for the current one.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets))
            >>> prior = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
            >>> post.log_marginal_likelihood(prior).backward()
            >>> bool(prior.grad.isfinite())
            True
        """
        if noise is not None and not isinstance(noise, Tensor):
            check_noise(noise, self._likelihood)
        prior = self._prior if prior_precision is None else prior_precision
        if prior_precision is not None:
            checked_prior(prior_precision, self.layout)
        return self._evidence(prior, self._noise if noise is None else noise)

    def _evidence(self, prior: DampingLike, noise: float | Tensor, *, many: bool = False) -> Tensor:
        sigma = torch.as_tensor(noise, dtype=torch.float64)
        precision = as_damping(prior, self.layout.size, self.layout).tensor.double()
        squares = self.weights.double().square().cpu()
        scaled = precision * (squares.sum() if precision.ndim == 0 else squares)
        logs = precision.log().expand(self.layout.size).sum()
        curved = self._curvature.logdet(prior, sigma, many=many)
        fit = self._fit.log_likelihood(sigma)
        return fit - 0.5 * scaled.sum() + 0.5 * logs - 0.5 * curved

    def tune(
        self,
        prior: Grouping = "model",
        *,
        noise: bool | None = None,
        max_steps: int = 100,
        tolerance: float = 1e-9,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Choose the prior precision, and the noise, of the largest marginal likelihood.

        The weights stay as they are. The result does not depend on random numbers.

        Args:
            prior: what has a precision of its own: the whole "model", each "layer", or each
                "parameter".
            noise: whether to tune the noise, too; None for yes if this is a regression (but not
                with `GaussianNLL`, whose variances were given).
            max_steps: the largest number of steps; each costs a few factorizations, or next to
                nothing for one precision of a model of moderate size.
            tolerance: steps end once the evidence rises by less than this share of itself.
            progress: whether to show a progress bar.

        Returns:
            This posterior, with the new prior and noise. ``tuning`` is the record.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets)).tune("layer")
            >>> sorted(post.prior_precision)
            ['0.bias', '0.weight', '2.bias', '2.weight']
        """
        check_number(tolerance, "tolerance", above=0)
        if noise is None:
            noise = self._likelihood.is_noisy and not self._likelihood.has_given_noise
        elif noise and not self._likelihood.is_noisy:
            raise ValueError("noise is tuned for regressions only; leave noise=True out")
        if prior == "parameter" and self.structure in ("kfac", "ekfac"):
            raise ValueError('K-FAC takes one prior for each layer: use prior="layer"')
        chosen, sigma, record = maximise(
            lambda values, deviation: self._evidence(values, deviation, many=True),
            self.layout,
            self._prior,
            self._noise,
            grouping=prior,
            tunes_noise=noise,
            max_steps=check_count(max_steps, "max_steps"),
            tolerance=tolerance,
            progress=progress and self._ranks.first,
        )
        self._set(chosen, sigma)
        self.tuning = record
        return self

    def score(self, data: Data, method: Method = "probit", *, seed: int = 0) -> Score:
        """Compare predictions with targets: log-likelihood, accuracy, calibration.

        Args:
            data: inputs with targets.
            method: how probabilities are computed, as for `predict`.
            seed: the seed of samples.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets))
            >>> 0 <= post.score((inputs, targets)).calibration_error <= 1
            True
        """
        targets = self._batches(data).survey().targets
        if targets is None:
            raise ValueError("scores need targets: pass (inputs, targets) or a loader of both")
        return score(self._likelihood.name, self.predict(data, method, seed=seed), targets)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the prior, the noise, the weights and what identifies the data to a file.

        H is not stored: `load` computes it again from the data, which takes less time than reading
        it would where it is large. Of the processes of a group, the first writes the file.

        Examples:
            >>> post = hcurv.laplace(model, loss, (inputs, targets)).tune()
            >>> post.save("posterior.safetensors")
            >>> again = hcurv.LaplacePosterior.load(
            ...     "posterior.safetensors", model, loss, (inputs, targets)
            ... )
            >>> again.prior_precision == post.prior_precision
            True
        """
        from hcurv.applications.laplace.file_format import write_posterior

        with self._ranks.agreed():
            if self._ranks.first:
                write_posterior(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        *,
        forward_fn: ForwardFunction | None = None,
        process_group: ProcessGroup | None = None,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Read a posterior that `save` wrote, with the model, loss and data that it belongs to.

        Args:
            path: the file.
            model: the network; its weights must be those of the file.
            loss: the loss.
            data: the training data; its likelihood must be that of the file.
            forward_fn: as for `laplace`.
            process_group: as for `laplace`. Any number of processes can read the file, whichever
                number wrote it.
            progress: whether to show progress bars.

        Raises:
            FileNotFoundError: there is no such file.
            FileFormatError: it is damaged, or holds something else.
            ValueError: the model or the data is another one.

        Examples:
            >>> hcurv.laplace(model, loss, (inputs, targets)).save("posterior.safetensors")
            >>> hcurv.LaplacePosterior.load("posterior.safetensors", model, loss, (inputs, targets))
            LaplacePosterior(N=51, structure='exact', prior_precision=1, likelihood='classes')
        """
        from hcurv.applications.laplace.file_format import read_posterior

        return read_posterior(path, model, loss, data, forward_fn, process_group, progress)
