"""``hcurv prune``: remove weights, and correct the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hcurv.cli import options
from hcurv.cli.output import check_out, print_facts, print_json, print_table, shows_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from hcurv.applications.pruning import Pruning, PruningStep

__all__ = ["EXAMPLES", "prune"]

EXAMPLES = (
    "hcurv prune W.safetensors --data X.npz --activation relu --loss cross-entropy --sparsity 0.95"
    " --out thin.safetensors",
    "hcurv prune W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --structure units --sparsity 0.5 --test-data T.npz --picture accuracy.png",
    "hcurv prune W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --structure 2:4 --corrections 4 --out thin.safetensors --masks masks.safetensors",
)


def prune(
    weights: options.Weights = None,
    *,
    data: options.Data,
    loss: options.Loss,
    activation: options.Activation = None,
    output_activation: options.OutputActivation = None,
    model: options.Factory = None,
    dtype: options.Dtype = None,
    data_dir: options.DataFolder = None,
    num_points: options.NumPoints = None,
    test_data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Data to measure the accuracy on, like --data."),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(help="Share of weights, units or channels to remove; 0.95 by default."),
    ] = None,
    structure: Annotated[
        str,
        typer.Option(
            help="What goes together: weights, units, channels, units+channels, or N:M, as in 2:4."
        ),
    ] = "weights",
    scope: Annotated[
        Literal["model", "layer"], typer.Option(help="Where the sparsity is reached.")
    ] = "model",
    bias: Annotated[bool, typer.Option("--bias", help="Remove biases, too.")] = False,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="Parameter or layer to keep whole, or a pattern; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 8,
    saliency: Annotated[
        Literal["auto", "magnitude", "diagonal", "inverse"],
        typer.Option(help="How weights are judged."),
    ] = "auto",
    corrections: Annotated[
        int,
        typer.Option(
            min=0, help="Corrections of the kept weights in a step; from 2 on they train."
        ),
    ] = 1,
    damping: Annotated[
        float | None, typer.Option(help="λ; a fifth of the mean of the diagonal by default.")
    ] = None,
    points_per_step: Annotated[
        int | None, typer.Option(min=1, help="Points that each matrix is made of; all by default.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the weights, a state dict, .safetensors.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Write the masks, 1 where weights stay, .safetensors.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw accuracy against sparsity: .png, .svg or .pdf; .html for a page with all"
            " results."
        ),
    ] = None,
    seed: options.Seed = 0,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Remove most weights of a network, and move the others to make up for it.

    Every step takes the exact Gauss-Newton matrix at the present weights, removes what matters
    least, and corrects the rest by a solve.
    """
    given = options.Given(
        weights,
        model,
        activation,
        output_activation,
        dtype,
        loss,
        data,
        data_dir,
        num_points,
    )
    target = check_out(out, *given.files, suffixes=(".safetensors",))
    masks_target = check_out(masks, *given.files, suffixes=(".safetensors",))
    from hcurv.report.picture import PICTURE_ENDINGS

    picture_target = check_out(picture, *given.files, suffixes=PICTURE_ENDINGS)
    if target is not None and target == masks_target:
        raise typer.BadParameter("--out and --masks must be two files")
    from hcurv.applications.pruning import prune as prune_model
    from hcurv.cli.problem import read_problem

    problem = read_problem(given)
    evaluate = None if test_data is None else _accuracy_on(given, test_data)
    thin = prune_model(
        problem.model,
        problem.loss,
        problem.data,
        sparsity,
        structure=structure,
        scope=scope,
        bias=bias,
        leave_out=leave_out or (),
        schedule=steps,
        saliency=saliency,
        corrections=corrections,
        damping=damping,
        num_points=points_per_step,
        evaluate=evaluate,
        seed=seed,
        progress=shows_progress(progress),
    )
    if target is not None:
        _write(target, thin.model.state_dict())
    if masks_target is not None:
        import torch

        _write(masks_target, {name: mask.to(torch.uint8) for name, mask in thin.masks.items()})
    if picture_target is not None:
        _draw(thin, picture_target)
    document = {
        "sparsity": thin.sparsity,
        "layers": thin.layer_sparsity,
        "file": target,
        "masks": masks_target,
        "picture": picture_target,
    }
    if as_json:
        print_json({**document, "record": thin.record})
        return
    print_table(list(_COLUMNS), [_cells(step) for step in thin.record])
    layers = ", ".join(f"{name} {share:.1%}" for name, share in thin.layer_sparsity.items())
    files = {"file": target, "masks": masks_target, "picture": picture_target}
    written = [(name, str(path)) for name, path in files.items() if path is not None]
    print_facts([("zeros", layers), *written])


_COLUMNS = ("sparsity", "kept", "loss, zeroed", "loss", "accuracy", "test accuracy", "seconds")


def _cells(step: PruningStep) -> list[str]:
    numbers = (step.zeroed_loss, step.loss, step.accuracy, step.evaluation)
    cells = ["–" if number is None else f"{number:.4f}" for number in numbers]
    return [f"{step.sparsity:.4f}", str(step.num_kept), *cells, f"{step.seconds:.1f}"]


def _accuracy_on(given: options.Given, test_data: str) -> Callable[[nn.Module], float]:
    """A function that returns the share of labels of the test data that a model gets right."""
    import torch

    from hcurv.cli.problem import read_problem

    test = read_problem(replace(given, data=test_data, num_points=None)).data
    if not isinstance(test, tuple) or test[1].is_floating_point():
        raise ValueError(f"--test-data {test_data} has no labels, of which accuracy is a share")
    inputs, labels = test

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in inputs.split(1000)])
        return float((outputs.argmax(1) == labels).double().mean())

    return accuracy


def _write(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    from hcurv.files import write_atomically

    # Tied tensors share memory, which the format does not have: each gets a copy.
    contents = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda name: save_file(contents, name))


def _draw(thin: Pruning, path: Path) -> None:
    from matplotlib.figure import Figure

    from hcurv.report.picture import ResultPage, save_picture

    def draw() -> Figure:
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")
        axes = figure.subplots()
        thin.draw(axes)
        axes.grid(color="#e4e4e4")
        return figure

    layers = [(name, f"{share:.1%} zeros") for name, share in thin.layer_sparsity.items()]
    words = ResultPage(
        "A smaller network",
        f"{thin.sparsity:.1%} of the weights were removed, and the others corrected.",
        "How good the network is against the share of its weights that are zero.",
        layers,
        _COLUMNS,
        [_cells(step) for step in thin.record],
    )
    save_picture(path, draw, words)
