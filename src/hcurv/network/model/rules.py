"""How each function that may use a parameter is read: one rule for each kind of node.

A rule gets a `Use` and the flat indices of the entries that the function sees, and returns what
the use contributes; or None, if it does not know this case. Names of nodes and of what they save
are those of torch's autograd. What a rule says is compared with autograd afterwards (`reader`), so
that a version of torch that saves something else leads to the slower way, never to a wrong matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hcurv.network.model.autograd_graph import Use
from hcurv.network.model.contributions import Contribution, DirectUse, LinearUse, LookupUse
from hcurv.network.model.convolutions import convolution
from hcurv.network.model.normalisations import batch_norm, group_norm, layer_norm

__all__ = ["contributions_of"]

# Batched products with more matrices than this are left to the slower way.
_MAX_MATRICES = 64


def contributions_of(use: Use, parameter: Tensor) -> list[Contribution] | None:
    """What a use of a parameter contributes; None if no rule knows it."""
    rule = _RULES.get(use.node.name())
    if rule is None:
        return None
    try:
        if use.node._input_metadata[0].dtype.is_complex:
            return None  # rules are about real numbers
        entries = use.entries(parameter)
        return None if entries is None else rule(use.node, use.slot, entries)
    except (AttributeError, RuntimeError):
        # Another version of torch saves something else, or the shapes are unusual.
        return None


def _times(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient if scale == 1 else scale * gradient


def _matrix_product(
    node: Any, entries: Tensor, other: Tensor | None, is_left: bool, scale: float
) -> list[Contribution] | None:
    """z = x W, or z = W x, for a matrix W of entries and a matrix x of rows or columns."""
    if other is None:
        return None
    scaled = _times(scale)
    if is_left:  # z = W M: the columns of M are the rows
        return [LinearUse(node, entries, other.T[:, :, None], lambda g: scaled(g).T[:, :, None])]
    return [LinearUse(node, entries.T, other[:, :, None], lambda g: scaled(g)[:, :, None])]


def _addmm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """β·self + α·mat1·mat2."""
    if slot == 0:
        rows, width = int(node._saved_mat1_sym_sizes[0]), int(node._saved_mat2_sym_sizes[1])
        if entries.numel() != width or entries.shape[-1] != width:
            return None
        return [DirectUse(node, entries.reshape(-1), rows, _times(float(node._saved_beta)))]
    other = node._saved_mat2 if slot == 1 else node._saved_mat1
    return _matrix_product(node, entries, other, slot == 1, float(node._saved_alpha))


def _mm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self·mat2."""
    other = node._saved_mat2 if slot == 0 else node._saved_self
    return _matrix_product(node, entries, other, slot == 0, 1.0)


def _bmm(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self[h]·mat2[h] for several h, each a product of its own."""
    other = node._saved_mat2 if slot == 0 else node._saved_self
    if other is None or len(entries) > _MAX_MATRICES:
        return None
    found: list[Contribution] = []
    for number, own in enumerate(entries):
        single = other[number]
        if slot == 0:
            found.append(
                LinearUse(node, own, single.T[:, :, None], lambda g, n=number: g[n].T[:, :, None])  # type: ignore[misc]
            )
        else:
            found.append(
                LinearUse(node, own.T, single[:, :, None], lambda g, n=number: g[n][:, :, None])  # type: ignore[misc]
            )
    return found


def _mv(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self·vec, for a vector of entries."""
    if slot != 1 or node._saved_self is None:
        return None
    rows = node._saved_self[:, :, None]
    return [LinearUse(node, entries[None], rows, lambda g: g[:, None, None])]


def _embedding(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """weight[indices]; the row ``padding_idx`` has no derivative."""
    if node._saved_scale_grad_by_freq:
        return None  # what autograd returns is then no derivative
    places, padding = node._saved_indices.reshape(-1), int(node._saved_padding_idx)
    kept = (places != padding)[:, None] if 0 <= padding < len(entries) else None

    def factors(gradient: Tensor) -> Tensor:
        rows = gradient.reshape(len(places), -1)
        return rows if kept is None else rows * kept

    return [LookupUse(node, entries, places, factors)]


def _repeat(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """A vector, repeated: the affine part of instance normalisation."""
    repeats = tuple(int(count) for count in node._saved_repeats)
    if entries.ndim != 1 or len(repeats) != 1:
        return None
    return [DirectUse(node, entries, repeats[0], lambda g: g.view(repeats[0], -1))]


def _broadcast(
    node: Any, entries: Tensor, shape: torch.Size, weigh: Callable[[Tensor], Tensor]
) -> list[Contribution]:
    """An elementwise function: entries are broadcast to the shape of the result.

    The axes before the first one that the entries have are rows; along the others that the entries
    do not have, derivatives are added up.

    Args:
        node: the node.
        entries: flat indices, in the shape in which the function sees them.
        shape: the shape of the result.
        weigh: multiplies a derivative with respect to the result by that of the function.
    """
    own = (1,) * (len(shape) - entries.ndim) + tuple(entries.shape)
    first = next((axis for axis, size in enumerate(own) if size != 1), len(shape))
    rows = shape[:first].numel()
    summed = tuple(1 + axis for axis, size in enumerate(own[first:]) if size == 1)

    def gradients(gradient: Tensor) -> Tensor:
        by_row = weigh(gradient).reshape(rows, *shape[first:])
        return (by_row.sum(summed) if summed else by_row).reshape(rows, -1)

    return [DirectUse(node, entries.reshape(-1), rows, gradients)]


def _result_shape(node: Any) -> torch.Size:
    return torch.Size(node._input_metadata[0].shape)


def _add(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self + α·other."""
    scale = float(node._saved_alpha) if slot == 1 else 1.0
    return _broadcast(node, entries, _result_shape(node), _times(scale))


def _sub(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self − α·other."""
    scale = -float(node._saved_alpha) if slot == 1 else 1.0
    return _broadcast(node, entries, _result_shape(node), _times(scale))


def _mul(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """self·other."""
    other = node._saved_other if slot == 0 else node._saved_self
    if other is None:
        return None
    return _broadcast(node, entries, _result_shape(node), lambda g: g * other)


def _expand(node: Any, slot: int, entries: Tensor) -> list[Contribution] | None:
    """Entries that are repeated without a copy."""
    return _broadcast(node, entries, _result_shape(node), _times(1.0))


_RULES: dict[str, Callable[[Any, int, Tensor], list[Contribution] | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "BmmBackward0": _bmm,
    "MvBackward0": _mv,
    "ConvolutionBackward0": convolution,
    "EmbeddingBackward0": _embedding,
    "NativeLayerNormBackward0": layer_norm,
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
    "RepeatBackward0": _repeat,
    "AddBackward0": _add,
    "SubBackward0": _sub,
    "MulBackward0": _mul,
    "ExpandBackward0": _expand,
}
