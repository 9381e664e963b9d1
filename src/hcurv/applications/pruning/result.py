"""What pruning returns: the model, its masks, and what happened on the way."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Pruning", "PruningStep"]


@dataclass(frozen=True)
class PruningStep:
    """One step of pruning. The first one in a record is the model as it was.

    Attributes:
        sparsity: the share that is zero, of weights or, where these are pruned, of units.
        num_kept: the number of weights that may be pruned and are not zero.
        zeroed_loss: the loss over the data right after weights became zero; None if not known.
        loss: the loss over the data after the corrections; None if not known.
        accuracy: the share of the data whose label is right, if the targets are labels.
        evaluation: what ``evaluate`` returned.
        saliency: how weights were chosen; None for the first entry.
        damping: λ; None for the first entry.
        seconds: the time that the step took, without ``evaluate``.

    Examples:
        >>> thin = hcurv.prune(model, loss, (inputs, targets), sparsity=0.5, schedule=2)
        >>> [round(step.sparsity, 2) for step in thin.record]
        [0.0, 0.29, 0.5]
        >>> thin.record[-1].loss <= thin.record[-1].zeroed_loss
        True
    """

    sparsity: float
    num_kept: int
    zeroed_loss: float | None
    loss: float | None
    accuracy: float | None
    evaluation: float | None
    saliency: str | None
    damping: float | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Pruning:
    """A pruned model. `prune` makes it; ``print`` shows what every step cost.

    Attributes:
        model: a copy of the model with zeros in it, and the other weights corrected.
        masks: for each parameter that could be pruned, by name, which of its entries are kept:
            boolean, in the shape of the parameter.
        record: the model as it was, and every step after that.

    Examples:
        >>> thin = hcurv.prune(model, loss, (inputs, targets), sparsity=0.5)
        >>> list(thin.masks), thin.masks["0.weight"].shape
        (['0.weight', '2.weight'], torch.Size([6, 4]))
        >>> thin.sparsity
        0.5
        >>> bool((thin.model[0].weight[~thin.masks["0.weight"]] == 0).all())
        True
    """

    model: nn.Module
    masks: dict[str, Tensor]
    record: tuple[PruningStep, ...]

    @property
    def sparsity(self) -> float:
        """The share of weights, of those that could be pruned, that are zero."""
        total = sum(mask.numel() for mask in self.masks.values())
        return sum(int((~mask).sum()) for mask in self.masks.values()) / total

    @property
    def layer_sparsity(self) -> dict[str, float]:
        """The share of each parameter's entries that are zero, by name."""
        return {name: float((~mask).double().mean()) for name, mask in self.masks.items()}

    def apply_masks(self, model: nn.Module | None = None) -> nn.Module:
        """Register the masks with `torch.nn.utils.prune`, so that training keeps the zeros.

        Every masked parameter ``weight`` becomes ``weight_orig``, and a forward pass multiplies it
        by ``weight_mask``. `torch.nn.utils.prune.remove` undoes that and leaves the zeros.

        Args:
            model: the model to change, whose parameters have the same names and shapes. It keeps
                its weights. None for a copy of ``self.model``.

        Returns:
            That model.

        Raises:
            ValueError: the model lacks one of the parameters, or it has another shape.

        Examples:
            >>> thin = hcurv.prune(model, loss, (inputs, targets), sparsity=0.5)
            >>> net = thin.apply_masks()
            >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            >>> loss(net(inputs), targets).backward()
            >>> optimizer.step()
            >>> bool((net(inputs) == net(inputs)).all()), int((net[0].weight == 0).sum()) > 0
            (True, True)
        """
        target = copy.deepcopy(self.model) if model is None else model
        found = dict(target.named_parameters())
        for name, mask in self.masks.items():
            if name not in found or found[name].shape != mask.shape:
                given = tuple(found[name].shape) if name in found else "no such parameter"
                raise ValueError(
                    f"the model must have a parameter '{name}' of shape {tuple(mask.shape)};"
                    f" it has {given}"
                )
        # A tied parameter has several names, and each of its modules needs the mask.
        names = {id(found[name]): name for name in self.masks}
        for place, parameter in list(target.named_parameters(remove_duplicate=False)):
            if id(parameter) in names:
                owner, _, attribute = place.rpartition(".")
                mask = self.masks[names[id(parameter)]].to(parameter.device)
                torch_prune.custom_from_mask(target.get_submodule(owner), attribute, mask)
        return target

    def draw(self, axes: Axes, label: str | None = None, **options: Any) -> None:
        """Draw accuracy against sparsity: that of ``evaluate``, else that on the data, else loss.

        Args:
            axes: Matplotlib's axes.
            label: the name of the line in a legend.
            options: more arguments of Matplotlib's ``plot``.

        Examples:
            >>> from matplotlib.figure import Figure
            >>> thin = hcurv.prune(model, loss, (inputs, targets), sparsity=0.5)
            >>> thin.draw(Figure().subplots(), "ours", marker="o")
        """
        for attribute in ("evaluation", "accuracy", "loss"):
            values = [getattr(step, attribute) for step in self.record]
            if all(value is not None for value in values):
                shares = [step.sparsity for step in self.record]
                axes.plot(shares, values, label=label, **{"marker": "o", **options})
                axes.set_xlabel("sparsity")
                axes.set_ylabel(attribute)
                return
        raise ValueError("nothing was measured: pass data with targets, or evaluate= to prune")

    def __str__(self) -> str:
        """A table with one line for each step."""
        columns = {
            "sparsity": [f"{step.sparsity:.4f}" for step in self.record],
            "kept": [str(step.num_kept) for step in self.record],
            "loss, zeroed": [_number(step.zeroed_loss) for step in self.record],
            "loss": [_number(step.loss) for step in self.record],
            "accuracy": [_number(step.accuracy) for step in self.record],
            "evaluation": [_number(step.evaluation) for step in self.record],
            "chosen by": [step.saliency or "" for step in self.record],
            "seconds": [f"{step.seconds:.1f}" for step in self.record],
        }
        shown = {name: cells for name, cells in columns.items() if any(cells)}
        return "\n".join(_lines(shown))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _lines(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A header and the rows below it, each column as wide as its widest cell."""
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    header = "  ".join(name.rjust(widths[name]) for name in columns)
    rows = zip(*columns.values(), strict=True)
    return [header] + [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths.values(), strict=True))
        for row in rows
    ]
