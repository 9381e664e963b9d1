"""The choice of `compress` beside a grid of all choices, on the small reference networks.

Takes an hour and the real data: `make test-plans DATA=folder`.
"""

from __future__ import annotations

import os

import pytest

import hcurv
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, train

pytestmark = pytest.mark.slow

NETWORKS = ("AE (a)", "AE (b)", "AE (c)", "classifier (a)", "classifier (b)")
TOLERANCES = (5e-2, 5e-3)
RANKS = (0, 16, 32, 64, 128, 256, 384, 512, 768)
LEAVES = (32, 64, 128, 256, 512)


@pytest.mark.parametrize("tolerance", TOLERANCES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore::hcurv.CompressionWarning")
def test_at_most_15_percent_more_than_the_best(name: str, tolerance: float) -> None:
    if not os.environ.get("HCURV_DATA"):
        pytest.skip("needs the real data: set HCURV_DATA to a folder with mnist/ and cifar10/")
    trained = train(REFERENCE_NETWORKS[name])
    matrix = hcurv.GaussNewton(trained.model, trained.loss, trained.inputs[:1000].clone())
    chosen = hcurv.compress(matrix, tolerance=tolerance)
    error = chosen.relative_error(matrix)
    assert error < 1.1 * tolerance
    best = chosen.num_stored
    for global_rank in RANKS:
        if global_rank * matrix.shape[0] > best:
            break
        for leaf_size in LEAVES:
            # At an equal error: what is less accurate than the choice does not count.
            other = hcurv.compress(
                matrix,
                tolerance=max(error, 0.8 * tolerance),
                leaf_size=leaf_size,
                global_rank=global_rank,
            )
            if other.relative_error(matrix) <= error:
                best = min(best, other.num_stored)
    assert chosen.num_stored <= 1.15 * best
