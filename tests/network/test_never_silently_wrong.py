"""Every model is read as autograd differentiates it, at every point, or it is refused.

The oracle runs autograd on a fresh copy of the user's model, one backward pass for each output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import hcurv
import oracles
from cases import labels, normal, seeded
from models import parameter
from odd_models import StraightThrough

NUM_POINTS = 40
INPUTS = normal(NUM_POINTS, 6)
# One point, far beyond those that are tried first, is unlike all others.
INPUTS[31] *= 20.0
LABELS = labels(NUM_POINTS, 3)
LOSS = nn.CrossEntropyLoss()


class Forward(nn.Module):
    """Two Linear layers, `a` and `b`, in a forward pass of one's own, which torch.fx can trace."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


build = Forward


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Reversed(torch.autograd.Function):
    """The identity, with gradients reversed and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class RareBackward(torch.autograd.Function):
    """The identity, whose derivative is zero where values are large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() > 5, 0.0, gradient)


def _no_grad_block(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.a(x)
    return self.b(h.tanh())


@torch.no_grad()
def _without_gradient(x: Tensor) -> Tensor:
    return x.tanh()


def _grad_switched(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        h = self.a(x).tanh()
    return self.b(h + self.a(x))


def _inference(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = x.tanh() + 1
    return self.b(self.a(h.clone()).tanh())


def _clamp_statement(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.clamp_(-0.5, 0.5)
    return self.b(h)


def _relu_statement(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    functional.relu(h, inplace=True)
    return self.b(h)


def _relu_of_outputs(self: Any, x: Tensor) -> Tensor:
    h = self.b(self.a(x).tanh())
    h.relu_()
    return h


def _indexed_statement(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, 0] = 0.0
    return self.b(h.tanh())


def _augmented(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h *= 2.0
    h += 1.0
    return self.b(h.tanh())


def _filled(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.masked_fill_(h > 0.5, 0.0)
    return self.b(h.tanh())


def _changed_inputs(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x.clamp_(-1, 1)
    return self.b(self.a(x).tanh())


def _row_clipped(limit: float) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * (limit / h.norm(dim=1, keepdim=True)).clamp(max=1.0))

    return forward


def _branch_by_data(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(h.tanh() if float(x.abs().max()) < 10 else h.sin())


def _scaled_by_batch(self: Any, x: Tensor) -> Tensor:
    # The batch changes its points only if one of them is large.
    return self.b(self.a(x / x.abs().max().clamp(min=10.0)).tanh())


def _centred_where_large(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).tanh()
    return self.b(h - (h.mean(0) if x.abs().max() > 10 else 0.0))


def _rare_dropout(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).tanh()
    return self.b(h * (torch.rand_like(h) > 0.02) if len(x) > 4 else h)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count += 1.0
    return self.b(self.a(x).tanh()) * (1.0 + (self.count > 1))


def _counted_idly(self: Any, x: Tensor) -> Tensor:
    self.count += 1.0
    return self.b(self.a(x).tanh())


def _hooked_gradient(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(function)
        return self.b(h.tanh())

    return forward


def _autocast_inside(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.a(x)
    return self.b(h.float().tanh())


def _half_inside(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).half().tanh().float())


def _clamping_hook() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output.clamp(-0.4, 0.4))
    return model


def _rare_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.Softplus(), nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: output.clamp(-5.0, 5.0))
    return model


def _hook_in_place() -> nn.Module:
    model = mlp()

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.clamp_(-0.4, 0.4)

    model[0].register_forward_hook(hook)
    return model


def _parameter_hook() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    return model


def _patched() -> nn.Module:
    model = mlp()
    inner = model[0].forward
    model[0].forward = lambda x: 2 * inner(x)
    return model


def _backward_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, grads, _: (0.5 * grads[0],))
    return model


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value


def _changed(change: Callable[[nn.Module], object], layer: int = 2) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = mlp()
        change(model[layer])
        return model

    return make


def _tied_views() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


def _out_argument(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        torch.clamp(h, -0.5, 0.5, out=h)
    return self.b(h.tanh())


def _data_changed(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.data.clamp_(-0.5, 0.5)
    return self.b(h.tanh())


def _complex(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).to(torch.complex128)
    return self.b((h * 1j).exp().real)


def _checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(checkpoint(torch.tanh, h, use_reentrant=reentrant))

    return forward


def _saturated(self: Any, x: Tensor) -> Tensor:
    # Where it is not tried, the derivative of what is computed is not that of its arithmetic.
    h = self.a(x)
    return self.b(torch.where(h.abs() > 5, h.detach(), h).sin())


def _swapped(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(torch.where(h.norm(dim=1, keepdim=True) > 8, h.flip(1), h).sin())


CASES: dict[str, Callable[[], nn.Module]] = {
    "no_grad block": lambda: build(_no_grad_block),
    "no_grad decorator": lambda: build(lambda self, x: self.b(_without_gradient(self.a(x)))),
    "gradients switched off": lambda: build(_grad_switched),
    "inference mode of constants": lambda: build(_inference),
    "straight through": lambda: build(lambda self, x: self.b(StraightThrough.apply(self.a(x)))),
    "gradient reversal": lambda: build(lambda self, x: self.b(Reversed.apply(self.a(x)).tanh())),
    "rare backward": lambda: build(lambda self, x: self.b(RareBackward.apply(self.a(x)).sin())),
    "reversal of outputs": lambda: build(lambda self, x: Reversed.apply(self.b(self.a(x).tanh()))),
    "checkpoint": lambda: build(_checkpointed(False)),
    "clamp_ as a statement": lambda: build(_clamp_statement),
    "relu in place as a statement": lambda: build(_relu_statement),
    "relu_ of the outputs": lambda: build(_relu_of_outputs),
    "assignment to an index": lambda: build(_indexed_statement),
    "augmented assignment": lambda: build(_augmented),
    "masked_fill_": lambda: build(_filled),
    "inputs changed in place": lambda: build(_changed_inputs),
    "rows clipped": lambda: build(_row_clipped(1.0)),
    "one row clipped": lambda: build(_row_clipped(8.0)),
    "one row swapped": lambda: build(_swapped),
    "one value detached": lambda: build(_saturated),
    "idle count": lambda: build(_counted_idly, count=torch.zeros(())),
    "gradient hook": lambda: build(_hooked_gradient(lambda g: 3 * g)),
    "clamping hook": _clamping_hook,
    "hook that clamps one point": _rare_hook,
    "hook in place": _hook_in_place,
    "backward hook": _backward_hook,
    "pruned bias": _changed(lambda layer: prune.l1_unstructured(layer, "bias", 1)),
    "pruned weight": _changed(lambda layer: prune.random_unstructured(layer, "weight", 0.5)),
    "parametrized bias": _changed(
        lambda layer: parametrize.register_parametrization(layer, "bias", Doubled())
    ),
    "parametrized weight": _changed(
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()), 0
    ),
    "weight norm": _changed(parametrizations.weight_norm),
    "old spectral norm": _changed(lambda layer: nn.utils.spectral_norm(layer), 0),
    "spectral norm": _changed(lambda layer: parametrizations.spectral_norm(layer), 0),
    "tied": _tied_views,
    "values changed behind autograd": lambda: build(_data_changed),
    "out= behind autograd": lambda: build(_out_argument),
    "complex": lambda: build(_complex),
    "slices of weights": lambda: build(
        lambda self, x: functional.linear(self.a(x).tanh()[:, :3], self.b.weight[:, :3])
    ),
    "a module called twice": lambda: build(
        lambda self, x: self.b(self.c(self.c(self.a(x).tanh()).tanh())), c=nn.Linear(5, 5)
    ),
    "a parameter in the forward pass": lambda: build(
        lambda self, x: self.b((self.a(x) * self.scale).tanh()), scale=parameter(5)
    ),
    "in-place modules": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True)
    ),
    "relu in place of the inputs": lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp()),
}

# What cannot be a matrix of independent points, with what the message says.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rare dropout": (lambda: build(_rare_dropout), "random|influence each other"),
    "branch by the batch": (lambda: build(_branch_by_data), "influence each other"),
    "scaled by the batch": (lambda: build(_scaled_by_batch), "influence each other"),
    "centred where large": (lambda: build(_centred_where_large), "influence each other"),
    "clamped gradients": (
        lambda: build(_hooked_gradient(lambda g: g.clamp(-1e-3, 1e-3))),
        "not linear|influence each other",
    ),
    "reentrant checkpoint": (lambda: build(_checkpointed(True)), "reentrant"),
    "patched layer": (_patched, "uses '0.weight' of the model itself"),
    "hook of a parameter": (_parameter_hook, "'0.weight' has a hook"),
}


def prepared(make: Callable[[], nn.Module]) -> nn.Module:
    return seeded(make).double().eval()


def expected_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The dense matrix and the gradient by autograd, one point at a time."""
    matrix, gradient = 0.0, 0.0
    total = nn.CrossEntropyLoss(reduction="sum")
    for i in range(len(inputs)):
        x, y = inputs[i : i + 1], targets[i : i + 1]
        loss = lambda outputs, y=y: total(outputs, y) / len(inputs)  # noqa: E731
        matrix = matrix + oracles.gauss_newton_of_model(model, loss, x.clone())
        gradient = gradient + oracles.gradient_of_model(model, loss, x.clone())
    return matrix, gradient


def assert_is(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 1e-11 * scale


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*_norm` is deprecated")
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_the_matrix_is_that_of_autograd_at_every_point(make: Callable[[], nn.Module]) -> None:
    matrix, gradient = expected_of(prepared(make), INPUTS, LABELS)
    model = prepared(make)
    # Large points come late, and batches are unequal.
    batches = [(INPUTS[:25], LABELS[:25]), (INPUTS[25:], LABELS[25:])]
    operator = hcurv.GaussNewton(model, LOSS, batches)
    assert_is(operator.to_dense(), matrix)
    assert_is(operator[:, :], matrix)
    assert_is(operator.gradient(), gradient)
    vector = normal(len(matrix), seed=3)
    assert_is(operator @ vector, matrix @ vector)


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_models_without_such_a_matrix_are_refused(
    make: Callable[[], nn.Module], match: str
) -> None:
    model = prepared(make)
    with pytest.raises(hcurv.UnsupportedModelError, match=match):
        hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS))


@pytest.mark.parametrize("name", ["one row clipped", "one row swapped", "rare backward"])
def test_rows_at_other_inputs_are_those_of_autograd(name: str) -> None:
    model = prepared(CASES[name])
    usual = INPUTS[:20]  # None of these points is special.
    operator = hcurv.GaussNewton(model, LOSS, (usual, LABELS[:20]))
    rows = [oracles.jacobian_of_model(model, x[None])[1] for x in INPUTS]
    assert_is(operator.jacobian(INPUTS).to_dense(), torch.cat(rows))
    gradients = [
        oracles.gradient_of_model(model, lambda o, y=y: LOSS(o, y[None]), x[None])
        for x, y in zip(INPUTS, LABELS, strict=True)
    ]
    assert_is(operator.point_gradients(INPUTS, LABELS).to_dense(), torch.stack(gradients))


def test_every_pass_sees_the_buffers_that_the_model_has() -> None:
    # The first call of this model computes something else than all others.
    usual = prepared(lambda: build(_counted_idly, count=torch.zeros(())))
    expected, _ = expected_of(usual, INPUTS, LABELS)
    model = prepared(lambda: build(_counted, count=torch.zeros(())))
    assert_is(hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS)).to_dense(), expected)
    assert model.count == 0


def _with_constant(self: Any, x: Tensor) -> Tensor:
    # torch.fx stores such constants on the module that it traces.
    return self.b((self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).double()).tanh())


def test_reading_leaves_the_model_as_it_was() -> None:
    model = prepared(lambda: build(_with_constant))
    before = set(vars(model))
    hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS))
    hcurv.baselines.KFAC(model, LOSS, (INPUTS, LABELS))
    assert set(vars(model)) == before


@pytest.mark.parametrize("layered", [False, True])
def test_hooks_see_points_of_the_data_alone(layered: bool) -> None:
    model = prepared(mlp)
    if layered:
        model.append(nn.Softmax(1))
    calls: list[Tensor] = []
    model.register_forward_hook(lambda module, args, output: calls.append(args[0]))
    hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS))
    known = {tuple(point.tolist()) for point in INPUTS}
    for seen in calls:
        assert type(seen) is Tensor
        assert {tuple(point.tolist()) for point in seen} <= known
    # The first points are tried five times, and each point of a chain is run once. A model that is
    # no chain is run once more on four points, for derivatives by its inputs.
    assert len(calls) <= (13 if layered else 6)


def test_benign_hooks_keep_the_fast_form() -> None:
    model = prepared(mlp)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS)).network is not None


@pytest.mark.parametrize(
    "name", ["pruned bias", "one row clipped", "gradient reversal", "hook that clamps one point"]
)
def test_other_uses_read_the_same_model(name: str) -> None:
    model = prepared(CASES[name])
    matrix, gradient = expected_of(prepared(CASES[name]), INPUTS, LABELS)
    step = hcurv.gauss_newton_step(model, LOSS, (INPUTS, LABELS), damping=0.1, tolerance=1e-10)
    damped = matrix + 0.1 * torch.eye(len(matrix)).double()
    wanted = -torch.linalg.solve(damped, gradient)
    assert float((step.flat - wanted).norm()) < 1e-8 * float(wanted.norm())
    # K-FAC is exact for the biases of the first layer, because their inputs are ones.
    blocks = hcurv.baselines.KFAC(model, LOSS, (INPUTS, LABELS), num_samples=None)
    own = slice(30, 35)
    assert_is(blocks.to_dense()[own, own], matrix[own, own])


@pytest.mark.parametrize("forward", [_autocast_inside, _half_inside])
def test_half_precision_inside_is_refused(forward: Callable[..., Tensor]) -> None:
    model = prepared(lambda: build(forward)).float()
    with pytest.raises(hcurv.UnsupportedModelError, match=r"influence each other|half precision"):
        hcurv.GaussNewton(model, LOSS, (INPUTS.float(), LABELS))


def test_random_numbers_of_the_user_are_left_alone() -> None:
    state = torch.get_rng_state()
    with pytest.raises(hcurv.UnsupportedModelError):
        hcurv.GaussNewton(prepared(lambda: build(_rare_dropout)), LOSS, (INPUTS, LABELS))
    assert torch.equal(torch.get_rng_state(), state)


def test_losses_that_were_changed_are_refused() -> None:
    hooked, patched = nn.CrossEntropyLoss(), nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    patched.forward = lambda outputs, targets: 0 * outputs.sum()
    for loss in (hooked, patched):
        with pytest.raises(TypeError, match="hooks or a forward method of its own"):
            hcurv.GaussNewton(prepared(mlp), loss, (INPUTS, LABELS))
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\]; got 2"):
        hcurv.GaussNewton(prepared(mlp), nn.CrossEntropyLoss(label_smoothing=2), INPUTS)


def _rolled(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).tanh().roll(1, 0))


@pytest.mark.parametrize("num_points", [2, 7])
def test_points_that_influence_each_other_are_refused_at_tiny_inputs(num_points: int) -> None:
    # The outputs are the same at all points, up to rounding; derivatives by weights are not.
    model = seeded(lambda: Forward(_rolled)).double()
    inputs = 1e-20 * INPUTS[:num_points]
    with pytest.raises(ValueError, match="influence each other"):
        hcurv.GaussNewton(model, LOSS, (inputs, LABELS[:num_points]))


def test_models_that_refuse_inputs_with_gradients_are_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.requires_grad:
            raise RuntimeError("no gradients of inputs")
        return self.b(self.a(x).tanh().flip(1).sort(1).values)

    model = seeded(lambda: Forward(forward)).double()
    H = hcurv.GaussNewton(model, LOSS, (INPUTS, LABELS))
    assert_is(H.to_dense(), expected_of(model, INPUTS, LABELS)[0])


def test_squares_of_inputs_that_overflow_are_refused() -> None:
    # Entries are finite, because derivatives are small or zero; the squares of inputs are not.
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Sigmoid()))
    inputs = torch.full((2, 3), 2e19)
    with pytest.raises(ValueError, match=r"overflow in torch\.float32"):
        hcurv.GaussNewton(model, nn.BCELoss(), (inputs, torch.ones(2, 3)))


def test_a_trace_that_overflows_is_refused_although_no_entry_does() -> None:
    model = seeded(lambda: nn.Linear(30, 1))
    inputs = torch.full((2, 30), 1e19)
    with pytest.raises(ValueError, match=r"overflow in torch\.float32"):
        hcurv.GaussNewton(model, nn.MSELoss(), (inputs, torch.ones(2, 1)))


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 70.0), (torch.float64, 720.0)])
def test_a_loss_whose_curvature_overflows_is_refused(dtype: torch.dtype, rate: float) -> None:
    model = seeded(lambda: nn.Linear(3, 1)).to(dtype)
    with torch.no_grad():
        model.bias.fill_(rate)  # The square root of exp(rate) is finite, and its square is not.
    data = (torch.ones(2, 3, dtype=dtype), torch.ones(2, 1, dtype=dtype))
    with pytest.raises(ValueError, match="too large for this loss"):
        hcurv.GaussNewton(model, nn.PoissonNLLLoss(), data)


def test_products_that_overflow_are_refused() -> None:
    model = seeded(lambda: nn.Linear(3, 2))
    inputs = torch.full((4, 3), 1e15)
    H = hcurv.GaussNewton(model, nn.MSELoss(), (inputs, torch.ones(4, 2)))
    large = torch.full((8,), 1e10)
    J = H.jacobian(inputs)
    for multiply in (
        lambda: H @ large,
        lambda: H.root_transposed(1e10 * H.root_product(large)),
        lambda: J.T @ (J @ large),
    ):
        with pytest.raises(ValueError, match="the product overflows"):
            multiply()
    # What is not finite before the product is the user's own.
    assert not bool(torch.isfinite(H @ torch.full((8,), torch.nan)).any())
