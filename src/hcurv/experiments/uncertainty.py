"""Networks whose uncertainty is measured, the dense truth, and rivals: for the table "laplace"."""

from __future__ import annotations

import copy
import importlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from hcurv.applications.laplace import Prediction, Score, laplace
from hcurv.applications.laplace.scores import auroc, score
from hcurv.experiments import datasets
from hcurv.experiments.reference_models import LeNet
from hcurv.experiments.uci import Split, split_uci

__all__ = [
    "Task",
    "dense_truth",
    "ensemble",
    "laplace_torch",
    "make_task",
    "measures",
    "train",
    "train_member",
]

# The precision of the prior in the first round of training.
FIRST_PRIOR = 1.0


@dataclass(frozen=True)
class Task:
    """A data set with a network.

    Attributes:
        split: training and test points.
        make: makes a network with its initial weights, from a seed.
        outside: inputs of another kind, and their name; None if there are none.
        rounds: how often the network is trained, and its prior chosen.
        iterations: iterations of L-BFGS in each round.
        steps: steps of Adam instead, in each round; 0 for L-BFGS.
    """

    split: Split
    make: Callable[[int], nn.Module]
    outside: tuple[str, Tensor] | None
    rounds: int
    iterations: int = 60
    steps: int = 0

    @property
    def loss(self) -> nn.Module:
        """What networks are trained with."""
        return nn.MSELoss() if self.split.targets.is_floating_point() else nn.CrossEntropyLoss()

    @property
    def name(self) -> str:
        """The name of the likelihood."""
        return "gaussian" if self.split.targets.is_floating_point() else "classes"


def make_task(settings: dict[str, Any], data: str | None, seed: int) -> Task:
    """The task of a row of the table."""
    name = settings["data"]
    if name == "lenet":
        images = _images(settings, data, small=False)
        return Task(*images, settings["rounds"], steps=settings["num_steps"])
    if name == "mnist":
        return Task(
            *_images(settings, data, small=True), settings["rounds"], settings["iterations"]
        )
    split = _digits(seed) if name == "digits" else split_uci(name, data, seed)
    rounds, iterations = settings["rounds"], settings["iterations"]
    sizes = (split.inputs.shape[1], settings["hidden"], split.num_outputs)
    return Task(
        split, lambda number: _chain(sizes, nn.Tanh, number).double(), None, rounds, iterations
    )


def _chain(sizes: tuple[int, int, int], activation: type[nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(*sizes[:2]), activation(), nn.Linear(*sizes[1:]))


def _digits(seed: int) -> Split:
    """Few of scikit-learn's digits, for quick runs."""
    images, labels = datasets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].double(), labels[order]
    return Split(images[:100], labels[:100], images[100:400], labels[100:400])


