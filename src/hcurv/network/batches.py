"""Read data in batches, twice or more: once to measure it, then to use it.

The first pass counts the points and makes all checks, so that memory can be reserved and bad input
refused before work starts. Further passes must see the same data; checksums detect a loader that
reshuffles.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hcurv.arrays import as_tensor, as_tensors
from hcurv.network.model_inputs import Inputs, is_inputs, map_inputs, num_points, tensors_of

__all__ = ["Batches", "Data", "Survey", "check_dense", "convert_targets"]

Batch: TypeAlias = tuple[Inputs, Tensor | None]
Data: TypeAlias = Inputs | tuple[Inputs, Tensor] | Iterable[Inputs | tuple[Inputs, Tensor]]


@dataclass(frozen=True)
class Survey:
    """What the first pass over the data found.

    Attributes:
        num_points: the number n of points.
        first_inputs: the inputs of the first batch.
        first_targets: the targets of the first batch, or None if the data has none.
        targets: the targets of all points, or None if the data has none.
        checksums: a checksum of each batch, in order.
        largest: the largest magnitude of floating-point inputs; 0 if there are none.
    """

    num_points: int
    first_inputs: Inputs
    first_targets: Tensor | None
    targets: Tensor | None
    checksums: tuple[int, ...]
    largest: float


class Batches:
    """A uniform view of inputs, an (inputs, targets) pair, or an iterable of batches of either.

    Inputs are a tensor, or a tuple or a dictionary of tensors, all with one row per point. NumPy
    arrays are converted, those of floats to the type of the network.

    Args:
        data: the data as the user passed it.
        dtype: the type that floating-point inputs must have, and that floating-point targets are
            converted to.
        device: the device that batches are moved to.

    Attributes:
        num_passes: how often the data was read, or begun to be read.

    Raises:
        TypeError: ``data`` is none of these, or can be read only once.
        ValueError: ``data`` is a list of two tensors that may be two batches of inputs as well as
            inputs and targets.
    """

    def __init__(self, data: Data, dtype: torch.dtype, device: torch.device) -> None:
        if isinstance(data, np.ndarray | Mapping | tuple | list):
            data = as_tensors(data, dtype)
        data = _as_pair(data)
        whole = isinstance(data, Tensor | Mapping) or _is_pair(data)
        if not whole and not isinstance(data, Iterable):
            raise TypeError(f"{_EXPECTED}; got {type(data).__name__}")
        if isinstance(data, Iterator):
            raise TypeError(
                "data can be read only once, but two passes or more are needed; got the iterator"
                f" {type(data).__name__} (pass a list of batches or a DataLoader)"
            )
        self._source: Iterable[object] = [data] if whole else data
        self._whole = whole
        self._dtype = dtype
        self._device = device
        self.num_passes = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield inputs and targets batch by batch, checked and moved; skip empty batches."""
        self.num_passes += 1
        for position, item in enumerate(_numbered(self._source)):
            inputs, targets = _split(as_tensors(item, self._dtype), position)
            _check_inputs(inputs, targets, position, self._dtype)
            if num_points(inputs):
                converted = None
                if targets is not None:
                    where = f"targets of batch {position}"
                    converted = convert_targets(targets, self._dtype, self._device, where)
                yield map_inputs(lambda tensor: tensor.detach().to(self._device), inputs), converted

    def survey(self) -> Survey:
        """Read all of the data once, check it, and count it.

        Raises:
            ValueError: the data is empty, the batches do not go together, or an input is not
                finite.
        """
        found = self.survey_any()
        if found is None:
            raise ValueError("data is empty: at least one point is needed")
        return found

    def survey_any(self) -> Survey | None:
        """Read all of the data once, check it, and count it; None if it is empty.

        Raises:
            ValueError: the batches do not go together, or an input is not finite.
        """
        total, first, largest = 0, None, 0.0
        targets: list[Tensor] = []
        checksums: list[int] = []
        for inputs, batch_targets in self:
            if first is None:  # A loader may use the same memory for every batch.
                first = inputs if self._whole else map_inputs(torch.clone, inputs)
            if _point_shapes(inputs) != _point_shapes(first):
                raise ValueError(
                    f"batch {len(checksums)} has points of shape {_listed(inputs)}, the"
                    f" first batch {_listed(first)} (to pass inputs and targets at once,"
                    " use a tuple (inputs, targets))"
                )
            for tensor in tensors_of(inputs):
                extreme = _largest(tensor)
                if not math.isfinite(extreme):
                    raise ValueError(
                        f"inputs of batch {len(checksums)} have NaN or infinite values"
                    )
                largest = max(largest, extreme)
            total += num_points(inputs)
            if batch_targets is not None:
                targets.append(batch_targets.clone())
            checksums.append(self._checksum(inputs, batch_targets))
        if first is None:
            return None
        # Smaller numbers than this are flushed to zero, because their squares vanish.
        if 0 < largest < torch.finfo(self._dtype).tiny ** 0.5:
            raise ValueError(
                f"the largest input is {largest:.0e}, so that the entries of the matrix underflow"
                f" in {self._dtype} (scale the inputs, or convert model and data to float64)"
            )
        if targets and len(targets) != len(checksums):
            raise ValueError("some batches have targets and some do not")
        return Survey(
            num_points=total,
            first_inputs=first,
            first_targets=targets[0] if targets else None,
            targets=torch.cat(targets) if targets else None,
            checksums=tuple(checksums),
            largest=largest,
        )

    def reread(self, survey: Survey) -> Iterator[Batch]:
        """Yield the batches again, and make sure that they are those of the survey.

        Raises:
            ValueError: the data differs from that of the first pass.
        """
        position = 0
        for position, (inputs, targets) in enumerate(self, start=1):
            expected = survey.checksums[position - 1 : position]
            if (self._checksum(inputs, targets),) != expected:
                raise ValueError(_CHANGED)
            yield inputs, targets
        if position == 0 and survey.checksums:
            raise ValueError(
                "the data had no batches when it was read again: it can be read only once (pass a"
                " list of batches or a DataLoader)"
            )
        if position != len(survey.checksums):
            raise ValueError(_CHANGED)

    def _checksum(self, inputs: Inputs, targets: Tensor | None) -> int:
        """A number that changes with the values of a batch."""
        tensors = tensors_of(inputs) if targets is None else [*tensors_of(inputs), targets]
        result = 0
        for tensor in tensors:
            if self._whole:  # It cannot reshuffle, but its owner may change it: look at some of it.
                version = 0 if tensor.is_inference() else tensor._version
                result = zlib.crc32(version.to_bytes(8, "little"), result)
                tensor = tensor.flatten()[:: 1 + tensor.numel() // _LOOKED_AT]
            result = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), result)
        return result


