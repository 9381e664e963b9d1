"""Samples of off-diagonal rows from a sketch: Y = HΩ with random Ω, carried up the tree.

The rows I of a leaf, outside of its own block, are sampled by Y_I − H_II Ω_I. With skeletons S and
interpolation P of all leaves, the rows S of a parent outside of itself are sampled by Y_S − B Ω̂,
where B couples the two children and Ω̂ = PᵀΩ, and so on. The matrix is asked for nothing but
products with Ω, leaf blocks and couplings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from hcurv.hierarchical.building.sampler import LevelRows
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.memory import require_bytes
from hcurv.operators import EntrySource
from hcurv.sources import MatrixProduct

__all__ = ["RandomProducts", "SketchPanel", "SketchSampler", "carry", "random_products"]

# A panel of columns has at most so many floats (256 MB in single precision) and columns. Wide
# panels make efficient products, narrow ones save memory.
_PANEL_FLOATS = 2**26
_MAX_PANEL = 256
# So many columns are held out to estimate the error with: it is then known to about 20 %.
_HELD_OUT = 16


@dataclass
class SketchPanel:
    """Some columns of the sketch on one level, with a last row of zeros.

    Attributes:
        inputs: Ω, or Ω̂ above the leaves.
        outputs: HΩ without what blocks below this level have accounted for.
    """

    inputs: Tensor
    outputs: Tensor


class RandomProducts:
    """Random vectors Ω and their products HΩ, drawn as they are needed.

    Args:
        source: the matrix, with a product.
        share: its kept rows in tree order, and which of them are this rank's.
        seed: seed of the random vectors.
        known: a first panel, as `random_products` gives it.
        held_out: a panel that no sample may be made of; drawn if it is None.
        max_kept: number of floats of products that may be kept for another build of the same
            tree. Their random vectors are drawn again.

    Attributes:
        held_out: as given.
    """

    def __init__(
        self,
        source: EntrySource,
        share: RowShare,
        seed: int,
        known: tuple[Tensor, Tensor] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        max_kept: int = 0,
    ) -> None:
        self.source, self.share = source, share
        self._generator = torch.Generator(source.device).manual_seed(seed)
        self._known = [] if known is None or not known[0].shape[1] else [known]
        # Products, and the state of the generator that gives their random vectors.
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._room = max_kept
        self.held_out = held_out or self._draw(_HELD_OUT)

    def require_memory(self, num_columns: int) -> None:
        """Raise unless there is memory for so many more columns."""
        floats = (3 if self._room else 2) * self.share.num_own * num_columns
        with self.share.ranks.agreed():
            require_bytes(
                floats * self.source.dtype.itemsize,
                self.source.device,
                f"{num_columns} more columns of a sketch",
                ("choose a smaller max_rank or a larger tolerance", "use float32"),
            )

    def panel(self, number: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """A panel by its number; if it is new, it gets ``num_columns`` columns.

        The caller may change the products.
        """
        if number < len(self._known):
            inputs, outputs = self._known[number]
            return inputs, outputs.clone()
        place = number - len(self._known)
        if place < len(self._kept):
            state, outputs = self._kept[place]
            again = torch.Generator(self.source.device)
            again.set_state(state)
            return self.share.normal(outputs.shape[1], again, self.source), outputs.clone()
        state = self._generator.get_state()
        inputs, outputs = self._draw(num_columns)
        if place == len(self._kept):
            # All ranks decide the same.
            floats = self.share.num_rows * outputs.shape[1] // self.share.ranks.size
            if floats <= self._room:
                self._kept.append((state, outputs.clone()))
                self._room -= floats
            else:
                self._room = 0
        return inputs, outputs

    def _draw(self, num_columns: int) -> tuple[Tensor, Tensor]:
        return random_products(self.source, self.share, num_columns, self._generator)

    def state(self) -> dict[str, Tensor]:
        """What is needed to draw the same panels from now on."""
        state = self._generator.get_state().long()  # files hold no bytes
        found = {"generator": state, "room": torch.tensor([self._room])}
        for number, (before, outputs) in enumerate(self._kept):
            found[f"kept.{number}.generator"] = before.long()
            found[f"kept.{number}.outputs"] = outputs
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has given."""
        self._generator.set_state(state["generator"].cpu().to(torch.uint8))
        self._room = int(state["room"])
        self._kept = []
        while f"kept.{(number := len(self._kept))}.generator" in state:
            before = state[f"kept.{number}.generator"].cpu().to(torch.uint8)
            self._kept.append((before, state[f"kept.{number}.outputs"]))


