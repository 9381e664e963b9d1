"""A small network in files, and the command line run on it within this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import hcurv
from cases import labels, normal, seeded
from hcurv.cli.program import app

LAYERS = "0 (9 to 7)", "2 (7 to 4)"


@dataclass(frozen=True)
class Network:
    """A classifier 9-7-4 with its data, in memory and in the files W.safetensors and X.npz."""

    folder: Path
    model: nn.Sequential
    inputs: Tensor
    targets: Tensor

    @property
    def weights(self) -> Path:
        return self.folder / "W.safetensors"

    @property
    def data(self) -> Path:
        return self.folder / "X.npz"

    @property
    def options(self) -> list[object]:
        """The arguments that name the model and its data."""
        return [self.weights, "--data", self.data, "--activation", "relu", *CROSS_ENTROPY]

    def exact(self) -> hcurv.GaussNewton:
        """Make the exact matrix of this network."""
        data = (self.inputs, self.targets)
        return hcurv.GaussNewton(self.model, nn.CrossEntropyLoss(), data)


CROSS_ENTROPY = ("--loss", "cross-entropy")


def write_network(folder: Path) -> Network:
    """Write the network and its data to files, and return both."""
    model = seeded(lambda: nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)))
    assert isinstance(model, nn.Sequential)
    network = Network(folder, model.eval(), normal(40, 9).float(), labels(40, 4))
    save_file(model.state_dict(), network.weights)
    np.savez(network.data, inputs=network.inputs.numpy(), targets=network.targets.numpy())
    return network


def run(*arguments: object, **options: Any) -> Result:
    """Run a command within this process; options are those of `CliRunner.invoke`."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


def succeed(*arguments: object) -> str:
    """Run a command that must succeed, and return its stdout."""
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def succeed_json(*arguments: object) -> dict[str, Any]:
    """Run a command with --json, and return the one document that it must print."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    document: dict[str, Any] = json.loads(succeed(*arguments, "--json"), parse_constant=refuse)
    return document


def fail(*arguments: object, code: int = 1) -> str:
    """Run a command that must fail with one line on stderr, and return this line."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")