# Entries of data in memory that are compared from pass to pass.
_LOOKED_AT = 2**14

_EXPECTED = (
    "data must be inputs (a tensor, or a dictionary of tensors), a tuple (inputs, targets), or an"
    " iterable of batches of either, such as a DataLoader"
)
_CHANGED = (
    "the data differs between two passes over it; use a DataLoader with shuffle=False and without"
    " random augmentation"
)


def convert_targets(
    targets: Tensor | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
    where: str = "targets",
) -> Tensor:
    """Move targets to a device, and convert them to one floating-point and one integer type.

    Args:
        targets: class labels of any integer type, or numbers of any floating-point type.
        dtype: the floating-point type of the network.
        device: the device of the network.
        where: what to call them in messages.

    Returns:
        int64 for integers, ``dtype`` for floating-point numbers, booleans as they are.

    Raises:
        TypeError: the targets are complex, or not dense.
        ValueError: they are NaN, infinite, or labels beyond 2⁶³.
    """
    if isinstance(targets, np.ndarray):
        targets = as_tensor(targets)
    check_dense(targets, where)
    if targets.is_complex():
        raise TypeError(f"{where} must be real numbers or class labels; got {targets.dtype}")
    targets = targets.detach().to(device)
    if targets.is_floating_point():
        converted = targets.to(dtype)
        if not math.isfinite(_largest(converted)):
            raise ValueError(f"{where} have NaN or infinite values")
        return converted
    if targets.dtype == torch.uint64 and bool((targets.view(torch.int64) < 0).any()):
        raise ValueError(f"{where} have labels of 2^63 and more")
    return targets if targets.dtype == torch.bool else targets.long()


