"""Ridge leverage scores against their definition, and subsets that are drawn by them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from cases import Case, assert_close, both_dtypes, labels, normal, seeded
from hcurv.damping import Damping
from hcurv.inversion.leverage import approximate_scores, leverage_scores
from hcurv.inversion.sketch import GrowingSketch, Spectrum
from oracles import gauss_newton

DAMPINGS: dict[str, Any] = {
    "number": 1e-2,
    "tensor": torch.logspace(-3, -1, 39, dtype=torch.float64),
    "names": {"0": 0.1, "2": 0.003},
}
every_damping = pytest.mark.parametrize("kind", DAMPINGS)


@cache
def case(num_points: int = 30) -> Case:
    return Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(reduction="sum"),
        normal(num_points, 5),
        labels(num_points, 3),
    )


@cache
def blocks(num_points: int = 30) -> Tensor:
    """H_i = S_iᵀS_i of every point alone, (n, N, N), by `torch.func`."""
    whole = case(num_points)
    model = whole.build()
    return torch.stack(
        [
            gauss_newton(
                model,
                lambda outputs, i=i: whole.loss(outputs, whole.targets[i : i + 1]),
                whole.inputs[i : i + 1],
            )
            for i in range(num_points)
        ]
    )


def true_scores(damping: Tensor) -> Tensor:
    """tr(S_i (H + D)⁻¹ S_iᵀ) of all points."""
    inverse = torch.linalg.inv(blocks().sum(0) + damping.diag())
    return (blocks() * inverse).sum((1, 2))


def expanded(kind: str) -> Tensor:
    given = DAMPINGS[kind]
    if isinstance(given, dict):
        return case().operator().layout.expand(given).double()
    return torch.as_tensor(given, dtype=torch.float64).expand(39)


@every_damping
@both_dtypes
def test_scores_equal_their_definition_and_add_up_to_the_effective_dimension(
    kind: str, dtype: torch.dtype
) -> None:
    matrix = case().operator(dtype)
    values = expanded(kind)
    found = leverage_scores(matrix, matrix.factorize(DAMPINGS[kind], method="parameters"), None)
    condition = float(torch.linalg.cond(blocks().sum(0) + values.diag()))
    slack = 100 * condition**0.5 * torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    assert_close(found, true_scores(values), slack)
    dense = blocks().sum(0)
    dimension = torch.linalg.solve(dense + values.diag(), dense).trace()
    assert_close(found.sum(), dimension, slack)


def test_sampled_scores_are_right_on_average() -> None:
    matrix = case().operator()
    factorized = matrix.factorize(1e-2, method="parameters")
    found = torch.stack([leverage_scores(matrix, factorized, 8, seed) for seed in range(200)])
    error = found.std(0) / len(found) ** 0.5
    expected = true_scores(expanded("number"))
    # 30 standard scores of one distribution: beyond 4.5 is a bias.
    assert float(((found.mean(0) - expected) / error).abs().max()) < 4.5


def test_approximate_scores_are_near_the_true_ones() -> None:
    matrix = case().operator()
    damping = Damping(torch.tensor(1e-2, dtype=torch.float64))
    found = torch.stack([approximate_scores(matrix, damping, seed) for seed in range(20)]).mean(0)
    expected = true_scores(expanded("number"))
    ratios = found / expected
    assert float(ratios.min()) > 1 / 3
    assert float(ratios.max()) < 3


@every_damping
def test_subsets_are_right_on_average(kind: str) -> None:
    matrix = case().operator()
    draws = torch.stack(
        [matrix.subsample(10, seed, damping=DAMPINGS[kind]).to_dense() for seed in range(100)]
    )
    expected = blocks().sum(0)
    error = draws.std(0) / len(draws) ** 0.5 + 1e-12 * expected.abs().max()
    # The largest of 780 standard scores is below 5 unless there is a bias.
    assert float(((draws.mean(0) - expected) / error).abs().max()) < 5


def test_subsets_are_reproducible_and_weigh_their_points() -> None:
    matrix = case().operator()
    first, again, other = (matrix.subsample(10, seed, damping=1e-2) for seed in (3, 3, 4))
    assert torch.equal(first.to_dense(), again.to_dense())
    assert not torch.equal(first.to_dense(), other.to_dense())
    assert first.num_points == len(first.points) <= 10
    weights = first._point_weights
    assert weights is not None
    expected = (weights[:, None, None] * blocks()[first.points]).sum(0)
    assert_close(first.to_dense(), expected, 1e3)


def test_a_rare_point_that_matters_is_kept() -> None:
    """One point alone has a feature, at a thousandth of the size of the others."""
    inputs = normal(200, 4)
    inputs[:, 3] = 0
    inputs[7] = torch.tensor([0.0, 0.0, 0.0, 1e-2])
    model = seeded(lambda: nn.Linear(4, 1, bias=False)).double()
    loss = nn.MSELoss(reduction="sum")
    matrix = hcurv.GaussNewton(model, loss, (inputs, inputs[:, :1]))
    damping = 1e-6  # the point's own share of H is 2e-4

    def kept(given: float | None) -> int:
        draws = (matrix.subsample(20, seed, damping=given).points for seed in range(40))
        return sum(7 in points.tolist() for points in draws)

    assert kept(None) <= 1
    assert kept(damping) >= 36


@pytest.mark.parametrize(
    ("damping", "message"),
    [
        (-1.0, "damping must be positive: leverage scores divide by it; got -1"),
        (0.0, "damping must be positive: leverage scores divide by it; got 0"),
        (float("nan"), "damping must be one finite number"),
        (torch.ones(38), r"have shape \(39,\), a number for each row; got shape \(38,\)"),
        ({"0": 1.0, "3": 1.0}, "3"),
        ({"0": 1.0}, "2"),
        ("large", "damping must be a number"),
    ],
)
def test_bad_dampings_are_refused(damping: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        case().operator().subsample(5, damping=damping)


def wide_network() -> hcurv.GaussNewton:
    model = seeded(lambda: nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4))).double()
    return hcurv.GaussNewton(model, nn.CrossEntropyLoss(), normal(60, 30))


def spectrum_of(matrix: hcurv.GaussNewton, damping: float) -> tuple[Spectrum, Tensor]:
    sketch = GrowingSketch(matrix, Damping(torch.tensor(damping, dtype=torch.float64)))
    sketch.grow(40)
    values = torch.linalg.eigvalsh(matrix.to_dense()).flip(0) / damping
    return sketch.spectrum(float(values.sum()), matrix.num_root_rows), values


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-6])
def test_the_spectrum_of_a_sketch_decreases_and_keeps_the_trace(ratio: float) -> None:
    matrix = wide_network()
    largest = float(torch.linalg.matrix_norm(matrix.to_dense(), 2))
    spectrum, values = spectrum_of(matrix, ratio * largest)
    found = torch.tensor([spectrum.eigenvalue(index) for index in range(spectrum.size)])
    assert bool((found.diff() <= 0).all())
    assert float(found.min()) > 0
    assert abs(spectrum.largest * ratio - 1) < 0.1
    assert abs(float(found.sum()) / float(values.sum()) - 1) < 0.1
    assert spectrum.eigenvalue(10**6) == spectrum.eigenvalue(spectrum.size - 1)
    dimension = float((values.clamp(min=0) / (1 + values.clamp(min=0))).sum())
    assert 0 < spectrum.effective_dimension <= spectrum.size
    assert dimension / 2 < spectrum.effective_dimension < 2 * dimension


def test_a_matrix_of_zeros_has_an_empty_spectrum() -> None:
    spectrum = Spectrum(torch.zeros(0).double(), 0.0, 1)
    assert spectrum.largest == 0
    assert spectrum.eigenvalue(0) == 0
    assert spectrum.effective_dimension == 0


def test_a_sketch_that_grows_in_steps_is_as_good_as_one_made_at_once() -> None:
    """Steps sketch other random columns, but of the same distribution."""
    matrix, damping = wide_network(), Damping(torch.tensor(1e-3, dtype=torch.float64))
    steps, once = GrowingSketch(matrix, damping), GrowingSketch(matrix, damping)
    for width in (8, 20, 20, 40):
        steps.grow(width)
    once.grow(40)
    assert steps.width == once.width == 40
    rhs = normal(matrix.shape[0], 2)
    for sketch in (steps, once):
        stand_in = sketch.stand_in()
        # The product and the inverse of a stand-in belong together.
        back = stand_in.factorized.solve(stand_in.product(rhs))
        assert_close(back, rhs, 1e6)
    first, second = (s.spectrum(1.0, 240).values[:10] for s in (steps, once))
    assert float((first / second - 1).abs().max()) < 0.2
    steps.grow(10**6)
    assert steps.width == steps.max_width == matrix.shape[0] // 16
