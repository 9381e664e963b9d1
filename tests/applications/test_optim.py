"""The Gauss-Newton optimizer against dense float64 references."""

from __future__ import annotations

import copy
import io
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import hcurv
import oracles
from hcurv.applications.optim.truncated_cg import minimise_model

ITERATIVE = ("kfac", "low-rank", "hierarchical", "diagonal", "none")
EXACT = ("parameters", "samples")


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def network(*widths: int, bias: bool = True, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).double()


def regression(num_points: int = 30) -> tuple[nn.Sequential, nn.Module, tuple[Tensor, Tensor]]:
    inputs = normal(num_points, 5)
    targets = torch.sin(inputs @ normal(5, 2, seed=1))
    return network(5, 6, 2), nn.MSELoss(), (inputs, targets)


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach().clone()


def dense_step(
    model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], damping: Any, decay: Any = 0.0
) -> Tensor:
    """−(H + D + W)⁻¹ (g + Wθ) by dense algebra."""
    inputs, targets = data

    def of_outputs(outputs: Tensor) -> Tensor:
        return loss(outputs, targets)

    matrix = oracles.gauss_newton(model, of_outputs, inputs)
    size = len(matrix)
    decays = torch.as_tensor(decay, dtype=torch.float64).expand(size)
    dampings = torch.as_tensor(damping, dtype=torch.float64).expand(size)
    gradient = oracles.gradient(model, of_outputs, inputs) + decays * flat(model)
    return -torch.linalg.solve(matrix + torch.diag(dampings + decays), gradient)


def taken(opt: hcurv.optim.GaussNewton, model: nn.Module, batch: Any) -> Tensor:
    before = flat(model)
    opt.step(batch)
    return flat(model) - before


@pytest.mark.parametrize("method", ["auto", *EXACT])
def test_linear_least_squares_are_solved_in_one_step(method: str) -> None:
    inputs, targets = normal(40, 5), normal(40, 2, seed=1)
    model = network(5, 2)
    opt = hcurv.optim.GaussNewton(model, nn.MSELoss(), damping=1e-10, method=method)
    record = opt.step((inputs, targets))
    design = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, targets).solution
    assert torch.allclose(model[0].weight, best[:5].T, atol=1e-7)
    assert torch.allclose(model[0].bias, best[5], atol=1e-7)
    assert record.ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", [*EXACT, *ITERATIVE])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_solves_the_damped_system(method: str, bias: bool) -> None:
    _, loss, data = regression()
    model = network(5, 6, 2, bias=bias)
    expected = dense_step(model, loss, data, 0.3, 0.05)
    opt = hcurv.optim.GaussNewton(
        model,
        loss,
        damping=0.3,
        weight_decay=0.05,
        method=method,
        tolerance=0.0,
        max_iterations=200,
    )
    found = taken(opt, model, data)
    assert float((found - expected).norm() / expected.norm()) < 1e-8
    assert opt.log[0].residual < 1e-8
    assert opt.log[0].method == method
    assert (opt.log[0].iterations == 0) == (method in EXACT)


@pytest.mark.parametrize("method", EXACT)
def test_cross_entropy_and_single_precision(method: str) -> None:
    inputs, labels = normal(25, 5), torch.randint(3, (25,), generator=torch.Generator())
    model = network(5, 4, 3)
    expected = dense_step(model, nn.CrossEntropyLoss(), (inputs, labels), 0.1)
    single = copy.deepcopy(model).float()
    opt = hcurv.optim.GaussNewton(single, nn.CrossEntropyLoss(), damping=0.1, method=method)
    found = taken(opt, single, (inputs.float(), labels)).double()
    assert float((found - expected).norm() / expected.norm()) < 1e-4


@settings(max_examples=15)
@given(
    num_points=st.integers(1, 12),
    width=st.integers(1, 5),
    damping=st.floats(1e-3, 10),
    decay=st.floats(0, 1),
    method=st.sampled_from(EXACT),
    seed=st.integers(0, 100),
)
def test_any_small_network(
    num_points: int, width: int, damping: float, decay: float, method: str, seed: int
) -> None:
    model, loss = network(3, width, 2, seed=seed), nn.MSELoss()
    data = (normal(num_points, 3, seed=seed), normal(num_points, 2, seed=seed + 1))
    expected = dense_step(model, loss, data, damping, decay)
    opt = hcurv.optim.GaussNewton(
        model, loss, damping=damping, weight_decay=decay, method=method, adapt_damping=False
    )
    found = taken(opt, model, data)
    # A step that raised the loss was computed again, with a larger damping.
    if opt.log[0].num_solves == 1:
        assert float((found - expected).norm()) < 1e-7 * float(expected.norm()) + 1e-12