def check_dense(tensor: Tensor, where: str) -> None:
    """Refuse tensors without values, and those that are not stored entry by entry.

    Raises:
        TypeError: the tensor is sparse, nested, quantized or on the meta device.
    """
    if tensor.is_meta:
        raise TypeError(f"{where} are on the device 'meta', which holds no values")
    if tensor.is_nested:
        raise TypeError(f"{where} are a nested tensor: pad the points to one shape")
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        way = "dequantize" if tensor.is_quantized else "to_dense"
        raise TypeError(f"{where} must be a dense tensor; got {kind} (convert it with .{way}())")


def _largest(tensor: Tensor) -> float:
    """The largest magnitude of floating-point numbers; NaN if there is a NaN among them."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    least, most = torch.aminmax(tensor)
    return float(torch.maximum(-least, most))


def _numbered(source: Iterable[object]) -> Iterator[object]:
    """The same items; an error of the iterable itself says at which batch it happened."""
    iterator = iter(source)
    for position in itertools.count():
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11 and later
                error.add_note(f"This happened while batch {position} of the data was read.")
            raise
        yield item


def _as_pair(data: Data) -> Data:
    """A list of inputs and targets, as a DataLoader yields it, as a tuple; else the data itself.

    Raises:
        ValueError: a list of two tensors may be that, or two batches of inputs.
    """
    if not isinstance(data, list) or len(data) != 2:
        return data
    first, second = data
    if not isinstance(second, Tensor) or not isinstance(first, Tensor | Mapping):
        return data
    if isinstance(first, Mapping):
        return first, second
    if first.ndim == 0 or second.ndim == 0 or first.shape[0] != second.shape[0]:
        return data
    if first.shape != second.shape or first.dtype != second.dtype:
        return first, second
    raise ValueError(
        f"a list of two tensors of one shape, {tuple(first.shape)}, may be inputs and targets, or"
        " two batches of inputs: pass a tuple (inputs, targets), or [(inputs,), (more_inputs,)]"
    )


def _is_pair(item: object) -> bool:
    """Whether this is (inputs, targets)."""
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    return is_inputs(item[0]) and isinstance(item[1], Tensor)


def _point_shapes(inputs: Inputs) -> list[torch.Size]:
    return [tensor.shape[1:] for tensor in tensors_of(inputs)]


def _listed(inputs: Inputs) -> str:
    return ", ".join(str(tuple(shape)) for shape in _point_shapes(inputs))


def _split(item: object, position: int) -> Batch:
    """Take one item of the data apart into inputs and targets."""
    inputs, targets = item, None
    if isinstance(item, tuple | list) and 1 <= len(item) <= 2:
        inputs, targets = item[0], item[1] if len(item) == 2 else None
    if is_inputs(inputs) and (targets is None or isinstance(targets, Tensor)):
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        return inputs, targets  # type: ignore[return-value]
    raise TypeError(f"{_EXPECTED}; batch {position} is a {type(item).__name__}")


def _check_inputs(
    inputs: Inputs, targets: Tensor | None, position: int, dtype: torch.dtype
) -> None:
    """Refuse a batch whose inputs have another type or too few axes, or do not fit its targets."""
    for tensor in tensors_of(inputs):
        check_dense(tensor, f"inputs of batch {position}")
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != dtype):
            raise TypeError(
                f"inputs must be {dtype}, like the parameters; batch {position} is {tensor.dtype}"
                f" (convert it with .to({dtype}))"
            )
        if tensor.ndim < 1 or (tensor.ndim < 2 and isinstance(inputs, Tensor)):
            raise ValueError(
                "inputs must have one row per point, (points, features);"
                f" batch {position} has shape {tuple(tensor.shape)}"
            )
        if tensor.shape[0] and not tensor.numel():
            raise ValueError(
                f"inputs of batch {position} have points of shape {tuple(tensor.shape[1:])},"
                " which are empty"
            )
    counts = {tensor.shape[0] for tensor in tensors_of(inputs)}
    if len(counts) > 1:
        raise ValueError(
            f"all inputs of a batch must have one row per point; batch {position} has tensors of"
            f" {', '.join(str(count) for count in sorted(counts))} rows"
        )
    if targets is not None and targets.shape[:1] != (num_points(inputs),):
        raise ValueError(
            f"batch {position} has {num_points(inputs)} inputs but targets of shape"
            f" {tuple(targets.shape)}"
        )
