"""Posteriors in files: safetensors, never pickled, with checksums; written whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hcurv.damping import DampingLike
from hcurv.files import as_path
from hcurv.hierarchical import FileFormatError
from hcurv.hierarchical.matrix.file_checks import check_number, check_types, require
from hcurv.hierarchical.matrix.file_format import read_tensors, write_tensors
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.model.snapshot import ForwardFunction, plain_model
from hcurv.ranks import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hcurv.applications.laplace.posterior import LaplacePosterior

__all__ = ["read_posterior", "write_posterior"]

_FORMAT = "hcurv-laplace"
# What a file says beside its tensors, and the types of it.
_DESCRIPTION: dict[str, Any] = {
    "prior": dict[str, float] | float | None,
    "noise": float,
    "structure": str,
    "tolerance": float,
    "seed": int,
    "likelihood": str,
    "log_likelihood": float,
    "parameters": dict[str, list[int]],
}
# Log-likelihoods of the same data differ by rounding alone, this much at most.
_SAME = 1e-4


def write_posterior(posterior: LaplacePosterior, path: str | PathLike[str]) -> None:
    """See `LaplacePosterior.save`."""
    prior = posterior.prior_precision
    tensors = {"weights": posterior.weights}
    named: dict[str, float] | float | None = None
    if isinstance(prior, Tensor):
        tensors["prior"] = prior.double()
    else:
        named = dict(prior) if not isinstance(prior, float | int) else float(prior)  # type: ignore[arg-type]
        if isinstance(named, dict):
            named = {name: float(value) for name, value in named.items()}
    curvature, fit = posterior._curvature, posterior._fit
    description = {
        "prior": named,
        "noise": posterior._noise,
        "structure": posterior.structure,
        "tolerance": curvature._tolerance,
        "seed": curvature._seed,
        "likelihood": posterior._likelihood.name,
        "log_likelihood": float(fit.log_likelihood(torch.tensor(posterior._noise).double())),
        "parameters": {name: list(shape) for name, shape in posterior.layout.shapes.items()},
    }
    write_tensors(path, _FORMAT, tensors, description)


def read_posterior(
    path: str | PathLike[str],
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    forward_fn: ForwardFunction | None,
    process_group: ProcessGroup | None,
    progress: bool,
) -> LaplacePosterior:
    """See `LaplacePosterior.load`."""
    from hcurv.applications.laplace.approximate import laplace

    ranks = ranks_of(process_group)
    model = plain_model(model)
    with ranks.agreed():
        path = as_path(path)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        _, description, tensors = read_tensors(path, (_FORMAT,))
        _check_description(path, description, tensors)
        _check_weights(path, model, description["parameters"], tensors["weights"])
    prior: DampingLike = description["prior"] if "prior" not in tensors else tensors["prior"]
    noisy = description["likelihood"] == "gaussian"
    posterior = laplace(
        model,
        loss,
        data,
        prior,
        noise=description["noise"] if noisy else None,
        parameters=list(description["parameters"]),
        structure=description["structure"],
        tolerance=description["tolerance"],
        forward_fn=forward_fn,
        seed=description["seed"],
        process_group=process_group,
        progress=progress,
    )
    if posterior._likelihood.name != description["likelihood"]:
        raise ValueError(
            f"{path} belongs to a likelihood of {description['likelihood']}, and this loss to one"
            f" of {posterior._likelihood.name}"
        )
    sigma = torch.tensor(posterior._noise, dtype=torch.float64)
    found = float(posterior._fit.log_likelihood(sigma))
    if not math.isclose(found, description["log_likelihood"], rel_tol=_SAME, abs_tol=_SAME):
        raise ValueError(
            f"{path} belongs to other data or another loss: the log-likelihood there is"
            f" {description['log_likelihood']:.6g}, here {found:.6g}"
        )
    return posterior


def _check_description(
    path: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a file whose description is not one of a posterior."""
    try:
        for name, hint in _DESCRIPTION.items():
            check_types(description[name], hint, name)
        for name, shape in description["parameters"].items():
            for length in shape:
                check_number(length, f"the shape of {name}")
        size = sum(math.prod(shape) for shape in description["parameters"].values())
        for name in {*tensors, "weights"}:
            require(name in ("weights", "prior"), f"nothing is said about its tensor {name}")
            fits = tensors[name].shape == (size,) and tensors[name].is_floating_point()
            require(fits, f"{name} has shape {tuple(tensors[name].shape)}")
        require(0 < description["tolerance"] < 1, f"tolerance is {description['tolerance']}")
        require((description["prior"] is None) == ("prior" in tensors), "it has two priors or none")
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise FileFormatError(f"{path} is damaged: {what}; write it again") from error


def _check_weights(
    path: Path, model: nn.Module, shapes: dict[str, list[int]], weights: Tensor
) -> None:
    """Refuse a model whose weights are not those of the file."""
    named = dict(model.named_parameters())
    for name, shape in shapes.items():
        if name not in named or list(named[name].shape) != shape:
            raise ValueError(
                f"{path} belongs to another model: it has '{name}' of shape {tuple(shape)}"
            )
    flat = torch.cat([named[name].detach().reshape(-1).cpu() for name in shapes])
    if flat.dtype != weights.dtype or not torch.equal(flat, weights):
        raise ValueError(
            f"{path} belongs to other weights of this model: load those that it was made with, or"
            " call hcurv.laplace again"
        )
