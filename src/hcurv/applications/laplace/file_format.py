"""Posteriors in files: safetensors, never pickled, with checksums; written whole or not at all."""

from __future__ import annotations

import json
import math
import zlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hcurv.damping import DampingLike
from hcurv.files import check_target, write_atomically
from hcurv.hierarchical import FileFormatError
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.model.snapshot import ForwardFunction

if TYPE_CHECKING:
    from hcurv.applications.laplace.posterior import LaplacePosterior

__all__ = ["read_posterior", "write_posterior"]

_FORMAT, _VERSION = "hcurv-laplace", 1
# Log-likelihoods of the same data differ by rounding alone, this much at most.
_SAME = 1e-4


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files need the package safetensors: pip install 'hcurv[files]'"
        ) from error
    return safetensors.torch


def write_posterior(posterior: LaplacePosterior, path: str | PathLike[str]) -> None:
    """See `LaplacePosterior.save`."""
    library = _safetensors()
    target = check_target(path)
    prior = posterior.prior_precision
    tensors = {"weights": posterior.weights.detach().cpu().contiguous()}
    named: dict[str, float] | float | None = None
    if isinstance(prior, Tensor):
        tensors["prior"] = prior.detach().double().cpu().contiguous()
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
    text = json.dumps(description)
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].numpy().tobytes(), checksum)
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "description": text,
        "checksum": str(checksum),
    }
    write_atomically(target, lambda name: library.save_file(tensors, name, metadata))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a file, checked."""
    library = _safetensors()
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise FileFormatError(f"{path} holds no posterior of hcurv.laplace")
        if metadata.get("version") != str(_VERSION):
            raise FileFormatError(
                f"{path} has version {metadata.get('version')} of the format, this hcurv reads"
                f" {_VERSION}"
            )
        tensors: dict[str, Tensor] = library.load_file(path)
    except SafetensorError as error:
        raise FileFormatError(
            f"{path} is truncated or no safetensors file ({error}); write it again"
        ) from error
    text = metadata.get("description", "")
    checksum = zlib.crc32(text.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].numpy().tobytes(), checksum)
    if str(checksum) != metadata.get("checksum"):
        raise FileFormatError(f"{path} is damaged: checksums do not match; write it again")
    description: dict[str, Any] = json.loads(text)
    return description, tensors


def read_posterior(
    path: str | PathLike[str],
    model: nn.Module,
    loss: nn.Module | Loss,
    data: Data,
    forward_fn: ForwardFunction | None,
    progress: bool,
) -> LaplacePosterior:
    """See `LaplacePosterior.load`."""
    from hcurv.applications.laplace.approximate import laplace

    path = Path(path)
    description, tensors = _read(path)
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
