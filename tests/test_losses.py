"""Square roots, gradients and divisors of the losses, for outputs of any shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
import oracles
from cases import (
    CASES,
    DTYPES,
    Case,
    QuarticLoss,
    all_cases,
    assert_close,
    both_dtypes,
    labels,
    normal,
    pairwise,
)
from hcurv.losses import Loss, as_loss
from oracles import hessian

Shape: TypeAlias = tuple[int, ...]

REDUCTIONS = ("mean", "sum")
SHAPES = [(4, 3), (2, 3, 4), (2, 3, 2, 2)]
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=["vectors", "sequences", "images"])


def class_labels(shape: Shape) -> Tensor:
    """Labels for outputs (b, C, d1, ...)."""
    positions = (shape[0], *shape[2:])
    return labels(torch.Size(positions).numel(), shape[1]).reshape(positions)


def class_probabilities(shape: Shape) -> Tensor:
    return torch.softmax(normal(*shape, seed=3), 1)


def some_ignored(shape: Shape) -> Tensor:
    """Labels of which the first and some others are -100."""
    given = class_labels(shape)
    return torch.where(torch.arange(given.numel()).reshape(given.shape) % 3 == 0, -100, given)


def values(shape: Shape) -> Tensor:
    return normal(*shape, seed=3)


def counts(shape: Shape) -> Tensor:
    return labels(torch.Size(shape).numel(), 5).reshape(shape)


def chances(shape: Shape) -> Tensor:
    return torch.sigmoid(values(shape))


def positive(count: int) -> Tensor:
    """Factors such as weights."""
    return 0.5 + torch.arange(count, dtype=torch.float64)


class KnownVariance(nn.Module):
    """torch's Gaussian loss with variances of its own."""

    def __init__(self, variance: float | Tensor, reduction: str) -> None:
        super().__init__()
        self.variance, self.reduction = variance, reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        variance = torch.as_tensor(self.variance, dtype=outputs.dtype).expand_as(outputs)
        return nn.functional.gaussian_nll_loss(outputs, targets, variance, reduction=self.reduction)

    def as_ours(self) -> Loss:
        return hcurv.losses.GaussianNLL(self.variance, self.reduction)


