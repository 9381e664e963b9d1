"""What is pruned: single weights, units, channels, or all but N of every M inputs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from hcurv.layout import ParameterLayout

__all__ = [
    "UNIT_KINDS",
    "Groups",
    "Patterns",
    "Scope",
    "Structure",
    "make_structure",
    "parse_pattern",
]

Scope: TypeAlias = Literal["model", "layer"]

UNIT_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "units": (nn.Linear,),
    "channels": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "units+channels": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
}
_KNOWN = '"weights", "units", "channels", "units+channels" or a pattern such as "2:4"'


class Structure(ABC):
    """Which weights may become zero, and which of them together.

    Attributes:
        prunable: which weights may become zero, (N,), boolean.
    """

    prunable: Tensor

    @abstractmethod
    def select(self, scores: Tensor, active: Tensor, sparsity: float) -> Tensor:
        """Choose the weights that stay: those with the largest scores.

        Args:
            scores: what it costs to remove each of the weights, (N,).
            active: which weights have not been removed before, (N,), boolean.
            sparsity: the share to reach.

        Returns:
            The weights that stay, (N,), boolean; a part of ``active``.
        """

    @abstractmethod
    def schedule(self, sparsity: float, num_steps: int) -> list[float]:
        """The sparsities of a number of steps; the last one is ``sparsity``."""

    @abstractmethod
    def sparsity(self, active: Tensor) -> float:
        """The share that has been removed."""


class Groups(Structure):
    """Groups of weights that become zero together: single weights, units or channels.

    The sparsity is the share of groups that are zero.

    Args:
        members: flat indices of the weights that may become zero, (m,).
        group: the number of the group of each of them, (m,).
        layer: the number of the layer of each group, (groups,).
        size: N.
        scope: whether sparsity is reached over the whole model or in every layer.
        keeps_layers: whether at least one group of every layer stays.
    """

    def __init__(
        self,
        members: Tensor,
        group: Tensor,
        layer: Tensor,
        size: int,
        scope: Scope,
        keeps_layers: bool,
    ) -> None:
        self._members, self._group, self._layer = members, group, layer
        self._scope, self._keeps_layers = scope, keeps_layers
        self.prunable = torch.zeros(size, dtype=torch.bool, device=members.device)
        self.prunable[members] = True

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self._layer.numel()

    @property
    def is_single(self) -> bool:
        """Whether every group is one weight."""
        return self.num_groups == self._members.numel()

    def groups(self) -> list[Tensor]:
        """The flat indices of each group."""
        order = self._group.argsort(stable=True)
        counts = torch.bincount(self._group, minlength=self.num_groups).tolist()
        return list(self._members[order].split(counts))

    def select(self, scores: Tensor, active: Tensor, sparsity: float) -> Tensor:
        """See `Structure.select`. The score of a group is the sum over its weights."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=scores.device)
        totals.index_add_(0, self._group, scores[self._members].double())
        return self.select_groups(totals, active, sparsity)

    def select_groups(self, totals: Tensor, active: Tensor, sparsity: float) -> Tensor:
        """Choose groups by their scores, (groups,)."""
        alive = torch.zeros(self.num_groups, dtype=torch.bool, device=active.device)
        alive[self._group[active[self._members]]] = True
        totals = torch.where(alive, totals, -torch.inf)
        layers = self._layer.unique()
        if self._keeps_layers:
            for layer in layers:
                inside = (self._layer == layer).nonzero().squeeze(1)
                totals[inside[totals[inside].argmax()]] = torch.inf
        parts = [torch.arange(self.num_groups, device=active.device)]
        if self._scope == "layer":
            parts = [(self._layer == layer).nonzero().squeeze(1) for layer in layers]
        stays = torch.zeros(self.num_groups, dtype=torch.bool, device=active.device)
        for part in parts:
            num_kept = part.numel() - round(sparsity * part.numel())
            stays[part[totals[part].topk(num_kept).indices]] = True
        result = active.clone()
        result[self._members] = stays[self._group] & active[self._members]
        return result

    def check(self, sparsity: float) -> None:
        """Raise a ValueError if a layer would lose all of its units."""
        if not self._keeps_layers:
            return
        heights = torch.bincount(self._layer)
        parts = heights.tolist() if self._scope == "layer" else [self.num_groups]
        least = 1 if self._scope == "layer" else len(heights)
        for part in parts:
            if part - round(sparsity * part) < least:
                raise ValueError(
                    f"a sparsity of {sparsity} leaves {part - round(sparsity * part)} of {part}"
                    f" units or channels, and {least} must stay, one in each layer: choose a"
                    " smaller one"
                )

    def schedule(self, sparsity: float, num_steps: int) -> list[float]:
        """The share that is kept falls by the same factor in every step."""
        kept = 1 - sparsity
        return [1 - kept ** (step / num_steps) for step in range(1, num_steps)] + [sparsity]

    def sparsity(self, active: Tensor) -> float:
        """The share of groups that are zero."""
        alive = int(self._group[active[self._members]].unique().numel())
        return 1 - alive / self.num_groups


