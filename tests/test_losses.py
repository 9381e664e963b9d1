"""Square roots and gradients of the losses, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hcurv
import oracles
from cases import CASES, Case, QuarticLoss, all_cases, assert_close, labels, normal
from hcurv.losses import as_loss
from oracles import hessian


@all_cases
def test_square_roots_give_the_hessian(case: Case) -> None:
    outputs = case.build()(case.inputs).detach()
    loss = as_loss(case.loss)
    root = loss.hessian_sqrt(outputs, case.targets)
    if root.ndim == 2:
        root = torch.diag_embed(root)
    divisor = 1.0
    if loss.reduction == "mean":
        divisor = loss.divisor(*outputs.shape, case.targets)
    expected = hessian(case.loss_of_outputs)(outputs)
    for point, block in enumerate(root.mT @ root / divisor):
        assert_close(block, expected[point, :, point, :], 1e3)


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