class HalfSquares(nn.Module):
    """The loss of the paper."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        total = (outputs - targets).square().sum() / 2
        return total if self.reduction == "sum" else total / len(outputs)

    def as_ours(self) -> Loss:
        return hcurv.losses.HalfSquaredError(self.reduction)


@dataclass(frozen=True)
class Example:
    """A loss of torch with outputs and targets that fit it.

    Attributes:
        loss: makes the loss from the shape of the outputs and the reduction.
        targets: makes targets from the shape of the outputs.
        outputs: makes outputs from any real numbers.
    """

    loss: Callable[[Shape, str], nn.Module]
    targets: Callable[[Shape], Tensor]
    outputs: Callable[[Tensor], Tensor] = torch.clone

    def ours(self, shape: Shape, reduction: str) -> Loss:
        exact = self.loss(shape, reduction)
        return exact.as_ours() if hasattr(exact, "as_ours") else as_loss(exact)


CONVEX = {
    "labels": Example(lambda _, r: nn.CrossEntropyLoss(reduction=r), class_labels),
    "ignored labels": Example(lambda _, r: nn.CrossEntropyLoss(reduction=r), some_ignored),
    "weighted labels": Example(
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), ignore_index=1, reduction=r),
        class_labels,
    ),
    "smoothed labels": Example(
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), label_smoothing=0.3, reduction=r),
        some_ignored,
    ),
    "probabilities": Example(
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), label_smoothing=0.3, reduction=r),
        class_probabilities,
    ),
    "squares": Example(lambda _, r: nn.MSELoss(reduction=r), values),
    "half squares": Example(lambda _, r: HalfSquares(r), values),
    "known variance": Example(lambda _, r: KnownVariance(0.3, r), values),
    "known variances": Example(lambda shape, r: KnownVariance(positive(shape[-1]), r), values),
    "Huber": Example(lambda _, r: nn.HuberLoss(reduction=r, delta=0.7), values),
    "smooth errors": Example(lambda _, r: nn.SmoothL1Loss(reduction=r, beta=0.7), values),
    "logistic": Example(lambda _, r: nn.BCEWithLogitsLoss(reduction=r), chances),
    "weighted logistic": Example(
        lambda shape, r: nn.BCEWithLogitsLoss(
            positive(shape[-1]), pos_weight=1 / positive(shape[-1]), reduction=r
        ),
        chances,
    ),
    "log-rates": Example(lambda _, r: nn.PoissonNLLLoss(reduction=r), counts),
    "rates": Example(
        lambda _, r: nn.PoissonNLLLoss(log_input=False, full=True, eps=0.01, reduction=r),
        counts,
        torch.exp,
    ),
}

# Losses after a softmax or a sigmoid, and the losses on logits that have the same matrix.
LIKELIHOODS = {
    "labels": Example(
        lambda _, r: nn.NLLLoss(reduction=r), class_labels, lambda z: z.log_softmax(1)
    ),
    "weighted labels": Example(
        lambda shape, r: nn.NLLLoss(positive(shape[1]), ignore_index=1, reduction=r),
        class_labels,
        lambda z: z.log_softmax(1),
    ),
    "ignored labels": Example(
        lambda _, r: nn.NLLLoss(reduction=r), some_ignored, lambda z: z.log_softmax(1)
    ),
    "logistic": Example(lambda _, r: nn.BCELoss(reduction=r), chances, torch.sigmoid),
    "weighted logistic": Example(
        lambda shape, r: nn.BCELoss(positive(shape[-1]), reduction=r), chances, torch.sigmoid
    ),
}
ON_LOGITS = {
    **CONVEX,
    "weighted logistic": Example(
        lambda shape, r: nn.BCEWithLogitsLoss(positive(shape[-1]), reduction=r), chances
    ),
}
EXAMPLES = CONVEX | {f"{name}, after a link": example for name, example in LIKELIHOODS.items()}


def rows_of(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of outputs, (r, d), their targets, and where they are among all outputs, (r, d)."""
    loss.check_targets(tuple(outputs.shape), targets)
    rows = loss.split_outputs(outputs).flatten(0, 1)
    loss.check_outputs(rows)
    numbers = torch.arange(outputs.numel()).reshape(outputs.shape)
    return (
        rows,
        loss.split_targets(targets, tuple(outputs.shape)),
        loss.split_outputs(numbers).flatten(0, 1),
    )


def scale(loss: Loss, outputs: Tensor, targets: Tensor | None) -> float:
    return 1.0 if loss.reduction == "sum" else 1 / loss.divisor(tuple(outputs.shape), targets)


