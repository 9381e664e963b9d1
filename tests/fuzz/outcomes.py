"""How a case may end: right, refused with one of our sentences, or a failure."""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import hcurv

PACKAGE = str(Path(hcurv.__file__).parent)
OURS = (
    TypeError,
    ValueError,
    LookupError,
    RuntimeError,
    FileNotFoundError,
    IsADirectoryError,
    PermissionError,
    hcurv.InsufficientMemoryError,
)


class WrongError(AssertionError):
    """The package returned something that is not right."""


class Refused(Exception):  # noqa: N818
    """The package refused, with a sentence."""


def is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence of ours: raised by a statement of the package itself."""
    if not isinstance(error, OURS) or not str(error).strip():
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(PACKAGE):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    return linecache.getline(frames[-1].filename, last.tb_lineno).strip().startswith("raise ")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn sentences of ours into `Refused`; all other errors pass."""
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect the names of the warnings of the package; refuse warnings of anyone else."""
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield names
    for warning in caught:
        if warning.category.__module__.startswith("hcurv"):
            names.append(warning.category.__name__)


def size_of(tensor: Tensor) -> Tensor:
    """The norm of a tensor; squares of entries of 1e-200 would be zero, so they are scaled."""
    largest = tensor.abs().max() if tensor.numel() else torch.zeros((), dtype=tensor.dtype)
    if not 0 < float(largest) < float("inf"):
        return largest
    return (tensor / largest).norm() * largest


def check_close(
    found: Tensor, expected: Tensor, tolerance: float, what: str, scale: float | None = None
) -> None:
    """Raise unless ‖found − expected‖ ≤ tolerance · scale, where scale is ‖expected‖ or more."""
    if tuple(found.shape) != tuple(expected.shape):
        raise WrongError(f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    found, expected = found.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(found).all()):
        raise WrongError(f"{what}: not finite")
    norm = float(size_of(expected)) if scale is None else scale
    error = float(size_of(found - expected))
    if not error <= tolerance * norm:
        share = error / norm if norm else float("inf")
        raise WrongError(f"{what}: relative error {share:.3g}, allowed {tolerance:.3g}")


class State:
    """What a call must leave as it was: the model and the state of torch."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._before = self._read()

    def _read(self) -> dict[str, object]:
        found: dict[str, object] = {
            "grad mode": torch.is_grad_enabled(),
            "default dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "random numbers": torch.get_rng_state().numpy().tobytes(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self._model is None:
            return found
        for name, module in self._model.named_modules():
            own = {k: v for k, v in vars(module).items() if not isinstance(v, Tensor)}
            found[f"{name} attributes"] = sorted(vars(module))
            found[f"{name} hooks"] = [
                (k, len(v)) for k, v in own.items() if k.endswith("_hooks") and hasattr(v, "keys")
            ]
            found[f"{name} training"] = module.training
        for name, parameter in self._model.named_parameters():
            found[f"{name} flag"] = parameter.requires_grad
            found[f"{name} grad"] = parameter.grad is None
            found[f"{name} identity"] = id(parameter)
            found[f"{name} value"] = parameter.detach().clone()
        for name, buffer in self._model.named_buffers():
            found[f"{name} value"] = buffer.detach().clone()
        return found

    def check(self) -> None:
        """Raise if anything is different now."""
        after = self._read()
        for key in self._before.keys() | after.keys():
            old, new = self._before.get(key), after.get(key)
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                same = torch.equal(old, new) or bool((old.isnan() == new.isnan()).all())
            else:
                same = old == new
            if not same:
                raise WrongError(f"left behind: {key} was {old!r}, is {new!r}"[:300])
