"""prune against dense matrices from torch.func: what goes, how the rest moves, what is recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.nn.utils import prune as torch_prune
from torch.utils.data import DataLoader, TensorDataset

import hcurv
import oracles
from cases import labels, normal, seeded
from hcurv.applications.pruning import quadratic

LOSS = nn.CrossEntropyLoss()
DAMPING = 1e-2


def network() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))).double()


def image_network() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3),
            nn.Tanh(),
            nn.Conv2d(5, 6, 2, bias=False),
            nn.Flatten(),
            nn.Linear(54, 7),
            nn.Tanh(),
            nn.Linear(7, 3),
        )
    ).double()


DATA = (normal(60, 12), labels(60, 4))
IMAGES = (normal(30, 2, 6, 6), labels(30, 3))


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach()


def dense(model: nn.Module, data: tuple[Tensor, Tensor] = DATA) -> tuple[Tensor, Tensor]:
    """H and the gradient, in double precision."""

    def value(outputs: Tensor) -> Tensor:
        return LOSS(outputs, data[1])

    return oracles.gauss_newton(model, value, data[0]), oracles.gradient(model, value, data[0])


def constrained_minimiser(H: Tensor, g: Tensor, weights: Tensor, gone: Tensor) -> Tensor:
    """Minimise gᵀδ + ½ δᵀ(H + λI)δ with δ = −θ on ``gone``, by the whole Lagrangian system."""
    size, rows = len(g), gone.nonzero().squeeze(1)
    picks = torch.eye(size, dtype=torch.float64)[rows]
    corner = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    damped = H + DAMPING * torch.eye(size, dtype=torch.float64)
    system = torch.cat([torch.cat([damped, picks.T], 1), torch.cat([picks, corner], 1)])
    solved = torch.linalg.solve(system, torch.cat([-g, -weights[rows]]))
    return weights + solved[:size]


def removed(thin: hcurv.Pruning) -> Tensor:
    """Which flat entries are masked; those of parameters without a mask are not."""
    parts = []
    for name, parameter in thin.model.named_parameters():
        if parameter.requires_grad:
            kept = torch.ones(parameter.shape, dtype=torch.bool)
            parts.append(~thin.masks.get(name, kept).reshape(-1))
    return torch.cat(parts)


def expected_gone(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    gone = torch.zeros(len(scores), dtype=torch.bool)
    order = scores[candidates].argsort()
    gone[candidates[order[:count]]] = True
    return gone


def weights_of(model: nn.Module) -> Tensor:
    """The flat indices of matrices, without biases."""
    flags = [torch.full((p.numel(),), p.ndim > 1) for p in model.parameters() if p.requires_grad]
    return torch.cat(flags).nonzero().squeeze(1)


def costs(saliency: str, H: Tensor, weights: Tensor) -> Tensor:
    if saliency == "magnitude":
        return weights.abs()
    if saliency == "diagonal":
        return weights**2 * H.diagonal()
    inverse = torch.linalg.inv(H + DAMPING * torch.eye(len(H), dtype=torch.float64))
    return weights**2 / inverse.diagonal()


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("saliency", ["magnitude", "diagonal", "inverse"])
def test_one_step_is_the_constrained_minimiser(saliency: Any, with_gradient: bool) -> None:
    model = network()
    H, g = dense(model)
    weights, candidates = flat(model), weights_of(model)
    thin = hcurv.prune(
        model,
        LOSS,
        DATA if with_gradient else DATA[0],  # Without targets, no step is ever halved.
        0.25,
        schedule=1,
        saliency=saliency,
        damping=DAMPING,
        gradient=with_gradient,
    )
    gone = expected_gone(costs(saliency, H, weights), candidates, 32)
    assert torch.equal(removed(thin), gone)
    found = constrained_minimiser(H, g if with_gradient else 0 * g, weights, gone)
    assert float((flat(thin.model) - found).norm() / found.norm()) < 1e-10


@pytest.mark.parametrize("saliency", ["inverse", "auto"])
def test_large_models_by_conjugate_gradients_and_factorize(
    saliency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    options = {"schedule": [0.3, 0.5], "damping": DAMPING, "gradient": True}
    small = hcurv.prune(model, LOSS, DATA, 0.5, saliency="inverse", **options)
    monkeypatch.setattr(quadratic, "MAX_DENSE", 0)
    monkeypatch.setattr(quadratic, "_TOLERANCE", 1e-10)
    large = hcurv.prune(model, LOSS, DATA, 0.5, saliency=saliency, **options)
    if saliency == "auto":
        assert [step.saliency for step in large.record] == [None, "diagonal", "diagonal"]
        return
    assert torch.equal(removed(small), removed(large))
    assert float((flat(small.model) - flat(large.model)).norm() / flat(small.model).norm()) < 1e-8


def test_second_step_uses_the_block_of_what_is_left() -> None:
    model = network()
    inputs = DATA[0]
    first = hcurv.prune(model, LOSS, inputs, 0.3, schedule=1, saliency="inverse", damping=DAMPING)
    both = hcurv.prune(
        model, LOSS, inputs, 0.5, schedule=[0.3, 0.5], saliency="inverse", damping=DAMPING
    )
    H, g = dense(first.model)
    weights, active = flat(first.model), (~removed(first)).nonzero().squeeze(1)
    block = H[active[:, None], active] + DAMPING * torch.eye(len(active), dtype=torch.float64)
    scores = torch.zeros_like(weights)
    scores[active] = weights[active] ** 2 / torch.linalg.inv(block).diagonal()
    gone = expected_gone(scores, weights_of(model), 64)
    assert torch.equal(removed(both), gone)
    found = constrained_minimiser(H, 0 * g, weights, gone)
    assert float((flat(both.model) - found).norm() / found.norm()) < 1e-10


def test_stages_select_again_within_one_quadratic_model() -> None:
    model = network()
    thin = hcurv.prune(
        model, LOSS, DATA[0], 0.5, schedule=1, stages=2, saliency="magnitude", damping=DAMPING
    )
    H, g = dense(model)
    weights, candidates = flat(model), weights_of(model)
    count = round(128 * (1 - 0.5**0.5))
    gone = expected_gone(weights.abs(), candidates, count)
    moved = constrained_minimiser(H, 0 * g, weights, gone)
    gone = expected_gone(torch.where(gone, -1.0, moved.abs()), candidates, 64)
    assert torch.equal(removed(thin), gone)
    found = constrained_minimiser(H, 0 * g, weights, gone)
    assert float((flat(thin.model) - found).norm() / found.norm()) < 1e-10


def test_units_by_their_joint_cost_and_by_the_sum() -> None:
    model = network()
    H, _ = dense(model)
    weights = flat(model)
    inverse = torch.linalg.inv(H + DAMPING * torch.eye(len(H), dtype=torch.float64))
    units = [
        torch.cat([torch.arange(12 * j, 12 * j + 12), torch.tensor([96 + j])]) for j in range(8)
    ]
    joint = torch.stack(
        [weights[u] @ torch.linalg.inv(inverse[u[:, None], u]) @ weights[u] for u in units]
    )
    added = torch.stack([(weights[u] ** 2 * H.diagonal()[u]).sum() for u in units])
    for saliency, totals in (("inverse", joint), ("diagonal", added)):
        thin = hcurv.prune(
            model,
            LOSS,
            DATA,
            0.5,
            structure="units",
            schedule=1,
            saliency=saliency,
            damping=DAMPING,
        )
        gone = totals.argsort()[:4]
        assert list(thin.masks) == ["0.weight", "0.bias"]  # The last layer's units are the outputs.
        assert sorted((~thin.masks["0.bias"]).nonzero().squeeze(1).tolist()) == sorted(
            gone.tolist()
        )
        assert torch.equal(thin.masks["0.weight"], thin.masks["0.bias"][:, None].expand(8, 12))
        assert thin.record[-1].sparsity == 0.5
        assert float(thin.model[0](DATA[0])[:, gone].detach().abs().max()) == 0.0


def test_channels_and_units_of_a_convolutional_network() -> None:
    model = image_network()
    thin = hcurv.prune(model, LOSS, IMAGES, 0.4, structure="channels", schedule=2)
    assert list(thin.masks) == ["0.weight", "0.bias", "2.weight"]
    kept = thin.masks["0.weight"].flatten(1)
    assert torch.equal(kept.all(1), kept.any(1))
    assert torch.equal(kept.any(1), thin.masks["0.bias"])
    alive = int(thin.masks["0.bias"].sum()) + int(thin.masks["2.weight"].flatten(1).any(1).sum())
    assert alive == 11 - round(0.4 * 11)
    both = hcurv.prune(
        model, LOSS, IMAGES, 0.5, structure="units+channels", scope="layer", schedule=1
    )
    counts = [int(both.masks[name].flatten(1).any(1).sum()) for name in both.masks if "w" in name]
    assert counts == [5 - round(2.5), 3, 7 - round(3.5)]


def test_every_layer_keeps_a_unit() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3), nn.Linear(3, 2))
    ).double()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
        model[2].bias.zero_()
    data = (normal(20, 5), labels(20, 2))
    thin = hcurv.prune(model, LOSS, data, 0.8, structure="units", saliency="magnitude", schedule=1)
    assert int(thin.masks["2.bias"].sum()) == 1
    with pytest.raises(ValueError, match=r"leaves 1 of 23 units or channels, and 2 must stay"):
        hcurv.prune(model, LOSS, data, 0.95, structure="units")


def test_patterns_keep_the_best_of_each_group() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 4))).double()
    data = (normal(40, 10), labels(40, 4))
    thin = hcurv.prune(model, LOSS, data, structure="2:4", saliency="magnitude", schedule=1)
    for name, width in (("0.weight", 10), ("2.weight", 3)):
        values, mask = dict(model.named_parameters())[name].detach().abs(), thin.masks[name]
        for row, kept in zip(values, mask, strict=True):
            for start in range(0, width, 4):
                group, stays = row[start : start + 4], kept[start : start + 4]
                assert int(stays.sum()) == min(2, len(group))
                if len(group) > 2:
                    assert group[stays].min() > group[~stays].max()


def test_patterns_of_convolutions_run_over_channels() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 2))
    ).double()
    data = (normal(15, 4, 3, 3), labels(15, 2))
    thin = hcurv.prune(model, LOSS, data, structure="1:4", schedule=3, leave_out=["2"])
    assert bool((thin.masks["0.weight"].sum(1) == 1).all())
    assert [step.sparsity for step in thin.record] == [0.0, 0.25, 0.5, 0.75]
    assert "2.weight" not in thin.masks


@settings(max_examples=30, deadline=None)
@given(sparsity=st.floats(0, 0.999), bias=st.booleans(), scope=st.sampled_from(["model", "layer"]))
def test_sparsity_is_exact(sparsity: float, bias: bool, scope: Any) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    data = (normal(7, 5).float(), labels(7, 3))
    thin = hcurv.prune(
        model,
        LOSS,
        data,
        sparsity,
        schedule=1,
        saliency="magnitude",
        corrections=0,
        scope=scope,
        bias=bias,
    )
    sizes = [20, 4, 12, 3] if bias else [20, 12]
    zeros = [int((~mask).sum()) for mask in thin.masks.values()]
    expected = [round(sparsity * n) for n in sizes]
    assert zeros == expected if scope == "layer" else sum(zeros) == round(sparsity * sum(sizes))
    assert torch.equal(flat(thin.model), torch.where(removed(thin), 0.0, flat(model)))


def test_schedules_nest_and_end_where_they_should() -> None:
    thin = hcurv.prune(network(), LOSS, DATA, 0.9, schedule=4)
    shares = [step.sparsity for step in thin.record]
    assert shares == pytest.approx([1 - 0.1 ** (t / 4) for t in range(5)], abs=1 / 128)
    assert thin.record[-1].num_kept == 128 - round(0.9 * 128)
    assert thin.sparsity == pytest.approx(round(0.9 * 128) / 128)
    again = hcurv.prune(network(), LOSS, DATA, 0.5, schedule=[0.2, 0.5, 0.5])
    assert [round(step.sparsity, 1) for step in again.record] == [0, 0.2, 0.5, 0.5]
    early = hcurv.prune(network(), LOSS, DATA, schedule=[0.2])
    assert bool((removed(again) | ~removed(early)).all())


def test_further_corrections_go_down_the_loss() -> None:
    once, often = (
        hcurv.prune(network(), LOSS, DATA, 0.6, schedule=1, corrections=count) for count in (1, 6)
    )
    assert often.record[-1].loss < once.record[-1].loss
    assert torch.equal(removed(once), removed(often))


def test_a_move_that_makes_the_loss_larger_is_halved_or_left_out() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(30)  # far from where the quadratic model holds
    thin = hcurv.prune(model, LOSS, DATA, 0.9, schedule=1, damping=1e-9, gradient=True)
    assert thin.record[-1].loss <= thin.record[-1].zeroed_loss


def test_what_is_left_out_or_frozen() -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    thin = hcurv.prune(model, LOSS, DATA, 0.5, schedule=1, leave_out=["2.weight"])
    assert list(thin.masks) == ["0.weight"]
    assert int((~thin.masks["0.weight"]).sum()) == 48
    assert torch.equal(thin.model[0].bias, model[0].bias)
    assert not torch.equal(thin.model[2].weight, model[2].weight)  # It is corrected.
    H, g = dense(model)
    thin = hcurv.prune(
        model, LOSS, DATA[0], 0.5, schedule=1, leave_out=["2.weight"], damping=DAMPING
    )
    found = constrained_minimiser(H, 0 * g, flat(model), removed(thin))
    assert float((flat(thin.model) - found).norm() / found.norm()) < 1e-10


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def test_tied_weights_stay_tied() -> None:
    model = seeded(Tied).double()
    data = (normal(40, 6), labels(40, 6))
    thin = hcurv.prune(model, LOSS, data, 0.5, schedule=2, corrections=2)
    assert list(thin.masks) == ["encode.weight"]
    assert thin.model.decode.weight is thin.model.encode.weight
    net = thin.apply_masks()
    assert torch.allclose(net(data[0]), thin.model(data[0]), rtol=1e-12, atol=1e-12)
    assert net.decode.weight_orig is net.encode.weight_orig
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LOSS(net(data[0]), data[1]).backward()
    optimizer.step()
    net(data[0])
    for layer in (net.encode, net.decode):
        assert bool((layer.weight[~thin.masks["encode.weight"]] == 0).all())
    with pytest.raises(ValueError, match=r"'encode.weight' is also used as decode.weight"):
        hcurv.prune(model, LOSS, data, 0.5, structure="units")


def test_masks_survive_training_and_can_be_made_permanent() -> None:
    model = network()
    thin = hcurv.prune(model, LOSS, DATA, 0.7, schedule=1)
    net = thin.apply_masks()
    assert torch_prune.is_pruned(net)
    assert not torch_prune.is_pruned(thin.model)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        LOSS(net(DATA[0]), DATA[1]).backward()
        optimizer.step()
    for place in (0, 2):
        torch_prune.remove(net[place], "weight")
        assert bool((net[place].weight[~thin.masks[f"{place}.weight"]] == 0).all())
        assert not torch.equal(net[place].weight, thin.model[place].weight)
    with pytest.raises(ValueError, match=r"parameter '0.weight' of shape \(8, 12\)"):
        thin.apply_masks(nn.Sequential(nn.Linear(3, 3)))
    pruned = copy.deepcopy(thin.model)
    assert thin.apply_masks(pruned) is pruned
    with pytest.raises(ValueError, match=r"make them permanent first"):
        hcurv.prune(pruned, LOSS, DATA, 0.8)


def test_nothing_else_changes() -> None:
    model = network().train()
    before, state = flat(model).clone(), torch.get_rng_state()
    thin = hcurv.prune(model, LOSS, DATA, 0.8, corrections=2, num_points=20, seed=3)
    assert torch.equal(flat(model), before)
    assert all(p.grad is None for p in (*model.parameters(), *thin.model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    again = hcurv.prune(model, LOSS, DATA, 0.8, corrections=2, num_points=20, seed=3)
    assert torch.equal(flat(thin.model), flat(again.model))
    other = hcurv.prune(model, LOSS, DATA, 0.8, corrections=2, num_points=20, seed=4)
    assert not torch.equal(flat(thin.model), flat(other.model))


def test_loaders_of_unequal_batches_and_single_precision() -> None:
    model = network()
    loader = DataLoader(TensorDataset(*DATA), batch_size=23)
    whole = hcurv.prune(model, LOSS, DATA, 0.6, schedule=2, corrections=2)
    parts = hcurv.prune(model, LOSS, loader, 0.6, schedule=2, corrections=2)
    assert torch.allclose(flat(whole.model), flat(parts.model), rtol=1e-9, atol=1e-12)
    single = hcurv.prune(
        model.float(), LOSS, (DATA[0].float(), DATA[1]), 0.6, schedule=2, corrections=2
    )
    assert torch.equal(removed(single), removed(whole))
    assert float((flat(single.model).double() - flat(whole.model)).norm()) < 1e-2
    assert single.record[-1].loss == pytest.approx(whole.record[-1].loss, rel=1e-3)


@pytest.mark.parametrize("num_points", [None, 30])
def test_a_sum_is_a_mean_times_the_number_of_points(num_points: int | None) -> None:
    model, total = network(), nn.CrossEntropyLoss(reduction="sum")
    options: dict[str, Any] = {"schedule": 2, "corrections": 3, "num_points": num_points}
    count = num_points or 60
    mean = hcurv.prune(model, LOSS, DATA, 0.6, damping=1e-2, **options)
    added = hcurv.prune(model, total, DATA, 0.6, damping=1e-2 * count, **options)
    assert torch.allclose(flat(mean.model), flat(added.model), rtol=1e-8, atol=1e-10)
    rule = [hcurv.prune(model, each, DATA, 0.6, **options) for each in (LOSS, total)]
    assert torch.allclose(flat(rule[0].model), flat(rule[1].model), rtol=1e-8, atol=1e-10)


def test_gradient_over_all_points_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    from hcurv.applications.pruning import points

    monkeypatch.setattr(points, "_CHUNK", 7)
    model = image_network()
    held = points.Points(model, LOSS, IMAGES, None)
    expected = dense(model, IMAGES)[1]
    assert torch.allclose(held.gradient(30), expected, rtol=1e-10, atol=1e-14)
    value, accuracy = held.measure(held.weights)
    outputs = model(IMAGES[0]).detach()
    assert value == pytest.approx(float(LOSS(outputs, IMAGES[1])))
    assert accuracy == pytest.approx(float((outputs.argmax(1) == IMAGES[1]).double().mean()))


def test_without_targets_and_with_outputs_as_targets() -> None:
    model = network()
    thin = hcurv.prune(model, LOSS, DATA[0], 0.4, schedule=1, damping=DAMPING)
    with_targets = hcurv.prune(model, LOSS, DATA, 0.4, schedule=1, damping=DAMPING)
    assert torch.allclose(flat(thin.model), flat(with_targets.model), rtol=1e-9, atol=1e-12)
    assert thin.record[-1].loss is None
    assert thin.record[-1].accuracy is None
    own = (DATA[0], model(DATA[0]).detach())
    kept = hcurv.prune(model, hcurv.losses.HalfSquaredError(), own, 0.6, schedule=3, corrections=4)
    assert kept.record[0].loss == 0.0
    assert 0 < kept.record[-1].loss < kept.record[-1].zeroed_loss
    assert kept.record[-1].accuracy is None
    for options in ({"gradient": True}, {"corrections": 2}):
        with pytest.raises(ValueError, match=r"needs the gradient of the loss: pass data="):
            hcurv.prune(model, LOSS, DATA[0], 0.4, **options)


def test_inputs_by_name_and_a_loss_without_values() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 4)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.layer(first + second)

    class Quartic(hcurv.losses.Loss):
        def hessian_sqrt(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
            return 12**0.5 * outputs.abs()

    inputs = {"first": DATA[0], "second": 0.5 * DATA[0]}
    batches = [({name: part[:25] for name, part in inputs.items()}, DATA[1][:25])]
    batches += [({name: part[25:] for name, part in inputs.items()}, DATA[1][25:])]
    model = seeded(Named).double()
    thin = hcurv.prune(model, LOSS, batches, 0.5, schedule=1, corrections=2)
    assert thin.record[-1].accuracy is not None
    plain = hcurv.prune(network(), Quartic(), DATA, 0.5, schedule=1)
    assert plain.record[-1].loss is None


def test_record_and_table() -> None:
    seen: list[int] = []

    def evaluate(model: nn.Module) -> float:
        seen.append(sum(int((p == 0).sum()) for p in model.parameters()))
        return 7.0

    thin = hcurv.prune(network(), LOSS, DATA, 0.5, schedule=2, evaluate=evaluate)
    assert seen[0] == 0
    assert seen[-1] == 64
    assert [step.evaluation for step in thin.record] == [7.0] * 3
    header, *rows = str(thin).splitlines()
    assert header.split("  ")[0].strip() == "sparsity"
    assert "evaluation" in header
    assert len(rows) == 3
    assert len({len(row) for row in (header, *rows)}) == 1
    assert thin.layer_sparsity.keys() == thin.masks.keys()
    bare = hcurv.prune(network(), LOSS, DATA[0], 0.5, schedule=1)
    assert "loss" not in str(bare)
    with pytest.raises(ValueError, match="nothing was measured"):
        bare.draw(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sparsity": 1.0}, ValueError, r"sparsity must be at least 0 and less than 1; got 1.0"),
        ({"sparsity": -0.1}, ValueError, "sparsity must be at least 0"),
        ({"sparsity": "half"}, ValueError, "got 'half'"),
        ({"structure": "rows"}, ValueError, r'structure must be "weights", "units"'),
        ({"structure": 3}, TypeError, "structure must be a string"),
        ({"structure": "4:2"}, ValueError, r"keeps N of M inputs, with 0 < N < M; got \'4:2\'"),
        ({"structure": "2:4", "sparsity": 0.6}, ValueError, "has a sparsity of 0.5"),
        ({"structure": "channels"}, ValueError, "there is no trainable Conv1d or Conv2d"),
        ({"scope": "global"}, ValueError, 'scope must be "model" or "layer"'),
        ({"saliency": "random"}, ValueError, "saliency must be one of"),
        ({"schedule": 0}, ValueError, "schedule must be an integer of at least 1"),
        ({"schedule": [0.5, 0.4, 0.5]}, ValueError, r"sparsities that do not fall"),
        ({"schedule": [0.5, 0.6]}, ValueError, r"end with sparsity=0.5; got \[0.5, 0.6\]"),
        ({"schedule": []}, ValueError, "schedule must be a number of steps"),
        ({"stages": 0}, ValueError, "stages must be an integer"),
        ({"corrections": -1}, ValueError, "corrections must be an integer of at least 0"),
        ({"damping": 0.0}, ValueError, "damping must be positive and finite; got 0"),
        ({"num_points": 61}, ValueError, "num_points must be an integer from 1 to 60"),
        ({"bias": True, "structure": "units"}, ValueError, "bias=True is for"),
        ({"leave_out": ["3"]}, KeyError, "no trainable parameter or layer is called '3'"),
        ({"leave_out": ["0", "2"]}, ValueError, "there is nothing to prune"),
        ({"leave_out": ["0"], "structure": "units"}, ValueError, "finds nothing to prune"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    sparsity = options.pop("sparsity", None if ":" in str(options.get("structure")) else 0.5)
    with pytest.raises(error, match=message):
        hcurv.prune(network(), LOSS, DATA, sparsity, **options)