def test_weight_decay_is_part_of_the_losses() -> None:
    model, loss, data = regression()
    value = float(loss(model(data[0]), data[1]).detach())
    penalty = 0.5 * 0.2 * float(flat(model).square().sum())
    record = hcurv.optim.GaussNewton(model, loss, weight_decay=0.2).step(data)
    assert record.loss == pytest.approx(value + penalty)
    value = float(loss(model(data[0]), data[1]).detach())
    assert record.loss_after == pytest.approx(value + 0.1 * float(flat(model).square().sum()))


def test_every_group_has_its_own_settings() -> None:
    model, loss, data = regression()
    sizes = [36, 14]
    spread = [torch.full((size,), 1.0, dtype=torch.float64) for size in sizes]
    damping = torch.cat([0.3 * spread[0], 0.7 * spread[1]])
    decay = torch.cat([0.0 * spread[0], 0.1 * spread[1]])
    rates = torch.cat([0.5 * spread[0], 0.25 * spread[1]])
    expected = rates * dense_step(model, loss, data, damping, decay)
    for method in ("parameters", "kfac", "low-rank"):
        own = copy.deepcopy(model)
        groups = [
            {"params": own[2].parameters(), "lr": 0.25, "damping": 0.7, "weight_decay": 0.1},
            {"params": own[0].parameters(), "lr": 0.5, "damping": 0.3},
        ]
        opt = hcurv.optim.GaussNewton(
            own, loss, groups, method=method, tolerance=0.0, max_iterations=100
        )
        found = taken(opt, own, data)
        assert float((found - expected).norm() / expected.norm()) < 1e-8, method
        # The dampings keep their ratio.
        first, second = (group["damping"] for group in opt.param_groups)
        assert first / second == pytest.approx(7 / 3)
        # What was predicted is the decrease of the quadratic model along the step that was taken.
        predicted = predicted_decrease(model, loss, data, found, decay)
        assert opt.log[0].predicted_decrease == pytest.approx(predicted, rel=1e-6)


def predicted_decrease(
    model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], step: Tensor, decay: Tensor
) -> float:
    inputs, targets = data

    def of_outputs(outputs: Tensor) -> Tensor:
        return loss(outputs, targets)

    matrix = oracles.gauss_newton(model, of_outputs, inputs) + torch.diag(decay)
    gradient = oracles.gradient(model, of_outputs, inputs) + decay * flat(model)
    return -float(gradient @ step + 0.5 * step @ matrix @ step)


def test_frozen_parameters_stay() -> None:
    model, loss, data = regression()
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone()
    expected = dense_step(model, loss, data, 0.1)
    opt = hcurv.optim.GaussNewton(model, loss, damping=0.1)
    assert torch.allclose(taken(opt, model, data), expected)
    assert torch.equal(model[0].bias, frozen)
    # Parameters may be frozen later, too, and thawed again.
    opt = hcurv.optim.GaussNewton(model, loss, damping=0.1, method="kfac")
    for trainable in (True, False, True):
        model[2].weight.requires_grad_(trainable)
        before = model[2].weight.detach().clone()
        opt.step(data)
        assert torch.equal(model[2].weight, before) != trainable


