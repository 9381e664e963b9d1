"""Square roots and gradients of the losses, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hcurv
import oracles
from cases import CASES, Case, QuarticLoss, all_cases, assert_close, both_dtypes, labels, normal
from hcurv.losses import Loss, as_loss
from oracles import hessian

Shape: TypeAlias = tuple[int, ...]

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


def chances(shape: Shape) -> Tensor:
    return torch.sigmoid(values(shape))


def positive(count: int) -> Tensor:
    """Factors such as weights."""
    return 0.5 + torch.arange(count, dtype=torch.float64)


# Losses that are convex in the outputs: a loss for outputs of a given shape, and its targets.
CONVEX: dict[str, tuple[Callable[[Shape, str], nn.Module], Callable[[Shape], Tensor]]] = {
    "labels": (lambda _, r: nn.CrossEntropyLoss(reduction=r), class_labels),
    "ignored labels": (lambda _, r: nn.CrossEntropyLoss(reduction=r), some_ignored),
    "weighted labels": (
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), ignore_index=1, reduction=r),
        class_labels,
    ),
    "smoothed labels": (
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), label_smoothing=0.3, reduction=r),
        some_ignored,
    ),
    "probabilities": (
        lambda shape, r: nn.CrossEntropyLoss(positive(shape[1]), label_smoothing=0.3, reduction=r),
        class_probabilities,
    ),
    "squares": (lambda _, r: nn.MSELoss(reduction=r), values),
    "logistic": (lambda _, r: nn.BCEWithLogitsLoss(reduction=r), chances),
    "weighted logistic": (
        lambda shape, r: nn.BCEWithLogitsLoss(
            positive(shape[-1]), pos_weight=1 / positive(shape[-1]), reduction=r
        ),
        chances,
    ),
}


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


def assert_is_loss(loss: Loss, exact: nn.Module, outputs: Tensor, targets: Tensor) -> None:
    """Compare Hessian and gradient with those of torch's own loss in double precision."""
    flat = outputs.double().reshape(-1)

    def oracle(flat: Tensor) -> Tensor:
        return exact(flat.view_as(outputs), targets)

    size = flat.numel()
    assert_close(dense_hessian(loss, outputs, targets), hessian(oracle)(flat).view(size, size), 1e3)
    assert_close(flat_gradient(loss, outputs, targets), torch.func.grad(oracle)(flat), 1e3)


@both_dtypes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@all_shapes
@pytest.mark.parametrize("name", CONVEX)
def test_losses_are_those_of_torch(
    name: str, shape: Shape, reduction: str, dtype: torch.dtype
) -> None:
    make_loss, make_targets = CONVEX[name]
    exact = make_loss(shape, reduction)
    assert_is_loss(as_loss(exact), exact, normal(*shape).to(dtype), make_targets(shape))


@given(
    num_points=st.integers(1, 3),
    num_classes=st.integers(1, 4),
    positions=st.lists(st.integers(1, 3), max_size=3),
    name=st.sampled_from([name for name in CONVEX if "logistic" not in name]),
)
def test_losses_are_those_of_torch_for_any_shape(
    num_points: int, num_classes: int, positions: list[int], name: str
) -> None:
    shape = (num_points, num_classes, *positions)
    make_loss, make_targets = CONVEX[name]
    exact = make_loss(shape, "sum")
    assert_is_loss(as_loss(exact), exact, normal(*shape), make_targets(shape))


@all_shapes
@pytest.mark.parametrize("name", CONVEX)
def test_splitting_permutes_outputs_and_passes_derivatives(name: str, shape: Shape) -> None:
    loss = as_loss(CONVEX[name][0](shape, "mean"))
    outputs = normal(*shape).requires_grad_()
    rows = loss.split_outputs(outputs)
    assert rows.shape[0] == shape[0]
    assert rows.ndim == 3
    assert torch.equal(rows.flatten().sort().values, outputs.flatten().sort().values)
    (derivative,) = torch.autograd.grad(rows.square().sum(), outputs)
    assert torch.equal(derivative, 2 * outputs)


