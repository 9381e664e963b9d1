"""Posteriors and influence scores over several ranks are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import hcurv
from cases import labels, normal, seeded
from hcurv.applications import influence_scores
from hcurv.ranks import RanksError, ranks_of
from several_ranks import run_ranks, values_of

INPUTS, LABELS, VALUES = normal(23, 4), labels(23, 3), normal(23, 2, seed=5)
QUERIES = (normal(4, 4, seed=7), labels(4, 3))
# The first point of each rank: uneven shares, and a rank without points.
STARTS = {1: [0, 23], 2: [0, 20, 23], 3: [0, 9, 9, 23]}


def classifier() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), seed=1
    )


def regressor() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())


def own(tensor: Tensor) -> Tensor:
    """The rows of this rank, or all of them in one process."""
    ranks = ranks_of(distributed.group.WORLD)
    start, stop = STARTS[ranks.size][ranks.rank : ranks.rank + 2]
    return tensor[start:stop]


def posterior(**options: Any) -> hcurv.LaplacePosterior:
    return hcurv.laplace(
        classifier(),
        nn.CrossEntropyLoss(),
        (own(INPUTS), own(LABELS)),
        process_group=distributed.group.WORLD,
        **options,
    )


def influence(**options: Any) -> hcurv.Influence:
    return hcurv.influence(
        classifier(),
        nn.CrossEntropyLoss(),
        (own(INPUTS), own(LABELS)),
        **{"damping": 0.1, "check_damping": False, **options},
        process_group=distributed.group.WORLD,
    )


def answers(folder: str) -> dict[str, Tensor]:
    """What posteriors and scores say, by name."""
    group, size = distributed.group.WORLD, ranks_of(distributed.group.WORLD).size
    tuned, last = posterior().tune(), posterior(parameters="last", prior_precision={"2": 2.0})
    diagonal = posterior(structure="diagonal")
    found = tuned.predict(QUERIES[0], covariances=True)
    file = Path(folder) / f"posterior-{size}"
    tuned.save(file)
    data = (own(INPUTS), own(LABELS))
    again = hcurv.LaplacePosterior.load(
        file, classifier(), nn.CrossEntropyLoss(), data, process_group=group
    )
    noisy = hcurv.laplace(
        regressor(), nn.MSELoss(), [(own(INPUTS), own(VALUES))], process_group=group
    )
    infl = influence()
    chosen = influence(damping=None, curvature=posterior()._curvature.matrix)
    scores = infl.scores(QUERIES)
    path = Path(folder) / f"scores-{size}"
    top = infl.top(QUERIES, 3)
    result = {
        "prior": torch.tensor(tuned.prior_precision),
        "evidence": tuned.log_marginal_likelihood(),
        "covariances": found.covariances,
        "probabilities": found.probabilities,
        "samples": tuned.sample(2),
        "predictive samples": tuned.predictive_samples(QUERIES[0], 3),
        "score": torch.tensor(tuned.score(QUERIES).log_likelihood),
        "loaded": again.predict(QUERIES[0]).variances,
        "last layer": last.predict(QUERIES[0]).variances,
        "diagonal": diagonal.predict(QUERIES[0]).variances,
        "noise": torch.tensor(noisy.noise),
        "regression": noisy.predict(QUERIES[0]).target_variances,
        "tuned noise": torch.tensor(noisy.tune().noise),
        "scores": scores,
        "measure": infl.scores(QUERIES[0], measure=lambda outputs, _: outputs[:, 0]),
        "groups": infl.scores(QUERIES, groups=own(LABELS)),
        "file": infl.scores(QUERIES, path=path).clone(),
        "file again": infl.scores(QUERIES, path=path).clone(),
        "top": top.points,
        "top scores": top.scores,
        "self scores": infl.self_scores(),
        "sampled self scores": infl.self_scores(num_samples=20),
        "few left out": infl.leave_out([0, 10, 22], QUERIES),
        "many left out": infl.leave_out(slice(3, None), QUERIES),
        "sensitivity": torch.tensor(list(infl.damping_sensitivity(QUERIES).values())),
        "chosen damping": torch.tensor(chosen.damping),
        "other curvature": chosen.scores(QUERIES),
    }
    return {name: value.detach().double() for name, value in result.items()}


def refusals() -> list[tuple[str, str]]:
    """Errors of calls in which ranks differ, or which are not for ranks."""
    rank = distributed.get_rank()
    post, infl = posterior(), influence()
    local = hcurv.GaussNewton(classifier(), nn.CrossEntropyLoss(), INPUTS[: 5 + rank])
    calls: list[Callable[[], object]] = [
        lambda: posterior(structure="kfac"),
        lambda: posterior(prior_precision=1.0 + rank),
        lambda: post.predict(QUERIES[0] + rank),
        lambda: post.save("/there/is/no/such/folder/posterior"),
        lambda: influence(damping=0.1 + rank),
        lambda: influence(curvature=local),
        lambda: infl.scores((QUERIES[0][rank:], QUERIES[1][rank:])),
        lambda: infl.scores(QUERIES, groups=LABELS),
        lambda: infl.scores(QUERIES, path="/there/is/no/such/folder/scores"),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append(("", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


REFUSALS = [
    ("ValueError", "is made in one process"),
    (RanksError.__name__, "prior_precision is 1.0 on ranks 0, but 2.0 on ranks 1"),
    (RanksError.__name__, "the inputs to predict at is"),
    ("FileNotFoundError", "there/is/no/such"),
    (RanksError.__name__, "damping is 0.1 on ranks 0, but 1.1 on ranks 1"),
    (RanksError.__name__, "the same curvature; those of ranks 1 differ"),
    (RanksError.__name__, "the queries is"),
    ("ValueError", "groups must have one number for each of"),
    ("FileNotFoundError", "there/is/no/such"),
]


def warnings_of_damping() -> int:
    """How often this rank warns, where every dependence on the damping is worth a warning."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(influence_scores, "_LEAST_CORRELATION", 2.0)
        influence(check_damping=True).scores(QUERIES)
    return len(caught)


def on_ranks(folder: str) -> tuple[dict[str, Tensor], int, list[tuple[str, str]]]:
    found = answers(folder)
    return found, warnings_of_damping(), refusals() if distributed.get_world_size() == 2 else []


def test_posteriors_and_scores_are_those_of_one_process(tmp_path):
    expected = answers(str(tmp_path))
    for size in (2, 3):
        values: list[Any] = values_of(run_ranks(size, on_ranks, str(tmp_path)))
        assert [warned for _, warned, _ in values] == [1, 0, 0][:size]
        for found, _, refused in values:
            for name, value in expected.items():
                assert torch.equal(found[name], values[0][0][name]), name
                # Tuning ends once the evidence hardly rises, and rounding decides at which step.
                tolerance = 1e-3 if name in ("prior", "tuned noise") else 1e-6
                error = float((found[name] - value).norm())
                assert error <= tolerance * float(value.norm()), name
            for (kind, text), (wanted, part) in zip(refused, REFUSALS, strict=False):
                assert (kind, part in text) == (wanted, True), (kind, text)
        assert len(values[0][2]) == (len(REFUSALS) if size == 2 else 0)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("make", [posterior, influence])
def test_the_group_of_a_single_process_is_none(make):
    assert make()._ranks.size == 1
