"""Models and data that are refused, and models that are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import assert_close, labels, normal, seeded
from hcurv.network.tracing import UnsupportedModelError
from models import LAYERS, SEQUENCE, VECTORS, Call, tokens
from odd_models import ODD

LOSS = nn.MSELoss()


def build(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    return seeded(lambda: Call(forward, f=nn.Linear(6, 3), **parts)).double()


def read(model: nn.Module, inputs: Any = VECTORS, **options: Any) -> hcurv.GaussNewton:
    return hcurv.GaussNewton(model, LOSS, inputs, **options)


MIXING: dict[str, Callable[[], nn.Module]] = {
    "batch norm in training": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    ),
    "mean of the batch": lambda: build(lambda self, x: self.f(x - x.mean(0))),
    "mean of the results": lambda: build(lambda self, x: self.f(x) - self.f(x).mean(0)),
    "maximum of the batch": lambda: build(lambda self, x: self.f(x) / x.abs().max()),
    "attention over the batch": lambda: build(
        lambda self, x: torch.softmax(self.f(x) @ self.f(x).T, 1) @ self.f(x)
    ),
    "sorted": lambda: build(lambda self, x: self.f(x[x[:, 0].argsort()])),
    "statistics that are not tracked": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
    ).eval(),
}


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING.keys())
def test_points_that_influence_each_other_are_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        (UnsupportedModelError, ValueError), match=r"influence each other|single point"
    ):
        read(seeded(model).double())


@pytest.mark.parametrize("name", ["mean of the results", "attention over the batch"])
def test_mixing_is_seen_where_the_first_points_are_alike(name: str) -> None:
    # The outputs of the first points alone are those of the batch; only derivatives differ.
    inputs = torch.cat([VECTORS[:1].expand(4, -1), VECTORS])
    with pytest.raises(UnsupportedModelError, match="influence each other"):
        read(MIXING[name](), inputs)
    with pytest.raises(UnsupportedModelError, match="influence each other"):
        read(MIXING[name](), [VECTORS[:1], VECTORS[1:]])


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 2)),
    "noise": lambda: build(lambda self, x: self.f(x + torch.randn_like(x))),
}


@pytest.mark.parametrize("model", RANDOM.values(), ids=RANDOM.keys())
def test_random_models_are_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedModelError, match="the forward pass is random"):
        read(seeded(model).double())


def _no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.f(x)


REFUSED: list[tuple[str, Callable[[], nn.Module], type[Exception], str]] = [
    (
        "tuple",
        lambda: build(lambda self, x: (self.f(x), x)),
        UnsupportedModelError,
        "one tensor of outputs; got tuple",
    ),
    (
        "dictionary",
        lambda: build(lambda self, x: {"y": self.f(x)}),
        UnsupportedModelError,
        "got dict",
    ),
    (
        "one number",
        lambda: build(lambda self, x: self.f(x).sum()),
        ValueError,
        "one row of outputs for each point",
    ),
    (
        "points second",
        lambda: build(lambda self, x: self.f(x)[:, :2].T),
        ValueError,
        "one row of outputs for each point",
    ),
    (
        "too few",
        lambda: build(lambda self, x: self.f(x)[:1]),
        ValueError,
        "one row of outputs for each point",
    ),
    (
        "NaN",
        lambda: build(lambda self, x: self.f(x) / (x[:, :1] - x[:, :1])),
        ValueError,
        "NaN or infinite",
    ),
    ("no_grad", lambda: build(_no_grad), UnsupportedModelError, "do not depend on any parameter"),
    (
        "detached",
        lambda: build(lambda self, x: self.f(x).detach()),
        UnsupportedModelError,
        "do not depend on any",
    ),
    (
        "unused",
        lambda: build(lambda self, x: x**2),
        UnsupportedModelError,
        "do not depend on any parameter",
    ),
    (
        "wrong shape",
        lambda: build(lambda self, x: self.f(x[:, :3])),
        ValueError,
        r"cannot read points of shape \(6,\)",
    ),
    (
        "half",
        lambda: build(lambda self, x: self.f(x)).half(),
        TypeError,
        "float32 or all float64; got torch.float16",
    ),
    (
        "bfloat",
        lambda: build(lambda self, x: self.f(x)).bfloat16(),
        TypeError,
        "got torch.bfloat16",
    ),
    (
        "mixed",
        lambda: build(lambda self, x: self.f(x), g=nn.Linear(1, 1)).half(),
        TypeError,
        "float32 or all",
    ),
    (
        "frozen",
        lambda: build(lambda self, x: self.f(x)).requires_grad_(False),
        ValueError,
        "requires_grad=True",
    ),
]


@pytest.mark.parametrize(
    ("model", "kind", "match"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_models_that_do_not_fit_are_refused(
    model: Callable[[], nn.Module], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        read(model())


def test_outputs_of_another_type_are_refused() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        model = build(lambda self, x, dtype=dtype: self.f(x).to(dtype))
        with pytest.raises(UnsupportedModelError, match=f"outputs of type {dtype}"):
            read(model)


def test_no_model_and_no_loss() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got function"):
        read(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss"):
        hcurv.GaussNewton(ODD["hooks"].build(), nn.CosineSimilarity(), VECTORS)


def test_models_that_cannot_be_copied_are_refused() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Stubborn:
            raise RuntimeError("no")

    with pytest.raises(UnsupportedModelError, match=r"cannot be copied: RuntimeError: no"):
        read(nn.Sequential(Stubborn(6, 2), nn.ReLU()).double())


def test_parameters_of_the_model_itself_are_not_taken_for_those_of_its_copy() -> None:
    model = build(lambda self, x: self.f(x))
    with pytest.raises(UnsupportedModelError, match=r"uses 'f\.(weight|bias)' of the model itself"):
        read(model, forward_fn=lambda _, x: model(x))
    scaled = build(lambda self, x: self.f(x), scale=nn.Parameter(torch.tensor(2.0)))
    scaled.f.register_forward_hook(lambda module, args, output: output * scaled.scale)
    with pytest.raises(UnsupportedModelError, match="uses 'scale' of the model itself"):
        read(scaled)


def test_points_that_use_no_parameter_are_zeros() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.stack([p[:2] * (self.w.exp() if p[0] > 0 else 1.0) for p in x])

    model = build(forward, w=nn.Parameter(torch.tensor(0.3)))
    model.f.requires_grad_(False)
    operator = read(model)
    used = VECTORS[VECTORS[:, 0] > 0][:, :2]
    expected = (used * model.w.exp()).square().sum() * 2 / (5 * 2)
    assert 0 < len(used) < 5
    assert_close(operator.to_dense(), expected.detach().view(1, 1), 1e4)


BAD_DATA: list[tuple[Any, type[Exception], str]] = [
    ((VECTORS.float(),), TypeError, "inputs must be torch.float64, like the parameters"),
    (VECTORS.to(torch.complex128), TypeError, "inputs must be"),
    ({"x": VECTORS, "y": VECTORS[:2]}, ValueError, "one row per point"),
    ({}, TypeError, "data must be inputs"),
    ({"x": "words"}, TypeError, "data must be inputs"),
    ([], ValueError, "data is empty"),
    (VECTORS[:0], ValueError, "data is empty"),
    (torch.full((2, 6), torch.nan).double(), ValueError, "NaN or infinite"),
    ([VECTORS, VECTORS[:4, :5]], ValueError, "points of shape"),
    (iter([VECTORS]), TypeError, "read only once"),
    (7, TypeError, "data must be inputs"),
    ((VECTORS, normal(4, 3)), ValueError, "5 inputs but targets of shape"),
]


@pytest.mark.parametrize(("data", "kind", "match"), BAD_DATA)
def test_data_that_does_not_fit_is_refused(data: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        read(build(lambda self, x: self.f(x)), data)


def test_keyword_arguments_that_the_model_does_not_know() -> None:
    with pytest.raises(ValueError, match="cannot read points of shape"):
        read(build(lambda self, x: self.f(x)), {"z": VECTORS})


def test_wrong_targets_of_sequences() -> None:
    case = LAYERS["transformer, norm last"]
    with pytest.raises(ValueError, match="labels"):
        hcurv.GaussNewton(case.build(), nn.CrossEntropyLoss(), (case.inputs, labels(5, 3)))
    with pytest.raises(ValueError, match="depends on the targets"):
        hcurv.GaussNewton(case.build(), case.loss, case.inputs)


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "identity": [id(p) for p in model.parameters()],
        "history": [p.grad_fn for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "requires": [p.requires_grad for p in model.parameters()],
    }


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@pytest.mark.parametrize(
    "name", ["batch norm 2d", "lstm", "hooks", "pruned", "spectral and weight norm", "experts"]
)
def test_the_model_and_global_state_are_left_alone(name: str) -> None:
    case = {**LAYERS, **ODD}[name]
    model = case.build()
    case.outputs(model).sum().backward()
    targets = case.targets_for(model)
    before, random = _state(model), torch.get_rng_state()
    flags = (torch.is_grad_enabled(), torch.backends.mkldnn.enabled, torch.get_default_dtype())
    operator = case.operator(model, targets)
    operator.gradient()
    assert _same(_state(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    now = (torch.is_grad_enabled(), torch.backends.mkldnn.enabled, torch.get_default_dtype())
    assert now == flags
    matrix = operator.to_dense()
    with torch.no_grad():  # Training further does not change the matrix.
        for value in model.parameters():
            value.zero_()
    assert torch.equal(operator.to_dense(), matrix)


def test_buffers_that_the_forward_pass_changes_are_left_alone() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.seen = self.f(x)  # a tensor with a history, which cannot be copied
        return self.seen

    model = build(forward, count=torch.zeros(()))
    model(VECTORS)
    seen = model.seen
    read(model)
    assert model.count == 1
    assert model.seen is seen


def test_gradients_may_be_disabled_outside() -> None:
    case = LAYERS["conv 2d, groups"]
    expected = hcurv.GaussNewton(case.build(), case.loss, case.inputs)
    with torch.no_grad():
        operator = hcurv.GaussNewton(case.build(), case.loss, case.inputs)
    assert_close(operator.to_dense(), expected.to_dense())
    model = case.build()
    with (
        torch.inference_mode(),
        pytest.raises(
            UnsupportedModelError, match=r"outside of it; torch\.no_grad\(\) does no harm"
        ),
    ):
        hcurv.GaussNewton(model, case.loss, case.inputs)


def test_inputs_that_require_gradients() -> None:
    model = build(lambda self, x: self.f(x).tanh().cumsum(1))
    inputs = VECTORS.clone().requires_grad_()
    assert_close(read(model, inputs).to_dense(), read(model).to_dense())
    assert inputs.grad is None


def test_one_point_and_equal_points() -> None:
    for name in ("conv 2d, groups", "lstm", "transformer, norm first", "spectral and weight norm"):
        case = {**LAYERS, **ODD}[name]
        model = case.build()
        assert isinstance(case.inputs, Tensor)
        loss = nn.CrossEntropyLoss(reduction="sum")
        one = hcurv.GaussNewton(model, loss, case.inputs[:1])
        many = hcurv.GaussNewton(
            model, loss, case.inputs[:1].repeat(3, *[1] * (case.inputs.ndim - 1))
        )
        assert_close(many.to_dense(), 3 * one.to_dense(), 1e4)


def test_integer_and_boolean_inputs() -> None:
    for dtype in (torch.uint8, torch.int32, torch.bool):
        words = tokens(5, 4, num=2).to(dtype)
        model = build(lambda self, x: self.f(self.e(x.long()).flatten(1)), e=nn.Embedding(2, 2))
        model.f = seeded(lambda: nn.Linear(8, 3)).double()
        assert_close(read(model, words).to_dense(), read(model, words.long()).to_dense())


def test_copies_share_nothing_with_a_second_reading() -> None:
    model = copy.deepcopy(LAYERS["lstm"].build())
    first = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), SEQUENCE)
    second = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), SEQUENCE)
    assert torch.equal(first.to_dense(), second.to_dense())