def dense_hessian(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The matrix Q of all outputs, from the square roots of the rows."""
    rows, row_targets, places = rows_of(loss, outputs, targets)
    root = loss.hessian_sqrt(rows, row_targets)
    root = torch.diag_embed(root) if root.ndim == 2 else root
    result = outputs.new_zeros(outputs.numel(), outputs.numel())
    result[places[:, :, None], places[:, None, :]] = root.mT @ root
    return result * scale(loss, outputs, targets)


def flat_gradient(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    rows, row_targets, places = rows_of(loss, outputs, targets)
    result = outputs.new_zeros(outputs.numel())
    result[places] = loss.gradient(rows, row_targets)
    return result * scale(loss, outputs, targets)


def assert_is_loss(example: Example, shape: Shape, reduction: str, dtype: torch.dtype) -> None:
    """Compare Hessian and gradient with those of torch's own loss in double precision."""
    exact, loss, targets = (
        example.loss(shape, reduction),
        example.ours(shape, reduction),
        example.targets(shape),
    )
    outputs = example.outputs(normal(*shape)).to(dtype)
    flat = outputs.double().reshape(-1)

    def oracle(flat: Tensor) -> Tensor:
        return exact(flat.view_as(outputs), targets)

    size = flat.numel()
    assert_close(dense_hessian(loss, outputs, targets), hessian(oracle)(flat).view(size, size), 1e3)
    assert_close(flat_gradient(loss, outputs, targets), torch.func.grad(oracle)(flat), 1e3)


@pairwise(name=CONVEX, shape=SHAPES, reduction=REDUCTIONS, dtype=DTYPES)
def test_losses_are_those_of_torch(
    name: str, shape: Shape, reduction: str, dtype: torch.dtype
) -> None:
    assert_is_loss(CONVEX[name], shape, reduction, dtype)


@given(
    num_points=st.integers(1, 3),
    num_classes=st.integers(1, 4),
    positions=st.lists(st.integers(1, 3), max_size=3),
    name=st.sampled_from(list(CONVEX)),
)
def test_losses_are_those_of_torch_for_any_shape(
    num_points: int, num_classes: int, positions: list[int], name: str
) -> None:
    assert_is_loss(CONVEX[name], (num_points, num_classes, *positions), "sum", torch.float64)


@pairwise(name=LIKELIHOODS, shape=SHAPES, reduction=REDUCTIONS)
def test_likelihoods_have_the_matrix_of_the_loss_on_logits(
    name: str, shape: Shape, reduction: str
) -> None:
    example, logits = LIKELIHOODS[name], normal(*shape)
    targets, size = example.targets(shape), logits.numel()
    jacobian = torch.func.jacrev(example.outputs)(logits).reshape(size, size)
    fisher = dense_hessian(example.ours(shape, reduction), example.outputs(logits), targets)
    expected = dense_hessian(ON_LOGITS[name].ours(shape, reduction), logits, targets)
    difference = jacobian.T @ fisher @ jacobian - expected
    assert float(difference.abs().max()) <= 1e-12 * float(expected.abs().max())


@pairwise(name=LIKELIHOODS, shape=SHAPES, reduction=REDUCTIONS, dtype=DTYPES)
def test_gradients_of_likelihoods_are_those_of_torch(
    name: str, shape: Shape, reduction: str, dtype: torch.dtype
) -> None:
    example = LIKELIHOODS[name]
    outputs, targets = example.outputs(normal(*shape)).to(dtype), example.targets(shape)
    exact = outputs.double().clone().requires_grad_()
    (expected,) = torch.autograd.grad(example.loss(shape, reduction)(exact, targets), exact)
    found = flat_gradient(example.ours(shape, reduction), outputs, targets)
    assert_close(found, expected.flatten(), 1e3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_second_moments_of_drawn_gradients_are_the_hessian(name: str) -> None:
    shape, count = (1, 3), 20_000
    example = EXAMPLES[name]
    outputs, targets = example.outputs(normal(*shape)), example.targets(shape)
    loss = example.ours(shape, "sum")
    rows, row_targets, _ = rows_of(loss, outputs, targets)
    gradients = loss.sample_gradient(
        rows.expand(count, -1),
        row_targets.expand(count, *row_targets.shape[1:]),
        torch.Generator().manual_seed(0),
    )
    products = gradients[:, :, None] * gradients[:, None, :]
    expected = dense_hessian(loss, outputs, targets)
    errors = (products.mean(0) - expected).abs()
    # Six standard errors of the mean, and the rounding of entries that are not random.
    bound = 6 * products.std(0) / count**0.5 + 1e-12 * expected.abs().max()
    assert bool((errors <= bound).all())


@all_shapes
@pytest.mark.parametrize("name", EXAMPLES)
def test_splitting_permutes_outputs_and_passes_derivatives(name: str, shape: Shape) -> None:
    outputs = normal(*shape).requires_grad_()
    rows = EXAMPLES[name].ours(shape, "mean").split_outputs(outputs)
    assert rows.shape[0] == shape[0]
    assert rows.ndim == 3
    assert torch.equal(rows.flatten().sort().values, outputs.flatten().sort().values)
    (derivative,) = torch.autograd.grad(rows.square().sum(), outputs)
    assert torch.equal(derivative, 2 * outputs)


@all_shapes
@pytest.mark.parametrize("name", EXAMPLES)
def test_divisors_of_batches_add_up(name: str, shape: Shape) -> None:
    loss, targets = EXAMPLES[name].ours(shape, "mean"), EXAMPLES[name].targets(shape)
    parts = [loss.divisor((1, *shape[1:]), targets[i : i + 1]) for i in range(shape[0])]
    assert sum(parts) == pytest.approx(loss.divisor(shape, targets), rel=1e-12)


@all_shapes
@pytest.mark.parametrize("name", [name for name in EXAMPLES if "label" not in name])
def test_divisors_need_no_targets_where_all_count(name: str, shape: Shape) -> None:
    loss = EXAMPLES[name].ours(shape, "mean")
    assert loss.divisor(shape, None) == loss.divisor(shape, EXAMPLES[name].targets(shape))


@all_shapes
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_positions_that_are_all_ignored_count_nothing(kind: type, shape: Shape) -> None:
    loss, outputs = as_loss(kind(reduction="sum")), normal(*shape).log_softmax(1)
    targets = torch.full_like(class_labels(shape), -100)
    assert loss.divisor(shape, targets) == 0
    assert loss.divisor(shape, None) == class_labels(shape).numel()
    assert not dense_hessian(loss, outputs, targets).any()
    assert not flat_gradient(loss, outputs, targets).any()


@both_dtypes
def test_saturated_probabilities_weigh_nothing(dtype: torch.dtype) -> None:
    loss, generator = as_loss(nn.BCELoss()), torch.Generator().manual_seed(0)
    tiny, eps = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).eps
    outputs = torch.tensor([[0.0, 1.0, tiny, 1 - eps]], dtype=dtype)
    loss.check_outputs(outputs)
    root = loss.hessian_sqrt(outputs, None)
    assert root[0, :2].tolist() == [0, 0]
    # The product with the slope s(1 − s) of the sigmoid is √(s(1 − s)), large as the root may be.
    slopes = outputs * (1 - outputs)
    for position in (2, 3):
        assert_close(root[0, position] * slopes[0, position], slopes[0, position].sqrt())
    drawn = loss.sample_gradient(outputs, None, generator)
    assert drawn[0, :2].tolist() == [0, 0]
    assert bool(drawn.isfinite().all())


SATURATED: dict[str, tuple[Loss, Tensor]] = {
    "labels": (hcurv.losses.CrossEntropy(), torch.arange(4)),
    "weights": (hcurv.losses.CrossEntropy(weight=positive(4)), torch.arange(4)),
    "unit vectors": (hcurv.losses.CrossEntropy(), torch.eye(4)),
    "wrong labels": (hcurv.losses.CrossEntropy(), torch.arange(4).flip(0)),
    "ones": (hcurv.losses.BinaryCrossEntropy(), torch.eye(4)),
    "weighted ones": (
        hcurv.losses.BinaryCrossEntropy(positive(4), torch.tensor(3.0)),
        torch.eye(4),
    ),
}


@pytest.mark.parametrize("name", SATURATED)
def test_gradients_keep_their_digits_where_a_network_is_certain(name: str) -> None:
    """p − 1 has no digit left in single precision for p = 1 − 1e-9; its rows do."""
    loss, targets = SATURATED[name]
    outputs = 20.0 * torch.eye(4) + 0.1 * normal(4, 4).float() - 10.0 * (targets.ndim > 1)
    for derivative in (
        loss.gradient,
        loss.hessian_sqrt,
        lambda x, y: loss.sample_gradient(x, y, torch.Generator().manual_seed(0)),
    ):
        found, expected = derivative(outputs, targets), derivative(outputs.double(), targets)
        assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-30)