class Patterns(Structure):
    """N of every M inputs of a row stay.

    Args:
        rows: flat indices of the inputs that belong together, (patterns, M), with −1 where the
            inputs of a row are no multiple of M.
        num_kept: N.
        size: the number of all weights.
    """

    def __init__(self, rows: Tensor, num_kept: int, size: int) -> None:
        self._rows, self._num_kept = rows, num_kept
        self.prunable = torch.zeros(size, dtype=torch.bool, device=rows.device)
        self.prunable[rows[rows >= 0]] = True

    def select(self, scores: Tensor, active: Tensor, sparsity: float) -> Tensor:
        """See `Structure.select`."""
        rows, width = self._rows, self._rows.shape[1]
        num_kept = max(self._num_kept, round(width * (1 - sparsity)))
        possible = (rows >= 0) & active[rows.clamp(min=0)]
        values = torch.where(possible, scores[rows.clamp(min=0)].double(), -torch.inf)
        stays = torch.zeros_like(possible).scatter_(1, values.topk(num_kept).indices, True)
        result = active & ~self.prunable
        result[rows[stays & possible]] = True
        return result

    def schedule(self, sparsity: float, num_steps: int) -> list[float]:
        """From M inputs down to N, one or more at a time."""
        width, least = self._rows.shape[1], self._num_kept
        lost = [-(-(width - least) * step // num_steps) for step in range(1, num_steps + 1)]
        return [count / width for count in dict.fromkeys(lost)]

    def sparsity(self, active: Tensor) -> float:
        """The share of prunable weights that are zero."""
        return 1 - float(active[self.prunable].double().mean())


def parse_pattern(structure: str) -> tuple[int, int] | None:
    """N and M of a pattern "N:M"; None if it is none.

    Raises:
        ValueError: not 0 < N < M.
    """
    found = re.fullmatch(r"(\d+):(\d+)", structure)
    if found is None:
        return None
    least, width = int(found[1]), int(found[2])
    if not 0 < least < width:
        raise ValueError(f'a pattern "N:M" keeps N of M inputs, with 0 < N < M; got {structure!r}')
    return least, width


def make_structure(
    structure: str,
    model: nn.Module,
    layout: ParameterLayout,
    device: torch.device,
    *,
    scope: Scope,
    bias: bool,
    leave_out: Sequence[str],
    output_layer: str | None,
) -> Structure:
    """Find the weights that may become zero.

    Args:
        structure: "weights", "units", "channels", "units+channels" or "N:M".
        model: the model.
        layout: names and places of its trainable parameters.
        device: where indices are needed.
        scope: see `Groups`.
        bias: whether vectors, such as biases, may become zero, for "weights".
        leave_out: names of parameters or layers, or patterns of them, that stay.
        output_layer: the module whose units are the outputs of the model, and stay.

    Raises:
        ValueError: nothing is left to prune, or the structure does not fit the model.
        KeyError: a name in ``leave_out`` does not exist.
    """
    left_out = {name for pattern in leave_out for name in layout.matching(pattern)}
    if structure in UNIT_KINDS:
        found: Structure = _units(structure, model, layout, device, scope, left_out, output_layer)
    else:
        names = [
            name
            for name, shape in layout.shapes.items()
            if name not in left_out and shape.numel() and (len(shape) > 1 or bias)
        ]
        if not names:
            raise ValueError("all parameters are frozen or left out: there is nothing to prune")
        pattern = parse_pattern(structure)
        if pattern is not None:
            found = _patterns(names, layout, device, *pattern)
        elif structure == "weights":
            found = _single(names, layout, device, scope)
        else:
            raise ValueError(f"structure must be {_KNOWN}; got {structure!r}")
    return found


def _single(
    names: list[str], layout: ParameterLayout, device: torch.device, scope: Scope
) -> Groups:
    """Every weight is a group of its own."""
    parts = [torch.arange(layout.slices[n].start, layout.slices[n].stop) for n in names]
    layer = [torch.full_like(part, number) for number, part in enumerate(parts)]
    members = torch.cat(parts).to(device)
    group = torch.arange(members.numel(), device=device)
    return Groups(members, group, torch.cat(layer).to(device), layout.size, scope, False)


def _patterns(
    names: list[str], layout: ParameterLayout, device: torch.device, least: int, width: int
) -> Patterns:
    """Inputs are the second axis; each position of a convolution's kernel has its own patterns."""
    tables = []
    for name in names:
        part, shape = layout.slices[name], layout.shapes[name]
        if len(shape) < 2:
            continue
        index = torch.arange(part.start, part.stop).view(shape).movedim(1, -1)
        rows = index.reshape(-1, shape[1])
        padded = nn.functional.pad(rows, (0, -shape[1] % width), value=-1)
        tables.append(padded.reshape(-1, width))
    return Patterns(torch.cat(tables).to(device), least, layout.size)


def _units(
    structure: str,
    model: nn.Module,
    layout: ParameterLayout,
    device: torch.device,
    scope: Scope,
    left_out: set[str],
    output_layer: str | None,
) -> Groups:
    """Rows of the weights of some kinds of modules, with their biases."""
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    members: list[Tensor] = []
    group: list[Tensor] = []
    layer: list[Tensor] = []
    num_groups = 0
    for place, module in model.named_modules():
        weight = f"{place}.weight".lstrip(".")
        if not isinstance(module, UNIT_KINDS[structure]) or place == output_layer:
            continue
        if weight not in layout.shapes or weight in left_out:
            continue
        if len(uses[id(module.weight)]) > 1:
            raise ValueError(
                f"'{weight}' is also used as {', '.join(uses[id(module.weight)][1:])}: its rows are"
                " no units there; name it in leave_out="
            )
        height = layout.shapes[weight][0]
        bias = f"{place}.bias".lstrip(".")
        for name in (weight, bias):
            if name in layout.shapes and name not in left_out:
                part = layout.slices[name]
                index = torch.arange(part.start, part.stop)
                members.append(index)
                width = index.numel() // height
                group.append(num_groups + torch.arange(height).repeat_interleave(width))
        layer.append(torch.full((height,), len(layer)))
        num_groups += height
    if not members:
        kinds = " or ".join(kind.__name__ for kind in UNIT_KINDS[structure])
        raise ValueError(
            f'structure="{structure}" finds nothing to prune: there is no trainable {kinds} that is'
            " neither left out nor the last layer, whose units are the outputs"
        )
    everything, groups, layers = (torch.cat(p).to(device) for p in (members, group, layer))
    return Groups(everything, groups, layers, layout.size, scope, keeps_layers=True)