@all_shapes
@pytest.mark.parametrize("name", CONVEX)
def test_divisors_of_batches_add_up(name: str, shape: Shape) -> None:
    make_loss, make_targets = CONVEX[name]
    loss, targets = as_loss(make_loss(shape, "mean")), make_targets(shape)
    parts = [loss.divisor((1, *shape[1:]), targets[i : i + 1]) for i in range(shape[0])]
    assert sum(parts) == pytest.approx(loss.divisor(shape, targets), rel=1e-12)


@pytest.mark.parametrize("name", ["labels", "squares", "logistic"])
def test_divisors_need_no_targets_where_all_count(name: str) -> None:
    make_loss, make_targets = CONVEX[name]
    for shape in SHAPES:
        loss = as_loss(make_loss(shape, "mean"))
        assert loss.divisor(shape, None) == loss.divisor(shape, make_targets(shape))


@all_shapes
def test_positions_that_are_all_ignored_count_nothing(shape: Shape) -> None:
    loss = hcurv.losses.CrossEntropy()
    targets = torch.full_like(class_labels(shape), -100)
    assert loss.divisor(shape, targets) == 0
    loss = hcurv.losses.CrossEntropy(reduction="sum")
    assert not dense_hessian(loss, normal(*shape), targets).any()
    assert not flat_gradient(loss, normal(*shape), targets).any()


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


def test_unsupported_losses_are_refused() -> None:
    with pytest.raises(TypeError, match="no Hessian is known for the loss L1Loss; supported are"):
        as_loss(nn.L1Loss())
    for loss in (nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss):
        with pytest.raises(ValueError, match="reduction='none' leaves no scalar loss"):
            as_loss(loss(reduction="none"))
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'; got 'none'"):
        hcurv.losses.HalfSquaredError("none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="class weights must not be negative"):
        as_loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, -1.0])))
    with pytest.raises(ValueError, match="pos_weight must not be negative"):
        as_loss(nn.BCEWithLogitsLoss(pos_weight=torch.tensor([-1.0])))
    with pytest.raises(ValueError, match="weight must be a scalar or one value per output"):
        as_loss(nn.BCEWithLogitsLoss(weight=torch.ones(5, 2)))
    for smoothing in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\]; got"):
            as_loss(nn.CrossEntropyLoss(label_smoothing=smoothing))


@pytest.mark.parametrize(
    "name", ["class weights", "class weights, smoothing, ignored class", "logistic", "own loss"]
)
def test_missing_targets_are_asked_for(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ValueError, match="depends on the targets: pass data as"):
        hcurv.GaussNewton(case.build(), case.loss, case.inputs)


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (nn.CrossEntropyLoss(), labels(11, 3)[:, None], "targets must be class labels of shape"),
        (
            nn.CrossEntropyLoss(),
            labels(11, 3) + 1,
            r"class labels must lie in \[0, 3\); got 1 to 3",
        ),
        (nn.CrossEntropyLoss(), normal(11, 3), "class probabilities must not be negative"),
        (nn.CrossEntropyLoss(), normal(11, 2), r"shape of the network's outputs, \(11, 3\)"),
        (nn.MSELoss(), normal(11, 1), r"\(11, 3\); got \(11, 1\)"),
        (hcurv.losses.HalfSquaredError(), normal(11), r"\(11, 3\); got \(11,\)"),
        (nn.BCEWithLogitsLoss(), 1 + normal(11, 3).abs(), r"must lie in \[0, 1\]"),
        (
            nn.CrossEntropyLoss(weight=torch.ones(4)),
            labels(11, 3),
            r"one value per class, \(3,\); got \(4,\)",
        ),
        (
            nn.CrossEntropyLoss(ignore_index=0),
            torch.zeros(11, dtype=torch.long),
            "no point counts towards the mean",
        ),
    ],
)
def test_unfit_targets_are_refused(loss: nn.Module, targets: Tensor, message: str) -> None:
    case = CASES["classifier"]
    with pytest.raises(ValueError, match=message):
        hcurv.GaussNewton(case.build(), loss, (case.inputs, targets))
    if not as_loss(loss).needs_targets:
        with pytest.raises(ValueError, match=message):
            hcurv.GaussNewton(case.build(), loss, case.inputs).gradient(targets)