@both_dtypes
@pytest.mark.parametrize("name", [name for name in CONVEX if "label" not in name])
def test_networks_have_the_matrix_of_torch_s_loss(name: str, dtype: torch.dtype) -> None:
    example, shape = CONVEX[name], (11, 3)
    model, inputs = CASES["classifier"].build(), CASES["classifier"].inputs.float().double()
    if example.outputs is torch.exp:
        model = nn.Sequential(model, nn.Softplus())
    targets = example.targets(shape)
    operator = hcurv.GaussNewton(
        copy.deepcopy(model).to(dtype), example.ours(shape, "mean"), (inputs.to(dtype), targets)
    )
    exact = example.loss(shape, "mean")

    def oracle(outputs: Tensor) -> Tensor:
        return exact(outputs, targets)

    assert_close(operator.to_dense(), oracles.gauss_newton(model, oracle, inputs), 1e3)
    assert_close(operator.gradient(), oracles.gradient(model, oracle, inputs), 1e3)


@both_dtypes
def test_networks_with_a_sigmoid_have_the_matrix_of_their_logits(dtype: torch.dtype) -> None:
    model, inputs = CASES["classifier"].build(), CASES["classifier"].inputs.float().double()
    targets = chances((11, 3))
    network = nn.Sequential(copy.deepcopy(model), nn.Sigmoid()).to(dtype)
    operator = hcurv.GaussNewton(network, nn.BCELoss(), (inputs.to(dtype), targets))

    def oracle(outputs: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets)

    assert_close(operator.to_dense(), oracles.gauss_newton(model, oracle, inputs), 1e3)
    assert_close(operator.gradient(), oracles.gradient(model, oracle, inputs), 1e3)