def test_ratio_and_damping_follow_levenberg_and_marquardt() -> None:
    model, loss, data = regression()
    opt = hcurv.optim.GaussNewton(model, loss, damping=1e-4, method="parameters")
    seen = set()
    for _ in range(12):
        before, start = copy.deepcopy(model), flat(model)
        damping = opt.param_groups[0]["damping"]
        record = opt.step(data)
        assert record.damping == damping
        step = dense_step(before, loss, data, damping)
        predicted = predicted_decrease(before, loss, data, step, torch.zeros(len(step)).double())
        trial = copy.deepcopy(before)
        nn.utils.vector_to_parameters(start + step, trial.parameters())
        decrease = record.loss - float(loss(trial(data[0]), data[1]).detach())
        assert record.ratio == pytest.approx(decrease / predicted, rel=1e-3, abs=1e-6)
        if decrease <= 0:
            assert record.num_solves > 1
            rejected = record.num_solves - 1
            expected = damping * 3.0 ** (rejected * (rejected + 1) / 2)
            seen.add("rejected")
        else:
            assert record.num_solves == 1
            factor = 1 / 3 if record.ratio > 0.75 else 3.0 if record.ratio < 0.25 else 1.0
            expected = damping * factor
            seen.add("taken")
        assert record.next_damping == pytest.approx(expected)
        assert record.loss_after < record.loss
    assert seen == {"rejected", "taken"}


def test_steps_that_raise_the_loss_are_never_taken() -> None:
    class Flipped(hcurv.losses.HalfSquaredError):
        """Its gradient leads uphill, because its value is not the one of its derivatives."""

        def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 1.0 + (outputs.detach() - outputs.detach()).sum(1) + _bump(outputs, targets)

    model, _, data = regression()
    before = flat(model)
    for method in ("parameters", "kfac"):
        opt = hcurv.optim.GaussNewton(model, Flipped(), method=method, damping=1.0)
        record = opt.step(data)
        assert not record.accepted
        assert torch.equal(flat(model), before)
        assert record.loss_after == record.loss
        assert record.step_norm == 0
        assert record.next_damping == pytest.approx(3.0**10)
        assert record.num_solves == 5


def _bump(outputs: Tensor, targets: Tensor) -> Tensor:
    """A value whose derivative points down where the value itself goes up."""
    error = 0.5 * (outputs - targets).square().sum(1)
    return 2 * error.detach() * -1 + error


def test_the_first_damping_is_the_curvature_along_the_gradient() -> None:
    model, loss, data = regression()
    matrix = oracles.gauss_newton(model, lambda outputs: loss(outputs, data[1]), data[0])
    gradient = oracles.gradient(model, lambda outputs: loss(outputs, data[1]), data[0])
    record = hcurv.optim.GaussNewton(model, loss).step(data)
    assert record.damping == pytest.approx(
        float(gradient @ matrix @ gradient / gradient.square().sum())
    )


@pytest.mark.parametrize("method", ["auto", *EXACT, *ITERATIVE])
def test_every_method_lowers_the_loss(method: str) -> None:
    model, loss, data = regression(60)
    model, data = model.float(), (data[0].float(), data[1].float())
    opt = hcurv.optim.GaussNewton(model, loss, method=method)
    for _ in range(8):
        opt.step(data)
    assert opt.log[-1].loss_after < 0.15 * opt.log[0].loss
    for earlier, later in pairwise(opt.log):
        assert later.loss == pytest.approx(earlier.loss_after, rel=1e-5)


def test_minibatches_of_unequal_size_lower_the_loss() -> None:
    model, loss, data = regression(70)
    loader = DataLoader(TensorDataset(*data), batch_size=32)
    opt = hcurv.optim.GaussNewton(model, loss, method="kfac")
    first = float(loss(model(data[0]), data[1]).detach())
    for _ in range(4):
        for batch in loader:  # a list of inputs and targets
            opt.step(batch)
    assert [record.num_points for record in opt.log[:3]] == [32, 32, 6]
    assert float(loss(model(data[0]), data[1]).detach()) < 0.5 * first


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loader_of_all_data_is_one_batch(reduction: str) -> None:
    model, _, data = regression(70)
    loss = nn.MSELoss(reduction=reduction)
    loader = DataLoader(TensorDataset(*data), batch_size=32)
    whole = taken(hcurv.optim.GaussNewton(model, loss, damping=1.0), model, data)
    model, _, data = regression(70)
    opt = hcurv.optim.GaussNewton(model, loss, damping=1.0)
    assert torch.allclose(taken(opt, model, loader), whole, atol=1e-12)
    assert opt.log[0].num_points == 70


