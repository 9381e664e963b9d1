"""Data that is accepted, and data that is refused before any work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hcurv
from cases import CASES, labels, normal
from hcurv.network.batches import Batches

CASE = CASES["classifier"]


def build(data: object) -> hcurv.GaussNewton:
    return hcurv.GaussNewton(CASE.build(), CASE.loss, data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (normal(0, 7), ValueError, "data is empty"),
        ([], ValueError, "data is empty"),
        ([normal(0, 7)], ValueError, "data is empty"),
        (normal(5, 6), ValueError, r"cannot read points of shape \(6,\)"),
        (normal(5, 7, 1), ValueError, "is an nn.Flatten missing"),
        (normal(7), ValueError, r"one row per point, \(points, features\); batch 0 has shape"),
        (normal(5, 7).float(), TypeError, "must be torch.float64.*batch 0 is torch.float32"),
        (labels(5, 7)[:, None], ValueError, "cannot read points.*got Long and Double"),
        (normal(5, 7) * float("nan"), ValueError, "inputs of batch 0 have NaN or infinite"),
        ([normal(5, 7), normal(4, 7) / 0], ValueError, "inputs of batch 1 have NaN or infinite"),
        ([normal(5, 7), normal(4, 8)], ValueError, r"batch 1 has points of shape \(8,\).*tuple"),
        ((normal(5, 7), labels(4, 3)), ValueError, "batch 0 has 5 inputs but targets of shape"),
        ([normal(5, 7), (normal(5, 7), labels(5, 3))], ValueError, "some batches have targets"),
        ([{"x": 1}], TypeError, "data must be inputs.*batch 0 is a dict"),
        (3, TypeError, "data must be inputs.*got int"),
        (iter([normal(5, 7)]), TypeError, "can be read only once.*list_iterator"),
    ],
)
def test_bad_data_is_refused(data: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(data)


def test_a_loader_that_reshuffles_is_found_out() -> None:
    loader = DataLoader(
        TensorDataset(CASE.inputs, CASE.targets),
        batch_size=4,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
    )
    with pytest.raises(ValueError, match=r"differs between two passes.*shuffle=False"):
        build(loader)


def test_a_source_that_shrinks_or_grows_is_found_out() -> None:
    class Changing:
        def __init__(self, *sizes: int) -> None:
            self.sizes = list(sizes)

        def __iter__(self):
            return iter([CASE.inputs] * self.sizes.pop(0))

    for sizes in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match="differs between two passes"):
            build(Changing(*sizes))


def test_outputs_that_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Linear(7, 3)).double()
    inputs = torch.full((4, 7), 1e300, dtype=torch.float64)
    model[0].weight.data.fill_(1e300)
    with pytest.raises(ValueError, match="outputs are NaN or infinite at points 0 to"):
        hcurv.GaussNewton(model, nn.MSELoss(), inputs)


def test_single_element_batches_are_inputs() -> None:
    batches = Batches([[CASE.inputs]], torch.float64, torch.device("cpu"))
    ((inputs, targets),) = list(batches)
    assert torch.equal(inputs, CASE.inputs)
    assert targets is None


def test_derivatives_that_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2, False), nn.Linear(2, 2, False), nn.Linear(2, 2, False))
    for layer in model:
        layer.weight.data.fill_(1e30)
    with pytest.raises(ValueError, match="derivatives overflow at points 0 to 2"):
        hcurv.GaussNewton(model, nn.MSELoss(), torch.zeros(3, 2))