TOKENS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("loss", "outputs_shape", "targets", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            (2, 5, 3),
            TOKENS,
            r"labels of shape \(2, 5\) fit outputs of shape \(2, 5, 3\) only if the classes are the"
            r" last axis, but torch's convention is classes second: pass"
            r" forward_fn=lambda model, x: model\(x\).transpose\(1, 2\)",
        ),
        (nn.CrossEntropyLoss(), (2, 5, 4, 3), torch.ones(2, 5, 4).long(), r"movedim\(-1, 1\)"),
        (
            nn.CrossEntropyLoss(),
            (2, 3, 4),
            TOKENS,
            r"class labels of shape \(2, 4\) for outputs of shape \(2, 3, 4\); got \(2, 5\)",
        ),
        (nn.CrossEntropyLoss(), (2, 3, 5), TOKENS + 3, r"must lie in \[0, 3\); got 3 to 3"),
        (
            nn.CrossEntropyLoss(),
            (2, 3, 5),
            TOKENS.double(),
            r"class labels must be integers; got torch.float64 .* targets.long\(\)",
        ),
        (
            nn.CrossEntropyLoss(),
            (2, 5),
            TOKENS,
            "class probabilities must be floating-point numbers; got torch.int64",
        ),
        (nn.CrossEntropyLoss(), (2, 3, 5), normal(2, 3, 4), r"outputs, \(2, 3, 5\); got \(2, 3, 4"),
        (nn.CrossEntropyLoss(), (2, 3, 5), normal(2, 3, 5), "must not be negative or NaN"),
        (
            nn.CrossEntropyLoss(ignore_index=1),
            (2, 3),
            class_probabilities((2, 3)),
            "ignore_index=1 is a class label, but the targets are class probabilities",
        ),
        (
            nn.CrossEntropyLoss(),
            (5,),
            labels(5, 3),
            r"CrossEntropy takes outputs of shape \(points, classes, ...\); got \(5,\)",
        ),
        (
            nn.CrossEntropyLoss(weight=torch.ones(5)),
            (2, 3, 5),
            TOKENS,
            r"weight must have one value per class, \(3,\); got \(5,\)",
        ),
        (nn.MSELoss(), (5, 1), normal(5), r"got \(5,\) \(use targets.reshape\(5, 1\)\)"),
        (nn.MSELoss(), (2, 3, 5), normal(2, 5, 3), r"\(2, 3, 5\); got \(2, 5, 3\)$"),
        (nn.BCEWithLogitsLoss(), (2, 3), 2 * torch.ones(2, 3), r"in \[0, 1\]; got 2.0 to 2.0"),
        (
            nn.BCEWithLogitsLoss(weight=torch.ones(3)),
            (2, 3, 5),
            torch.ones(2, 3, 5),
            r"weight must be a scalar or have one value per output, \(5,\), for outputs of shape"
            r" \(2, 3, 5\); got \(3,\)",
        ),
    ],
)
def test_targets_that_do_not_fit_the_outputs_are_refused(
    loss: nn.Module, outputs_shape: Shape, targets: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        as_loss(loss).check_targets(outputs_shape, targets)


def test_outputs_that_weights_do_not_fit_are_refused() -> None:
    loss = hcurv.losses.BinaryCrossEntropy(weight=torch.ones(3))
    for shape in [(2, 5), (3,), (2, 3, 1)]:
        with pytest.raises(ValueError, match="weight must be a scalar or have one value per outp"):
            loss.split_outputs(normal(*shape))
    with pytest.raises(ValueError, match=r"outputs of shape \(points, classes, ...\); got \(5,\)"):
        hcurv.losses.CrossEntropy().split_outputs(normal(5))


def test_gradient_asks_for_targets() -> None:
    operator = CASES["classifier"].operator()
    with pytest.raises(ValueError, match=r"the data has no targets: pass gradient\(targets\)"):
        operator.gradient()
    with pytest.raises(ValueError, match=r"targets must be a tensor of 11 rows; got \(10,\)"):
        operator.gradient(labels(10, 3))
    with pytest.raises(ValueError, match="targets must be a tensor of 11 rows; got list"):
        operator.gradient([1] * 11)  # type: ignore[arg-type]


def test_own_losses_are_checked() -> None:
    class NoGradient(hcurv.losses.Loss):
        def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
            return torch.ones_like(outputs)

    class WrongShape(QuarticLoss):
        def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
            return outputs.new_ones(outputs.shape[0], 2)

    class NotConvex(QuarticLoss):
        def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
            return torch.full_like(outputs, -1.0).sqrt()

    case = CASES["own loss"]
    data = (case.inputs, case.targets)
    with pytest.raises(TypeError, match="NoGradient has no gradient: define gradient"):
        hcurv.GaussNewton(case.build(), NoGradient(), data).gradient()
    with pytest.raises(ValueError, match=r"must return \(1, 3\) for a diagonal or \(1, q, 3\)"):
        hcurv.GaussNewton(case.build(), WrongShape(), data)
    with pytest.raises(ValueError, match="NaN or infinite values: is the loss convex"):
        hcurv.GaussNewton(case.build(), NotConvex(), data)


CLASS_LABELS = labels(30, 3, seed=7)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16], ids=str
)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]).double(), ignore_index=1),
    ],
    ids=["plain", "weighted"],
)
def test_class_labels_of_any_integer_type_are_taken(loss: nn.Module, dtype: torch.dtype) -> None:
    model, inputs = CASES["classifier"].build(), normal(30, 7)
    converted = CLASS_LABELS.to(dtype)
    operator = hcurv.GaussNewton(model, loss, (inputs, converted))

    def oracle(outputs: Tensor) -> Tensor:
        return loss(outputs, CLASS_LABELS)

    assert_close(operator.to_dense(), oracles.gauss_newton(model, oracle, inputs), 1e3)
    expected = oracles.gradient(model, oracle, inputs)
    assert_close(operator.gradient(), expected, 1e3)
    assert_close(operator.gradient(converted), expected, 1e3)
    assert hcurv.baselines.KFAC(model, loss, (inputs, converted)).shape == operator.shape