def test_many_points_are_read_in_pieces() -> None:
    model, loss, data = regression(1500)
    expected = dense_step(model, loss, data, 0.5)
    opt = hcurv.optim.GaussNewton(model, loss, damping=0.5)
    value = float(loss(model(data[0]), data[1]).detach())
    assert torch.allclose(taken(opt, model, data), expected)
    assert opt.log[0].loss == pytest.approx(value)


def test_closures_return_the_batch() -> None:
    model, loss, data = regression()
    opt = hcurv.optim.GaussNewton(model, loss)
    record = opt.step(lambda: data)
    assert record is opt.log[-1]
    with pytest.raises(TypeError, match="must return the batch"):
        opt.step(lambda: loss(model(data[0]), data[1]))


def test_schedulers_change_the_learning_rate() -> None:
    model, loss, data = regression()
    expected = 0.25 * dense_step(model, loss, data, 1.0)
    opt = hcurv.optim.GaussNewton(model, loss, damping=1.0, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: [0.5, 0.1][epoch])
    assert torch.allclose(taken(opt, model, data), expected)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)
    before, damping = copy.deepcopy(model), opt.param_groups[0]["damping"]
    assert torch.allclose(taken(opt, model, data), 0.05 * dense_step(before, loss, data, damping))
    for scheduler in (
        torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=4),
        torch.optim.lr_scheduler.ReduceLROnPlateau(opt),
    ):
        record = opt.step(data)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(record.loss)
        else:
            scheduler.step()


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    model, loss, data = regression()
    before = flat(model)
    record = hcurv.optim.GaussNewton(model, loss, lr=0.0).step(data)
    assert torch.equal(flat(model), before)
    assert math.isnan(record.ratio)
    assert record.next_damping == record.damping


def test_no_gradient_no_step() -> None:
    model, loss, (inputs, _) = regression()
    targets = model(inputs).detach()
    before = flat(model)
    record = hcurv.optim.GaussNewton(model, loss).step((inputs, targets))
    assert torch.equal(flat(model), before)
    assert record.num_solves == 0
    assert not record.accepted


@pytest.mark.parametrize("method", ["auto", "samples", "kfac", "low-rank", "none"])
def test_saved_states_continue_identically(method: str, tmp_path: Path) -> None:
    model, loss, data = regression()
    opt = hcurv.optim.GaussNewton(model, loss, method=method)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for _ in range(3):
        opt.step(data)
        scheduler.step()
    torch.save({"opt": opt.state_dict(), "model": model.state_dict()}, tmp_path / "state.pt")
    other = network(5, 6, 2, seed=7)
    again = hcurv.optim.GaussNewton(other, loss, method=method, damping=77.0, lr=5.0)
    state = torch.load(tmp_path / "state.pt", weights_only=True)  # nothing but plain data
    other.load_state_dict(state["model"])
    again.load_state_dict(state["opt"])
    for _ in range(4):
        first, second = opt.step(data), again.step(data)
        assert first.loss_after == second.loss_after
        assert (first.step, first.damping, first.ratio) == (
            second.step,
            second.damping,
            second.ratio,
        )
        assert torch.equal(flat(model), flat(other))


@pytest.mark.parametrize("method", ["samples", "kfac", "low-rank"])
def test_named_methods_are_reproducible(method: str) -> None:
    results = []
    for _ in range(2):
        model, loss, data = regression()
        opt = hcurv.optim.GaussNewton(model, loss, method=method, curvature_points=20)
        state = torch.get_rng_state()
        for _ in range(4):
            opt.step(data)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(flat(model))
    assert torch.equal(*results)


def test_the_log_says_what_steps_cost() -> None:
    model, loss, data = regression()
    opt = hcurv.optim.GaussNewton(model, loss, method="kfac", tolerance=0.0, max_iterations=7)
    for _ in range(12):
        opt.step(data)
    assert [record.step for record in opt.log] == list(range(1, 13))
    assert opt.log[0].rebuilt
    # A preconditioner is kept, but not for ever.
    assert 0 < sum(record.rebuilt for record in opt.log[1:]) < 6
    for record in opt.log:
        assert record.iterations <= 7 * record.num_solves
        assert (
            sum(value for name, value in record.seconds.items() if name != "total")
            <= (record.seconds["total"])
        )
        assert record.predicted_decrease > 0
        if record.scale == 1 and record.num_solves == 1:
            decrease = record.loss - record.loss_after
            assert decrease / record.predicted_decrease == pytest.approx(record.ratio)


