"""Calls of the package that take some milliseconds, each a function of nothing."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hcurv


def model_and_data() -> tuple[nn.Module, Tensor, Tensor]:
    """A small classifier with its data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        return model, torch.randn(20, 3).double(), torch.randint(0, 3, (20,))


def convolutional() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network of convolutions, which is read in another way."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = [nn.Conv1d(1, 2, 2), nn.PReLU(), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 2)]
        model = nn.Sequential(*layers).double().eval()
        return model, torch.randn(8, 1, 3).double(), torch.randint(0, 2, (8,))


class Calls:
    """Models, and calls of the package with them.

    Attributes:
        models: what no call may change.
        functions: calls by name; each returns tensors that must always be the same.
    """

    def __init__(self) -> None:
        model, x, y = model_and_data()
        other, u, v = convolutional()
        loss = nn.CrossEntropyLoss()
        self.models = [model, other]
        H = hcurv.GaussNewton(model, loss, (x, y))
        ones = torch.ones(H.shape[0], dtype=torch.float64)
        tree = hcurv.compress(H, tolerance=1e-2, leaf_size=6, global_rank=0)
        self.functions: dict[str, Callable[[], Any]] = {
            "GaussNewton": lambda: hcurv.GaussNewton(model, loss, (x, y)).to_dense(),
            "GaussNewton of batches": lambda: hcurv.GaussNewton(
                other, loss, [(u[:5], v[:5]), (u[5:], v[5:])]
            ).to_dense(),
            "products": lambda: [H @ ones, H.diagonal(), H.gradient(), H.kernel().to_dense()],
            "jacobian": lambda: H.jacobian(x).to_dense(),
            "compress": lambda: hcurv.compress(H, tolerance=1e-2).to_dense(),
            "compress to trees": lambda: hcurv.compress(
                H, tolerance=1e-2, leaf_size=6, global_rank=0
            ).to_dense(),
            "compress for a damping": lambda: hcurv.compress(
                H, damping=1e-2, leaf_size=6
            ).to_dense(),
            "factorize": lambda: [
                H.factorize(1e-2, method=method).solve(ones)
                for method in ("parameters", "samples", "iterations", "subset")
            ],
            "factorize trees": lambda: tree.factorize(1e-1).solve(ones),
            "laplace": lambda: hcurv.laplace(model, loss, (x, y)).predict(x).variances,
            "laplace, last layer": lambda: (
                hcurv.laplace(model, loss, (x, y), parameters="last").tune().sample(2, seed=1)
            ),
            "influence": lambda: hcurv.influence(
                model, loss, (x, y), 0.1, check_damping=False
            ).scores((x[:4], y[:4])),
            "prune": lambda: flat(hcurv.prune(model, loss, (x, y), 0.5, schedule=2).model),
            "prune units": lambda: flat(
                hcurv.prune(model, loss, (x, y), 0.3, structure="units", schedule=1).model
            ),
            "optim": lambda: _trained(model, loss, x, y),
            "kfac": lambda: hcurv.baselines.KFAC(model, loss, (x, y)).to_dense(),
            "eigsh": lambda: hcurv.eigsh(H, 3).values,
            "save and load": lambda: _saved(tree),
        }

    def run(self, name: str) -> list[Tensor]:
        """The tensors that a call returns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.functions[name]()
        return found if isinstance(found, list) else [found]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _trained(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    own = copy.deepcopy(model)
    optimizer = hcurv.optim.GaussNewton(own, loss)
    for _ in range(2):
        optimizer.step((x, y))
    return flat(own)


def _saved(matrix: hcurv.HMatrix) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "A.safetensors"
        matrix.save(path)
        return hcurv.load(path).to_dense()
