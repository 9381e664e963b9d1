"""The same seed and the same threads give the same bits, also after other calls.

With another number of threads, sums are added in another order. What differs then, and by how
much, is in docs/accuracy.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hcurv
from faults.calls import Calls, model_and_data

# Relative to the largest entry: about the rounding of double precision times the number of steps.
# Solves at a damping of 1e-2 lose the condition number, some 1e2, on top of it.
ACROSS_THREADS = 1e-9
# Small calls are slow with two threads, so that only these are compared.
SOME = ("GaussNewton", "GaussNewton of batches", "products", "compress", "factorize", "eigsh")


def _more() -> dict[str, Callable[[], Any]]:
    """Operations that are not among the calls of the faults."""
    model, x, y = model_and_data()
    loss = nn.CrossEntropyLoss()
    H = hcurv.GaussNewton(model, loss, (x, y))
    A = hcurv.compress(H, tolerance=1e-2, leaf_size=6, global_rank=0)
    F, G = A.factorize(0.1), H.factorize(1e-2, method="samples")
    b = torch.linspace(-1, 1, H.shape[0], dtype=torch.float64)
    seeded = lambda: torch.Generator().manual_seed(7)  # noqa: E731
    return {
        "entries": lambda: [H[:5, [1, 3]], H.pairs([0, 7], [3, 9]), H.root_columns([0, 4])],
        "sampled targets": lambda: hcurv.GaussNewton(
            model, loss, (x, y), num_samples=3, seed=5
        ).to_dense(),
        "sampled entries": lambda: H.sample_entries(100, seed=3).block(range(5), range(5)),
        "subsample": lambda: [
            H.subsample(7, seed=2).to_dense(),
            H.subsample(7, seed=2, damping=0.1).to_dense(),
        ],
        "iterative": lambda: [
            H.factorize(1e-2, method=method, seed=4).solve(b)
            for method in ("iterations", "kronecker", "subset", "compressed", "compressed-samples")
        ],
        "samples": lambda: [F.sample(3, seeded()), G.sample(3, seeded())],
        "inverses": lambda: [F.logdet(), F.inverse_diagonal(), G.logdet(), G.inverse_diagonal()],
        "accuracy": lambda: [torch.tensor(H.factorize(1e-2).accuracy.solve.value)],
        "vectors": lambda: [A @ b, F.solve(b), A @ b[:, None].expand(-1, 3).contiguous()],
        "neighbours": lambda: hcurv.compress(H, leaf_size=6, method="neighbors", seed=6).to_dense(),
        "near field": lambda: hcurv.compress(H, leaf_size=6, near_budget=0.2, seed=6).to_dense(),
        "refresh": lambda: A.refresh(H).to_dense(),
        "low rank": lambda: hcurv.baselines.LowRank(H, 5, seed=1).to_dense(),
        "ekfac": lambda: hcurv.baselines.KFAC(model, loss, (x, y), ekfac=True, seed=3).to_dense(),
        "lobpcg": lambda: hcurv.eigsh(H, 2, method="lobpcg", seed=2).vectors,
        "cg": lambda: hcurv.cg(H + hcurv.Diagonal(torch.ones_like(b)), b).solution,
        "newton step": lambda: hcurv.gauss_newton_step(model, loss, (x, y), damping=0.1).flat,
        "neighbour search": lambda: hcurv.nearest_neighbors(H, 3, seed=1),
        "self scores": lambda: hcurv.influence(model, loss, (x, y), 0.1).self_scores(),
        "evidence": lambda: [
            hcurv.laplace(model, loss, (x, y)).log_marginal_likelihood(),
            hcurv.laplace(model, loss, (x, y)).predictive_samples(x, 3, seed=1),
        ],
    }


@pytest.fixture(scope="module")
def calls() -> Calls:
    found = Calls()
    found.functions |= _more()
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_same_seed_gives_the_same_bits_in_any_order(calls: Calls) -> None:
    names = sorted(calls.functions)
    first = {name: calls.run(name) for name in names}
    random.Random(5).shuffle(names)
    torch.rand(3)  # the state of torch's own random numbers makes no difference
    for name in names:
        for before, after in zip(first[name], calls.run(name), strict=True):
            assert torch.equal(before, after), name


@pytest.mark.filterwarnings("ignore")
def test_threads_change_rounding_alone(calls: Calls) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = {name: calls.run(name) for name in SOME}
        torch.set_num_threads(2)
        for name, expected in single.items():
            for one, two in zip(expected, calls.run(name), strict=True):
                assert _difference(one, two) < ACROSS_THREADS, name
    finally:
        torch.set_num_threads(before)


def _difference(one: Tensor, two: Tensor) -> float:
    if not one.is_floating_point():
        return float((one != two).any())
    scale = float(one.abs().max())
    return float((one - two).abs().max()) / scale if scale else float(two.abs().max())
