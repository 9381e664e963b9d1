"""What losses take as outputs and targets, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hcurv
import oracles
from cases import CASES, QuarticLoss, assert_close, both_dtypes, labels, normal
from hcurv.losses import as_loss


def test_unsupported_losses_are_refused() -> None:
    with pytest.raises(TypeError, match="no Hessian is known for the loss L1Loss; supported are"):
        as_loss(nn.L1Loss())
    with pytest.raises(TypeError, match=r"use hcurv.losses.GaussianNLL\(variance=...\)"):
        as_loss(nn.GaussianNLLLoss())
    for loss in (
        nn.CrossEntropyLoss,
        nn.NLLLoss,
        nn.BCEWithLogitsLoss,
        nn.BCELoss,
        nn.MSELoss,
        nn.HuberLoss,
        nn.SmoothL1Loss,
        nn.PoissonNLLLoss,
    ):
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
    for beta in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"beta must be positive; got .* no second derivative"):
            as_loss(nn.SmoothL1Loss(beta=beta))
        with pytest.raises(ValueError, match="delta must be positive; got"):
            hcurv.losses.Huber(delta=beta)
        with pytest.raises(ValueError, match="variance must be positive and finite; got"):
            hcurv.losses.GaussianNLL(variance=beta)
    with pytest.raises(ValueError, match="variance must be a scalar or one value per output"):
        hcurv.losses.GaussianNLL(variance=torch.ones(3, 1))
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
            torch.softmax(normal(2, 3), 1),
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
        (
            nn.NLLLoss(),
            (2, 3),
            torch.softmax(normal(2, 3), 1),
            r"takes class labels: integers of shape \(2,\); got torch.float64 of shape \(2, 3\)",
        ),
        (nn.NLLLoss(), (2, 5, 3), TOKENS, "torch's convention is classes second"),
        (nn.PoissonNLLLoss(), (2, 5), TOKENS - 1, "counts and must not be negative; got -1"),
        (nn.BCELoss(), (2, 3), -torch.ones(2, 3), r"in \[0, 1\]; got -1.0 to -1.0"),
        (nn.HuberLoss(), (2, 3), torch.ones(2, 4), r"outputs, \(2, 3\); got \(2, 4\)"),
        (
            hcurv.losses.GaussianNLL(torch.ones(3)),
            (2, 4),
            torch.ones(2, 4),
            r"variance must be a scalar or have one value per output, \(4,\)",
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
    loss: nn.Module, outputs_shape: tuple[int, ...], targets: Tensor, message: str
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
    with pytest.raises(ValueError, match="NaN or infinite derivatives: is the loss convex"):
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
@both_dtypes
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


@both_dtypes
@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_log_softmax_of_any_size_is_taken_and_logits_are_not(
    size: float, dtype: torch.dtype
) -> None:
    loss, logits = as_loss(nn.NLLLoss()), (size * normal(50, 40)).to(dtype)
    for outputs in (
        logits.log_softmax(1),
        logits - logits.logsumexp(1, keepdim=True),
        logits.softmax(1).log(),  # with infinite entries
    ):
        loss.check_outputs(outputs)
        assert bool(loss.hessian_sqrt(outputs, None).isfinite().all())
    for outputs in (logits, logits.softmax(1), logits.log_softmax(0), logits * torch.nan):
        with pytest.raises(ValueError, match=r"instead of 1: end the network with log_softmax"):
            loss.check_outputs(outputs)


@pytest.mark.parametrize(
    ("loss", "outputs", "message"),
    [
        (
            nn.BCELoss(),
            torch.tensor([[0.5, 2.0], [-1.0, 0.1]]),
            r"BCELoss takes probabilities in \[0, 1\]; got outputs from -1 to 2: end the network"
            " with a sigmoid, or use BCEWithLogitsLoss on logits",
        ),
        (nn.BCELoss(), torch.tensor([[torch.nan]]), r"got outputs from nan to nan"),
        (
            nn.PoissonNLLLoss(log_input=False),
            torch.tensor([[0.5, -0.25]]),
            "takes positive rates; got outputs down to -0.25: end the network with an exponential"
            " or a softplus, or use log_input=True",
        ),
    ],
)
def test_outputs_without_a_loss_are_refused(loss: nn.Module, outputs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_loss(loss).check_outputs(outputs)


def test_complex_targets_are_refused() -> None:
    case = CASES["regression"]
    with pytest.raises(TypeError, match=r"must be real numbers or class labels; got torch.complex"):
        hcurv.GaussNewton(case.build(), case.loss, (case.inputs, case.targets.cfloat()))
