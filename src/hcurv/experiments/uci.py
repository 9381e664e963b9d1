"""Small tables of the UCI repository, from text files in ``uci/`` of the data folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hcurv.experiments.datasets import DATA_VARIABLE

__all__ = ["CLASSIFICATION", "REGRESSION", "Split", "split_uci", "uci"]

CLASSIFICATION = ("glass", "vehicle", "waveform", "ionosphere", "satellite")
REGRESSION = ("concrete",)


@dataclass(frozen=True)
class Split:
    """Training and test points, float64 features with mean 0 and variance 1 over the former."""

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    @property
    def num_outputs(self) -> int:
        """The number of classes, or of target values."""
        if self.targets.is_floating_point():
            return self.targets.shape[1]
        return 1 + int(torch.cat([self.targets, self.test_targets]).max())


def uci(name: str, directory: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Read features, (n, d) in double precision, and labels (n,) or values (n, 1).

    Args:
        name: one of `CLASSIFICATION` or `REGRESSION`.
        directory: the folder with ``uci/`` in it; None for that of the variable HCURV_DATA.

    Raises:
        FileNotFoundError: the files are not there; the message says where they were expected.
    """
    if name not in (*CLASSIFICATION, *REGRESSION):
        raise ValueError(f"no data set {name!r}: {', '.join((*CLASSIFICATION, *REGRESSION))}")
    named = directory or os.environ.get(DATA_VARIABLE)
    if not named:
        raise FileNotFoundError(
            f"the UCI data sets are read from DIR/uci: name DIR with --data or {DATA_VARIABLE}"
        )
    folder = Path(named) / "uci"
    ending = "-X.txt" if (folder / f"{name}-X.txt").is_file() else ".data"
    path = folder / f"{name}{ending}"
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    if ending == "-X.txt":
        labels = np.loadtxt(folder / f"{name}-Y.txt").astype(np.int64)
        return torch.from_numpy(np.loadtxt(path)), torch.from_numpy(labels)
    if name in REGRESSION:
        table = torch.from_numpy(np.loadtxt(path))
        return table[:, :-1], table[:, -1:]
    lines = [line.strip().split(",") for line in path.read_text().splitlines() if line.strip()]
    features = np.array([[float(value) for value in line[:-1]] for line in lines])
    return torch.from_numpy(features), torch.tensor([int(line[-1] in ("g", "1")) for line in lines])


def split_uci(
    name: str, directory: str | Path | None = None, seed: int = 0, test_share: float = 0.2
) -> Split:
    """Shuffle a data set, split it, and standardise it by its training points."""
    inputs, targets = uci(name, directory)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    inputs, targets = inputs[order], targets[order]
    num_test = round(test_share * len(inputs))
    train, test = inputs[num_test:], inputs[:num_test]
    mean, deviation = train.mean(0), train.std(0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    answers = targets
    if targets.is_floating_point():
        known = targets[num_test:]
        answers = (targets - known.mean(0)) / known.std(0)
    return Split(
        (train - mean) / deviation,
        answers[num_test:],
        (test - mean) / deviation,
        answers[:num_test],
    )