def test_small_integer_types_do_not_wrap_around_the_ignored_label() -> None:
    """The default label to ignore, -100, is 156 as an 8-bit number: a class like any other."""
    model = nn.Sequential(nn.Linear(2, 200)).double()
    given = torch.tensor([156, 3], dtype=torch.uint8)
    operator = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), (normal(2, 2), given))
    expected = oracles.gradient(
        model, lambda outputs: nn.functional.cross_entropy(outputs, given.long()), normal(2, 2)
    )
    assert_close(operator.gradient(), expected, 1e3)


@pytest.mark.parametrize("target_dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0])),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0])),
        nn.MSELoss(),
    ],
    ids=["cross-entropy", "weighted cross-entropy", "logistic", "squares"],
)
def test_soft_targets_of_any_float_type_are_taken(
    loss: nn.Module, dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    model, inputs = CASES["classifier"].build(), normal(11, 7).float().double()
    targets = torch.softmax(normal(11, 3), 1).to(target_dtype)
    data = (inputs.to(dtype), targets)
    build = CASES["classifier"].build
    operator = hcurv.GaussNewton(build(dtype), loss, data)
    exact = copy.deepcopy(loss).double()

    def oracle(outputs: Tensor) -> Tensor:
        return exact(outputs, targets.double())

    assert_close(operator.to_dense(), oracles.gauss_newton(model, oracle, inputs), 1e3)
    assert_close(operator.gradient(), oracles.gradient(model, oracle, inputs), 1e3)
    assert hcurv.baselines.KFAC(build(dtype), loss, data).dtype == dtype


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), hcurv.losses.HalfSquaredError()],
    ids=lambda loss: type(loss).__name__,
)
def test_losses_return_the_type_of_the_outputs(loss: nn.Module | hcurv.losses.Loss) -> None:
    known, outputs = as_loss(loss), normal(11, 3).float()
    targets = torch.softmax(normal(11, 3), 1)
    assert known.gradient(outputs, targets).dtype == torch.float32
    assert known.hessian_sqrt(outputs, targets).dtype == torch.float32


def test_complex_targets_are_refused() -> None:
    case = CASES["regression"]
    with pytest.raises(TypeError, match=r"must be real numbers or class labels; got torch.complex"):
        hcurv.GaussNewton(case.build(), case.loss, (case.inputs, case.targets.cfloat()))