def test_gradients_and_mode_of_the_model_are_left_alone() -> None:
    model, loss, data = regression()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    hcurv.optim.GaussNewton(model, loss).step(data)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[2].weight.grad is None
    assert model.training


def test_curvature_of_some_points_with_the_gradient_of_all() -> None:
    model, loss, data = regression(40)
    opt = hcurv.optim.GaussNewton(model, loss, damping=0.5, curvature_points=10, seed=3)
    chosen = torch.randperm(40, generator=torch.Generator().manual_seed(4))[:10]
    matrix = oracles.gauss_newton(
        model, lambda outputs: loss(outputs, data[1][chosen]), data[0][chosen]
    )
    gradient = oracles.gradient(model, lambda outputs: loss(outputs, data[1]), data[0])
    expected = -torch.linalg.solve(matrix + 0.5 * torch.eye(len(matrix)), gradient)
    assert torch.allclose(taken(opt, model, data), expected)


def test_momentum_starts_from_the_last_step() -> None:
    model, loss, data = regression()
    ends: dict[tuple[float, int], Tensor] = {}
    for momentum in (0.0, 0.5):
        for iterations in (1, 200):
            own = copy.deepcopy(model)
            opt = hcurv.optim.GaussNewton(
                own, loss, method="none", momentum=momentum, tolerance=0.0, damping=0.5
            )
            opt.step(data)
            last = torch.cat([opt.state[p]["direction"].flatten() for p in own.parameters()])
            assert torch.allclose(flat(own) - flat(model), last)
            again = hcurv.optim.GaussNewton(
                own, loss, method="none", tolerance=0.0, max_iterations=iterations
            )
            again.load_state_dict(opt.state_dict())
            ends[momentum, iterations] = taken(again, own, data)
    # Where conjugate gradients converge, it does not matter where they start.
    assert torch.allclose(ends[0.0, 200], ends[0.5, 200], atol=1e-10)
    assert not torch.allclose(ends[0.0, 1], ends[0.5, 1], rtol=1e-2)


def test_conjugate_gradients_start_from_the_best_multiple() -> None:
    root = normal(8, 8)
    matrix, gradient = root @ root.T + torch.eye(8), normal(8, seed=1)
    solution = -torch.linalg.solve(matrix, gradient)
    for start, length in ((2 * solution, 0.5), (0.5 * solution, 1.0), (-solution, 0.0)):
        found = minimise_model(lambda v: matrix @ v, gradient, lambda v: v, start, 0.0, 1)
        first = length * start
        assert found.values[0] == pytest.approx(
            float(gradient @ first + 0.5 * first @ matrix @ first), abs=1e-12
        )
    found = minimise_model(lambda v: matrix @ v, gradient, lambda v: v, None, 0.0, 100)
    assert torch.allclose(found.step, solution)
    assert found.values[-1] == pytest.approx(float(0.5 * gradient @ solution))
    rough = minimise_model(lambda v: matrix @ v, gradient, lambda v: v, None, 0.1, 100)
    assert 5 <= rough.iterations < found.iterations


