"""Options that several commands share, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

__all__ = [
    "Activation",
    "Data",
    "DataFolder",
    "Dtype",
    "Factory",
    "Given",
    "Json",
    "Loss",
    "NumPoints",
    "OptionalData",
    "OptionalLoss",
    "OutputActivation",
    "Progress",
    "Seed",
    "Weights",
    "examples",
]

ActivationName: TypeAlias = Literal[
    "relu", "softplus", "tanh", "sigmoid", "gelu", "elu", "silu", "leaky-relu", "identity"
]
LossName: TypeAlias = Literal["cross-entropy", "mse", "half-squared-error", "bce-with-logits"]
DtypeName: TypeAlias = Literal["float32", "float64"]

Weights: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="WEIGHTS",
        help="State dict of a chain of Linear layers, .safetensors. With --model any state dict"
        " that fits, or none.",
        show_default=False,
    ),
]
Activation: TypeAlias = Annotated[
    ActivationName | None,
    typer.Option(help="What lies between two layers."),
]
OutputActivation: TypeAlias = Annotated[
    ActivationName | None,
    typer.Option(help="What follows the last layer; nothing by default."),
]
Factory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="Function without arguments that returns the model, for anything but a chain of"
        " Linear layers; searched in the current folder, too.",
    ),
]
Dtype: TypeAlias = Annotated[
    DtypeName | None,
    typer.Option(help="Precision; that of the weights by default."),
]
_LOSS = typer.Option("--loss", help="Its mean over the data.")
Loss: TypeAlias = Annotated[LossName, _LOSS]
OptionalLoss: TypeAlias = Annotated[LossName | None, _LOSS]
_DATA_OPTION = typer.Option(
    "--data",
    metavar="FILE|NAME",
    help="An .npz or .safetensors file with arrays 'inputs' (or 'x', 'X') and, if there are any,"
    " 'targets' (or 'y', 'labels'); an .npy file of inputs; or digits, mnist, fashion-mnist,"
    " cifar10. Points are flattened.",
)
Data: TypeAlias = Annotated[str, _DATA_OPTION]
OptionalData: TypeAlias = Annotated[str | None, _DATA_OPTION]
DataFolder: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Where to search mnist, fashion-mnist and cifar10 first.",
    ),
]
NumPoints: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Use the first points only."),
]
Seed: TypeAlias = Annotated[int, typer.Option(min=0, help="Of everything random.")]
Progress: TypeAlias = Annotated[
    bool | None,
    typer.Option(help="Show progress bars; by default if stderr is a terminal."),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]


@dataclass(frozen=True)
class Given:
    """What a command was told about the model and the data, by the options of the same names."""

    weights: Path | None
    model: str | None
    activation: str | None
    output_activation: str | None
    dtype: str | None
    loss: str
    data: str
    data_dir: Path | None
    num_points: int | None

    @property
    def files(self) -> tuple[Path | str | None, ...]:
        """The files that the command reads, and therefore must not replace."""
        return (self.weights, self.data)


def examples(*lines: str) -> str:
    """Make the last paragraph of a help text, whose lines are not wrapped."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