def test_own_losses_get_one_row_per_point_and_targets_that_fit() -> None:
    loss = QuarticLoss()
    assert loss.split_outputs(normal(2, 3, 4)).shape == (2, 1, 12)
    assert loss.split_outputs(normal(5)).shape == (5, 1, 1)
    assert loss.split_outputs(normal(0, 3, 4)).shape == (0, 1, 12)
    assert torch.equal(
        loss.split_targets(normal(2, 3, 4), (2, 3, 4)), normal(2, 3, 4).reshape(2, 12)
    )
    assert torch.equal(loss.split_targets(labels(2, 3), (2, 3, 4)), labels(2, 3))
    assert loss.divisor((2, 3, 4), None) == 2


@all_cases
def test_square_roots_give_the_hessian(case: Case) -> None:
    outputs = case.build()(case.inputs).detach()
    found = dense_hessian(as_loss(case.loss), outputs, case.targets)
    expected = hessian(case.loss_of_outputs)(outputs).view_as(found)
    assert_close(found, expected, 1e3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_return_the_type_of_the_outputs(name: str) -> None:
    example, shape = EXAMPLES[name], (11, 3)
    loss, targets = example.ours(shape, "mean"), example.targets(shape)
    outputs = example.outputs(normal(*shape)).float()
    generator = torch.Generator().manual_seed(0)
    assert loss.gradient(outputs, targets).dtype == torch.float32
    assert loss.hessian_sqrt(outputs, targets).dtype == torch.float32
    assert loss.sample_gradient(outputs, targets, generator).dtype == torch.float32


def test_losses_need_targets_exactly_if_their_hessians_do() -> None:
    shape = (11, 3)
    for name, example in EXAMPLES.items():
        loss, targets = example.ours(shape, "mean"), example.targets(shape)
        other = targets.flip(0)
        outputs = example.outputs(normal(*shape))
        found = loss.hessian_sqrt(outputs, targets)
        changes = not torch.allclose(found, loss.hessian_sqrt(outputs, other))
        # The default label to ignore, -100, occurs only if targets are given.
        assert loss.needs_targets == changes or "ignored labels" in name, name
        if not changes:
            assert torch.allclose(found, loss.hessian_sqrt(outputs, None)), name