class SketchSampler:
    """Samples from products with random vectors.

    Args:
        products: where they come from.
    """

    def __init__(self, products: RandomProducts) -> None:
        self._products = products
        self._source, self._numbers = products.source, products.share.own_rows
        self._panels: list[SketchPanel] = []
        self._dense: tuple[LeafBlocks | Coupling, ...] = ()
        # What brings a panel from the leaves to the current level.
        self._steps: list[Callable[[SketchPanel], SketchPanel]] = []
        self._rows: LevelRows | None = None
        self._squares = 0.0  # ‖HΩ‖_F²
        self._num_squares = 0  # number of columns of this Ω

    @property
    def num_columns(self) -> int:
        """Number of columns of the sketch."""
        return sum(panel.inputs.shape[1] for panel in self._panels)

    is_random = True

    def num_random(self, num_rows: int) -> int:
        """As many as there are columns."""
        return self.num_columns

    @property
    def gain(self) -> float:
        """Norm of a sample over the norm of what it is a sample of."""
        return float(self.num_columns**0.5)

    @property
    def norm(self) -> float:
        """Estimate of ‖H‖_F."""
        return float((self._squares / max(1, self._num_squares)) ** 0.5)

    def begin(self, dense: tuple[LeafBlocks | Coupling, ...], rows: LevelRows) -> None:
        """Start with the leaves; the dense blocks are taken off all products."""
        self._dense, self._rows = dense, rows

    def grow(self, num_columns: int) -> None:
        """Draw columns until there are ``num_columns``, and carry them to the current level."""
        self._products.require_memory(num_columns - self.num_columns)
        share = self._products.share
        width = max(16, min(_MAX_PANEL, _PANEL_FLOATS // (share.num_rows + 1)))
        while self.num_columns < num_columns:
            missing = min(width, num_columns - self.num_columns)
            panel = SketchPanel(*self._products.panel(len(self._panels), missing))
            self._squares += share.squared_norm(panel.outputs)
            self._num_squares += panel.inputs.shape[1]
            for blocks in self._dense:
                blocks.add_product(panel.inputs, panel.outputs, -1.0)
            for step in self._steps:
                panel = step(panel)
            self._panels.append(panel)

    def forked(self) -> SketchSampler:
        """A sampler with the same columns that goes on by itself, while this one stays."""
        other = copy(self)
        other._panels, other._steps = list(self._panels), list(self._steps)
        return other

    def samples(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Samples of the rows of nodes, by their places on the current level, (B, m, s)."""
        result = torch.empty(
            *table.shape,
            self.num_columns,
            dtype=self._products.source.dtype,
            device=table.device,
        )
        start = 0
        for panel in self._panels:
            stop = start + panel.outputs.shape[1]
            part = panel.outputs.index_select(0, table.reshape(-1))
            result[:, :, start:stop] = part.view(*table.shape, part.shape[1])
            start = stop
        return result

    def entries(self, places: Tensor) -> tuple[EntrySource, Tensor]:
        """The source, and the matrix rows at some places of the current level."""
        assert self._rows is not None
        return self._source, self._numbers[self._rows.positions[places]]

    def ascend(self, level: Level, places: Tensor, rows: LevelRows) -> None:
        """Carry the sketch to the next level."""
        self._go(lambda panel: carry(panel, level), rows)

    def join(self, source: EntrySource, rows: LevelRows, counts: Sequence[int]) -> None:
        """Give all rows of the current level to every rank.

        Args:
            source: the matrix, whose calls are collective from now on.
            rows: all rows of the level, by positions among all rows of the tree.
            counts: number of rows of each rank.
        """
        share = self._products.share

        def gathered(values: Tensor) -> Tensor:
            found = share.ranks.collect(values[:-1], counts)
            return torch.cat([found, found.new_zeros(1, found.shape[1])])

        self._source, self._numbers = source, share.rows
        self._go(lambda panel: SketchPanel(gathered(panel.inputs), gathered(panel.outputs)), rows)

    def _go(self, step: Callable[[SketchPanel], SketchPanel], rows: LevelRows) -> None:
        """Bring all panels, and those to come, to the next rows."""
        self._rows = rows
        self._steps.append(step)
        for place, panel in enumerate(self._panels):
            self._panels[place] = step(panel)

    def skip(self, level: Level) -> None:
        """Go on to the next level, before there are any panels."""
        self._steps.append(lambda panel: carry(panel, level))

    def state(self, is_used: bool) -> dict[str, Tensor]:
        """What is needed to go on from the current level.

        Args:
            is_used: whether samples are still taken from the panels.
        """
        found = self._products.state()
        found["squares"] = torch.tensor([self._squares, self._num_squares], dtype=torch.float64)
        for number, panel in enumerate(self._panels):
            values = (panel.inputs, panel.outputs)
            for name, tensor in zip(("inputs", "outputs"), values, strict=True):
                found[f"panel.{number}.{name}"] = tensor if is_used else tensor[:0]
        return found

    def restore(self, state: Mapping[str, Tensor], rows: LevelRows) -> None:
        """Go on from what `state` has given; ``rows`` are those of the current level."""
        self._products.restore(state)
        self._rows = rows
        squares, number = state["squares"].tolist()
        self._squares, self._num_squares = squares, int(number)
        self._panels = []
        while f"panel.{len(self._panels)}.inputs" in state:
            name = f"panel.{len(self._panels)}"
            self._panels.append(SketchPanel(state[f"{name}.inputs"], state[f"{name}.outputs"]))

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Random vectors that no sample was made of, (N, k), and their products."""
        size, share = self._products.source.shape[0], self._products.share
        inputs, outputs = (
            torch.zeros(size, t.shape[1], dtype=t.dtype, device=t.device).index_copy_(
                0, share.rows, share.whole(t[:-1])
            )
            for t in self._products.held_out
        )
        return inputs, outputs


def random_products(
    source: EntrySource | MatrixProduct,
    share: RowShare,
    num_columns: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Gaussian vectors Ω and their products HΩ.

    Args:
        source: H, with a product.
        share: the rows where Ω is not zero.
        num_columns: number k of columns.
        generator: where the random numbers come from.

    Returns:
        Ω and HΩ on the own ones of these rows, with a last row of zeros: (m + 1, k) each.
    """
    inputs = share.normal(num_columns, generator, source)
    outputs = torch.zeros_like(inputs)
    outputs[:-1] = share.product(source, inputs[:-1])
    if not math.isfinite(share.squared_norm(outputs)):
        raise ValueError("a product with the source has entries that are NaN or infinite")
    return inputs, outputs


def carry(panel: SketchPanel, level: Level) -> SketchPanel:
    """A panel on the next level: Ω̂ = PᵀΩ, and the products of the skeleton rows without BΩ̂."""
    inputs = level.gather(panel.inputs)
    outputs = torch.zeros_like(inputs)
    for basis in level.bases:
        index = basis.skeleton.reshape(-1)
        outputs.index_copy_(0, basis.target.reshape(-1), panel.outputs.index_select(0, index))
    level.add_couplings(inputs, outputs, -1.0)
    return SketchPanel(inputs, outputs)