def _images(
    settings: dict[str, Any], data: str | None, small: bool
) -> tuple[Split, Callable[[int], nn.Module], tuple[str, Tensor]]:
    """MNIST, with other images as outsiders."""
    num_points, num_test = settings["num_points"], settings["num_test"]
    images, labels = datasets.mnist(data, train=True)
    test_images, test_labels = datasets.mnist(data, train=False)
    name, others = _outsiders(data, num_test)
    shape = _shrunken if small else _as_images
    split = Split(
        shape(images[:num_points]),
        labels[:num_points],
        shape(test_images[:num_test]),
        test_labels[:num_test],
    )

    def make(seed: int) -> nn.Module:
        if small:
            return _chain((196, settings["hidden"], 10), nn.ReLU, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LeNet()

    return split, make, (name, shape(others))


def _as_images(flat: Tensor) -> Tensor:
    return flat.view(-1, 1, 28, 28)


def _shrunken(flat: Tensor) -> Tensor:
    """14 x 14 pixels."""
    return functional.avg_pool2d(_as_images(flat), 2).flatten(1)


def _outsiders(data: str | Path | None, count: int) -> tuple[str, Tensor]:
    """Fashion-MNIST; if it cannot be had, the middle of CIFAR-10's images in gray."""
    try:
        return "Fashion-MNIST", datasets.fashion_mnist(data, train=False)[0][:count]
    except (FileNotFoundError, OSError, ValueError):
        images = datasets.cifar10(data, train=False)[0][:count].view(-1, 3, 32, 32)
        return "CIFAR-10 in gray", images.mean(1)[:, 2:30, 2:30].flatten(1)


def train(task: Task, seed: int) -> tuple[nn.Module, float, float]:
    """Train a network and choose its prior, in turns.

    Each round trains to the largest posterior density, from the weights of the round before, and
    then takes the prior (and the noise) of the largest marginal likelihood. This is how the
    marginal likelihood is meant to be used: tuned once, at weights of a prior that is far too weak,
    it finds another prior that is too weak.

    Returns:
        The network, and the prior precision and the noise of its last round.
    """
    model = task.make(seed)
    prior, noise = FIRST_PRIOR, 1.0
    for number in range(task.rounds):
        _run(task, model, prior, noise, seed + number)
        if number + 1 < task.rounds:
            data = (task.split.inputs, task.split.targets)
            posterior = laplace(model, task.loss, data, prior).tune()
            assert isinstance(posterior.prior_precision, float)
            prior, noise = posterior.prior_precision, posterior.noise or 1.0
    return model, prior, noise


def train_member(task: Task, seed: int, prior: float, noise: float) -> nn.Module:
    """Train one more network of an ensemble, with a prior that is known, for as long."""
    model = task.make(seed)
    for number in range(task.rounds):
        _run(task, model, prior, noise, seed + number)
    return model


def _run(task: Task, model: nn.Module, prior: float, noise: float, seed: int) -> None:
    if task.steps:
        _run_adam(task, model, prior, seed)
    else:
        _run_lbfgs(task, model, prior, noise)


def _run_lbfgs(task: Task, model: nn.Module, prior: float, noise: float) -> None:
    """All points in each step."""
    inputs, targets = task.split.inputs, task.split.targets
    total = len(inputs)
    loss = type(task.loss)(reduction="sum")
    # Half of the squared error, over the noise, is the negative log-likelihood.
    factor = 0.5 / noise**2 if task.name == "gaussian" else 1.0
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=task.iterations, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        fit = factor * loss(model(inputs), targets)
        value: Tensor = (fit + prior / 2 * _squares(model)) / total
        value.backward()
        return value

    optimizer.step(objective)


def _squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _run_adam(task: Task, model: nn.Module, prior: float, seed: int) -> None:
    """Random batches of 128 points."""
    inputs, targets = task.split.inputs, task.split.targets
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(task.steps):
        batch = torch.randint(len(inputs), (128,), generator=generator)
        optimizer.zero_grad()
        fit = functional.cross_entropy(model(inputs[batch]), targets[batch])
        (fit + prior / (2 * len(inputs)) * _squares(model)).backward()
        optimizer.step()


def measures(task: Task, prediction: Prediction, outside: Prediction | None) -> dict[str, Any]:
    """Scores of predictions at the test points, and how well outsiders or errors are seen."""
    found: Score = score(task.name, prediction, task.split.test_targets)
    values: dict[str, Any] = {
        "log_likelihood": found.log_likelihood,
        "calibration_error": found.calibration_error,
        "accuracy": found.accuracy,
        "coverage": found.coverage,
        "root_mean_square": found.root_mean_square,
        "auroc": None,
    }
    if task.name == "classes":
        inside = _entropy(prediction.mean)
        if outside is not None:
            values["auroc"] = auroc(inside, _entropy(outside.mean))
        else:
            wrong = prediction.mean.argmax(1) != task.split.test_targets
            if bool(wrong.any()) and not bool(wrong.all()):
                values["auroc"] = auroc(inside[~wrong], inside[wrong])
    return values


def _entropy(chances: Tensor) -> Tensor:
    terms: Tensor = torch.special.entr(chances.double())
    return terms.sum(1)


def plain(task: Task, model: nn.Module, inputs: Tensor) -> Prediction:
    """What a network itself predicts; a regression with the noise of its residuals."""
    with torch.no_grad():
        outputs = model(inputs)
        zeros = torch.zeros_like(outputs)
        if task.name == "classes":
            return Prediction(outputs, zeros, None, outputs.softmax(1), None)
        errors = model(task.split.inputs) - task.split.targets
        noise = errors.square().mean()
        return Prediction(outputs, zeros, None, outputs, zeros + noise)


def ensemble(task: Task, models: list[nn.Module], inputs: Tensor) -> Prediction:
    """The mean of several networks; variances of regressions are those of the mixture."""
    parts = [plain(task, model, inputs) for model in models]
    mean = torch.stack([part.mean for part in parts]).mean(0)
    outputs = torch.stack([part.outputs for part in parts])
    scatter = None
    if task.name == "gaussian":
        own = torch.stack([part.target_variances for part in parts])  # type: ignore[misc]
        scatter = own.mean(0) + outputs.var(0, correction=0)
    return Prediction(outputs.mean(0), outputs.var(0, correction=0), None, mean, scatter)


@dataclass(frozen=True)
class DenseTruth:
    """The dense posterior in double precision, from `torch.func` alone.

    Attributes:
        evidence: the log marginal likelihood.
        predict: gives predictions at inputs, by probit.
    """

    evidence: float
    predict: Callable[[Tensor], Prediction]


def dense_truth(task: Task, model: nn.Module, prior: float, noise: float | None) -> DenseTruth:
    """Form J of all points, some at a time, and H + D; share nothing with the package."""
    model = _double(model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    flat = torch.cat([p.flatten() for p in weights.values()])
    sigma = 1.0 if noise is None else noise

    def jacobian(points: Tensor) -> Tensor:
        def one(values: dict[str, Tensor], point: Tensor) -> Tensor:
            return functional_call(model, values, (point[None],))[0]  # type: ignore[no-any-return]

        parts = vmap(jacrev(one), (None, 0))(weights, points)
        return torch.cat([part.flatten(2) for part in parts.values()], 2)

    precision = prior * torch.eye(flat.numel(), dtype=torch.float64)
    for points in task.split.inputs.double().split(100):
        rows = jacobian(points)
        with torch.no_grad():
            if task.name == "classes":
                chances = model(points).softmax(1)
                # diag(p) − ppᵀ is its own weight: multiply J by it once.
                weighted = chances[:, :, None] * (
                    rows - torch.einsum("nc,nck->nk", chances, rows)[:, None]
                )
            else:
                weighted = rows / sigma**2
            precision.addmm_(rows.flatten(0, 1).T, weighted.flatten(0, 1))
    factor = torch.linalg.cholesky(precision)
    del precision
    with torch.no_grad():
        outputs = model(task.split.inputs.double())
    fit = _log_likelihood(task, outputs, sigma)
    evidence = (
        fit
        - 0.5 * prior * float(flat @ flat)
        + 0.5 * flat.numel() * math.log(prior)
        - float(factor.diagonal().log().sum())
    )

    def predict(points: Tensor) -> Prediction:
        found = []
        for some in points.double().split(100):
            rows = jacobian(some)
            with torch.no_grad():
                halves = torch.linalg.solve_triangular(
                    factor, rows.flatten(0, 1).T, upper=False
                ).square()
                variances = halves.sum(0).view(rows.shape[:2])
                values = model(some)
                if task.name == "classes":
                    mean = (values / (1 + math.pi / 8 * variances).sqrt()).softmax(1)
                    found.append(Prediction(values, variances, None, mean, None))
                else:
                    scatter = variances + sigma**2
                    found.append(Prediction(values, variances, None, values, scatter))
        return Prediction.join(found)

    return DenseTruth(evidence, predict)


def _log_likelihood(task: Task, outputs: Tensor, sigma: float) -> float:
    if task.name == "classes":
        return -float(functional.cross_entropy(outputs, task.split.targets, reduction="sum"))
    normal = torch.distributions.Normal(outputs, sigma)
    return float(normal.log_prob(task.split.targets.double()).sum())


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def laplace_torch(
    task: Task, model: nn.Module, structure: str, prior: float, noise: float | None
) -> dict[str, Any] | None:
    """The package laplace-torch at a given prior, if it is installed: evidence, time, scores.

    It is not needed, and not part of what is measured where it is missing.
    """
    try:
        library = importlib.import_module("laplace")
        backend = importlib.import_module("laplace.curvature").CurvlinopsGGN
    except ImportError:
        return None
    from torch.utils.data import DataLoader, TensorDataset

    split = task.split
    loader = DataLoader(TensorDataset(split.inputs, split.targets), batch_size=256)
    kind = "classification" if task.name == "classes" else "regression"
    start = time.perf_counter()
    posterior = library.Laplace(
        copy.deepcopy(model),  # If it fails, it leaves hooks on the model.
        kind,
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=prior,
        backend=backend,
        **({} if noise is None else {"sigma_noise": noise}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it uses of torch may be deprecated
        posterior.fit(loader)
    evidence = float(posterior.log_marginal_likelihood())
    fitted = time.perf_counter() - start
    start = time.perf_counter()
    parts = [posterior(some, pred_type="glm") for some in split.test_inputs.split(256)]
    seconds = time.perf_counter() - start
    if task.name == "classes":
        mean = torch.cat(parts).detach()
        prediction = Prediction(mean, mean, None, mean, None)
    else:
        mean = torch.cat([part[0] for part in parts]).detach()
        own = torch.cat([part[1].diagonal(dim1=1, dim2=2) for part in parts]).detach()
        prediction = Prediction(mean, own, None, mean, own + float(noise or 0) ** 2)
    values = measures(task, prediction, None)
    if task.outside is not None:
        values["auroc"] = None  # Outsiders were not predicted.
    return {
        **values,
        "evidence": evidence,
        "fit_seconds": fitted,
        "predict_seconds": seconds,
    }