def test_general_models_and_keyword_inputs() -> None:
    class Residual(nn.Module):
        """u_xx of a small network, as in physics-informed training."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network(1, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                u = self.net(x)
                (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
                (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            return bend + u

    model, points = Residual(), normal(12, 1)
    values, jacobian = oracles.jacobian_of_model(model, points)
    opt = hcurv.optim.GaussNewton(model, hcurv.losses.HalfSquaredError(), damping=1e-2)
    found = taken(opt, model, ({"x": points}, torch.zeros_like(values)))
    matrix = jacobian.T @ jacobian / 12 + 1e-2 * torch.eye(jacobian.shape[1])
    assert torch.allclose(found, -torch.linalg.solve(matrix, jacobian.T @ values.flatten() / 12))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "ilu"}, ValueError, "method must be one of auto, parameters"),
        ({"lr": -1.0}, ValueError, "lr must be a number that is not negative; got -1.0"),
        ({"damping": 0.0}, ValueError, "damping must be positive, or None; got 0.0"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay must be a number"),
        ({"momentum": 1.5}, ValueError, r"momentum must lie in \[0, 1\]; got 1.5"),
        ({"tolerance": 1.0}, ValueError, r"tolerance must be a number in \[0, 1\)"),
        ({"max_iterations": 0}, ValueError, "max_iterations"),
        ({"damping_factor": 1.0}, ValueError, "damping_factor must be a number above 1"),
        ({"curvature_points": 0}, ValueError, "curvature_points"),
        ({"loss": nn.MSELoss(reduction="sum"), "curvature_points": 5}, ValueError, "a mean over"),
        ({"loss": nn.L1Loss()}, TypeError, "no Hessian is known"),
        ({"loss": hcurv.losses.Huber()}, TypeError, "Huber has no value: pass the loss module"),
        ({"params": []}, ValueError, "empty parameter list"),
        ({"params": [{"params": [nn.Parameter(torch.ones(1))], "lr": -2}]}, ValueError, "lr must"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, loss, _ = regression()
    with pytest.raises(error, match=message):
        hcurv.optim.GaussNewton(model, **{"loss": loss, **options})


def test_bad_groups() -> None:
    model, loss, data = regression()
    with pytest.raises(ValueError, match=r"'2.weight' requires gradients but is in no parameter"):
        hcurv.optim.GaussNewton(model, loss, model[0].parameters())
    with pytest.raises(ValueError, match="a parameter that is not the model's"):
        hcurv.optim.GaussNewton(model, loss, [*model.parameters(), nn.Parameter(torch.ones(1))])
    opt = hcurv.optim.GaussNewton(model, loss)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to do"):
        opt.step(data)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (normal(4, 5), ValueError, "a step needs targets"),
        (3, TypeError, r"a step takes a batch \(inputs, targets\).*got int"),
        ([normal(4, 5)], TypeError, "a batch was Tensor without targets"),
        ((normal(0, 5), normal(0, 2)), ValueError, "the batch is empty"),
        ((normal(4, 5), normal(4, 3)), ValueError, "targets must have the shape"),
        ((normal(4, 5).float(), normal(4, 2)), TypeError, "inputs must be torch.float64"),
        ((math.inf * normal(4, 5), normal(4, 2)), ValueError, "inputs of batch 0 have NaN"),
        ((normal(4, 5), math.nan * normal(4, 2)), ValueError, "targets of batch 0 have NaN"),
    ],
)
def test_bad_batches(batch: Any, error: Any, message: str) -> None:
    model, loss, _ = regression()
    before = flat(model)
    with pytest.raises(error, match=message):
        hcurv.optim.GaussNewton(model, loss).step(batch)
    assert torch.equal(flat(model), before)


def test_states_of_other_optimizers_are_refused() -> None:
    model, loss, _ = regression()
    opt = hcurv.optim.GaussNewton(model, loss)
    with pytest.raises(ValueError, match="this is not the state of"):
        opt.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)  # before the first step, too
    buffer.seek(0)
    opt.load_state_dict(torch.load(buffer, weights_only=True))


def test_auto_compares_ways_for_larger_systems() -> None:
    inputs = normal(400, 12)
    model = network(12, 30, 12)
    opt = hcurv.optim.GaussNewton(model, nn.MSELoss())
    for _ in range(9):
        opt.step((inputs, inputs))
    assert {record.method for record in opt.log} <= {*EXACT, *ITERATIVE}
    assert opt.log[-1].loss_after < 0.5 * opt.log[0].loss


def test_losses_have_the_values_of_torch() -> None:
    outputs, targets = normal(6, 3), normal(6, 3, seed=1)
    half = hcurv.losses.HalfSquaredError().value(outputs, targets)
    full = hcurv.losses.MeanSquaredError().value(outputs, targets)
    assert torch.allclose(full.sum() / 18, nn.MSELoss()(outputs, targets))
    assert torch.allclose(2 * half, full)
    variance = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    nll = nn.GaussianNLLLoss(reduction="sum")(outputs, targets, variance.expand(6, 3))
    value = hcurv.losses.GaussianNLL(variance).value(outputs, targets).sum()
    assert torch.allclose(value, nll - 3 * variance.log().sum())
