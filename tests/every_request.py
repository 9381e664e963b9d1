"""Everything that can be asked of a GaussNewton, and small problems to ask it of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hcurv
from cases import labels, normal, seeded

__all__ = ["PROBLEMS", "SmallProblem", "ask_everything"]


@dataclass(frozen=True)
class SmallProblem:
    """A model, a loss and data in float64.

    Attributes:
        model: makes the model.
        loss: the loss.
        inputs: the inputs.
        targets: the targets.
        options: options of `hcurv.GaussNewton`.
        is_random: whether results depend on how points are read, because targets are sampled.
    """

    model: Callable[[], nn.Module]
    loss: nn.Module
    inputs: Tensor
    targets: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_random(self) -> bool:
        return "num_samples" in self.options

    def matrix(self, data: Any = None, **more: Any) -> hcurv.GaussNewton:
        """The matrix over all points, or over other data."""
        model = seeded(self.model).double().eval()
        data = (self.inputs, self.targets) if data is None else data
        return hcurv.GaussNewton(model, self.loss, data, **self.options, **more)


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 3), nn.Softplus(), nn.Linear(3, 9), nn.Sigmoid())


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


_LABELS = labels(23, 3)
_WEIGHTED = nn.CrossEntropyLoss(
    weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), ignore_index=1
)

PROBLEMS = {
    "chain": SmallProblem(_classifier, _WEIGHTED, normal(23, 6), _LABELS),
    "autoencoder": SmallProblem(_autoencoder, nn.MSELoss(), normal(13, 9), normal(13, 9, seed=3)),
    "convolution": SmallProblem(_convolution, nn.CrossEntropyLoss(), normal(23, 1, 4, 4), _LABELS),
    "sampled": SmallProblem(
        _convolution, nn.CrossEntropyLoss(), normal(23, 1, 4, 4), _LABELS, {"num_samples": 2}
    ),
    "empirical": SmallProblem(
        _classifier,
        nn.CrossEntropyLoss(reduction="sum"),
        normal(23, 6),
        _LABELS,
        {"fisher": "empirical"},
    ),
}


def ask_everything(H: hcurv.GaussNewton) -> dict[str, Tensor]:
    """All that can be asked of the matrix, by name."""
    size, rows = H.shape[0], H.num_root_rows
    index = torch.arange(size)
    some = torch.tensor([[0, 3, size - 1], [5, 1, 2]])
    kernel, damped = H.kernel(), H.kernel(torch.linspace(0.5, 2.0, size, dtype=torch.float64))
    drawn, spectral = H.subsample(5, seed=1), H.subsample(6, seed=2, damping=1e-2)
    chosen = H.of_points(torch.tensor([4, 0, 11]), torch.tensor([1.0, 2.0, 0.5]))
    vectors, values = normal(size, 4), normal(rows, 3)
    inverse = H.factorize(1e-1)
    iterative = H.factorize(1e-1, 1e-8, method="iterations")
    return {
        "num_points": torch.tensor([H.num_points, rows, size]),
        "loss_scale": torch.tensor(H.loss_scale, dtype=torch.float64),
        "product": H @ vectors,
        "product with one vector": H @ vectors[:, 0],
        "root_product": H.root_product(vectors),
        "root_transposed": H.root_transposed(values),
        "root_columns": H.root_columns(index[::3]),
        "diagonal": H.diagonal(),
        "block": H.block(index[:7], index[3:]),
        "to_dense": H.to_dense(),
        "blocks": H.blocks(some, some.flip(0)),
        "pairs": H.pairs(index, index.flip(0)),
        "partial_product": H.ranks.sum(H.partial_product(vectors)),
        "partial_blocks": H.ranks.sum(H.partial_blocks(some, some.flip(0))),
        "in_precision": H.in_precision(torch.float32).diagonal().double(),
        "trace": torch.tensor(H.trace(), dtype=torch.float64),
        "order": H.orders()["layer-output-input"],
        "gradient": H.gradient(),
        "kernel": kernel.to_dense(),
        "kernel product": damped @ values,
        "kernel diagonal": damped.diagonal(),
        "kernel block": damped.block([0, 7, 2], [5, rows - 1]),
        "kernel blocks": damped.blocks(some % rows, (some + 3) % rows),
        "subsample": drawn.to_dense(),
        "subsampled points": drawn.points,
        "subsampled gradient": drawn.gradient(),
        "subsample with damping": spectral.to_dense(),
        "of_points": chosen.to_dense(),
        "sampled entries": H.sample_entries(50).block(range(4), range(5)),
        "stratified entries": H.sample_entries(50, "stratified").block(range(4), range(5)),
        "solve": inverse.solve(vectors),
        "logdet": inverse.logdet().reshape(1),
        "sample": inverse.sample(2, torch.Generator().manual_seed(0)),
        "inverse_diagonal": inverse.inverse_diagonal(),
        "solve by iterations": iterative.solve(vectors),
        "variances": inverse.quadratic(H.jacobian(_inputs_of(H)), diagonal=True),
    }


def _inputs_of(H: hcurv.GaussNewton) -> Tensor:
    """Inputs that the model can read."""
    first = H._problem.survey.first_inputs
    assert isinstance(first, Tensor)
    return normal(2, *first.shape[1:], seed=7)
