"""One comparison for all tests that look at what a comparison has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hcurv
from cases import normal, seeded


@pytest.fixture(scope="package")
def problem() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    model = seeded(lambda: nn.Sequential(nn.Linear(30, 12), nn.ReLU(), nn.Linear(12, 5)))
    return model, nn.CrossEntropyLoss(), normal(100, 30).float()


@pytest.fixture(scope="package")
def comparison(problem: tuple[nn.Module, nn.Module, torch.Tensor]) -> hcurv.Comparison:
    return hcurv.compare(*problem, storage=0.25)
