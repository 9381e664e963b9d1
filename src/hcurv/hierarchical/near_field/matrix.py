"""NearFieldMatrix: an HMatrix with exact blocks between near leaves (S ≠ 0 in Eq. 1.3).

On every level, pairs of nodes that are far from each other are coupled through their bases, whether
they are siblings or not. Such a matrix is good for products. Before it can be factorized, it is
compressed once more, to HSS form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from hcurv.damping import DampingLike
from hcurv.hierarchical.building.build import BuiltBlocks
from hcurv.hierarchical.building.construct import BuildSettings, HSSStructure, construct
from hcurv.hierarchical.building.phases import Phases
from hcurv.hierarchical.building.sketch import RandomProducts
from hcurv.hierarchical.matrix import elements, storage
from hcurv.hierarchical.matrix.file_checks import check_couplings
from hcurv.hierarchical.matrix.hmatrix import BuildRecord, HMatrix, completed
from hcurv.hierarchical.near_field.interactions import Interactions, near_leaves
from hcurv.hierarchical.parts.global_part import GlobalPart
from hcurv.hierarchical.parts.levels import Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.hierarchical.planning.planner import prepare
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.hierarchical.tree.cluster_tree import ClusterTree, Distance
from hcurv.operators import EntrySource
from hcurv.user_warnings import warn_user

__all__ = [
    "NEAR_FIELD",
    "NearFieldMatrix",
    "NearFieldStructure",
    "NearFieldWarning",
    "make_near_field",
]

NEAR_FIELD = "hcurv.NearFieldMatrix"  # the name of the file format
_PROBES = 16  # random vectors that compare the norms of two matrices


class NearFieldWarning(UserWarning):
    """A factorization is not one of the matrix itself, because that has a near field.

    Examples:
        >>> import warnings
        >>> near = hcurv.compress(H, near_budget=0.5, leaf_size=8, global_rank=0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     F = near.factorize(1.0)
        >>> caught[0].category.__name__
        'NearFieldWarning'
    """


class NearFieldMatrix(HMatrix):
    """A compressed symmetric matrix with a near field. `hcurv.compress` makes it; immutable.

    Attributes:
        near: blocks of pairs of near leaves, exact.
    """

    def __init__(
        self,
        tree: ClusterTree,
        leaves: LeafBlocks,
        levels: tuple[Level, ...],
        record: BuildRecord | None,
        dtype: torch.dtype,
        global_part: GlobalPart | None = None,
        near: tuple[Coupling, ...] = (),
    ) -> None:
        super().__init__(tree, leaves, levels, record, dtype, global_part)
        self.near = near

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "near": self.near}

    @property
    def num_stored(self) -> int:
        """Every stored float, padding included."""
        return super().num_stored + sum(blocks.num_stored for blocks in self.near)

    def _apply(self, inputs: Tensor) -> Tensor:
        outputs = super()._apply(inputs)
        for blocks in self.near:
            blocks.add_product(inputs, outputs)
        return outputs

    def _tree_pairs(self, rows: Tensor, cols: Tensor) -> Tensor:
        values = super()._tree_pairs(rows, cols)
        row_leaves, col_leaves = elements.locate(self, rows), elements.locate(self, cols)
        for blocks in self.near:
            for first, second in ((row_leaves, col_leaves), (col_leaves, row_leaves)):
                places = elements.find_pairs(blocks, 2**self.tree.depth, first.nodes, second.nodes)
                index = (places >= 0).nonzero().squeeze(1)
                block = places[index]
                values[index] += blocks.values[block, first.local[index], second.local[index]]
        return values

    def _tree_block(self, rows: Tensor, cols: Tensor) -> Tensor:
        # A column is coupled to many nodes of a level, so that entries are computed one by one.
        index = torch.cartesian_prod(rows, cols).T
        return self._tree_pairs(*index).view(rows.numel(), cols.numel())

    def factorize(self, damping: DampingLike = 0.0, **options: Any) -> Factorization:
        """Factorize this matrix plus damping·I, after a compression to HSS form.

        Args:
            damping: as for `HMatrix.factorize`.
            **options: as for `HMatrix.factorize`.

        Warns:
            NearFieldWarning: always, with the error of the second compression.
        """
        plain = self.without_near_field()
        warn_user(
            "A has a near field, which factorizations do not know: what is factorized is A"
            f" compressed to HSS form, with an error of about {plain.estimated_error:.1e}. Use"
            " it as a preconditioner, hcurv.cg(A, b, preconditioner=F)",
            NearFieldWarning,
        )
        return plain.factorize(damping, **{"warn": False, **options})

    def without_near_field(self) -> HMatrix:
        """This matrix with its tree and near field compressed to HSS form, as accurately."""
        if not self.near:
            plain = HMatrix(**{**super()._parts(), "record": self.record, "dtype": self.dtype})
            return plain.with_layout(self.layout)
        rest, seed, wanted = self.hierarchical_part, self.record.seed, self.record.tolerance
        generator = torch.Generator().manual_seed(seed)
        probes = torch.randn(self.shape[0], _PROBES, dtype=self.dtype, generator=generator)
        probes = probes.to(self.device)
        share = float((rest @ probes).norm() / (self @ probes).norm())
        start = prepare(
            rest,
            rest.diagonal(),
            tolerance := wanted / max(share, wanted),
            leaf_size=self.record.leaf_size,
            ordering=torch.cat([self.tree.permutation, self.tree.zero_rows]),
            global_rank=0,
            seed=seed,
        )
        products = RandomProducts(
            rest, RowShare(start.tree.permutation), seed + 2, start.sketch, start.held_out
        )
        settings = BuildSettings(HSSStructure(), None, "angle", None, None, seed)
        plain = construct(rest, start, products, tolerance, settings, Phases()).matrix
        return completed(plain, plain.record, self.global_part).with_layout(self.layout)

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a safetensors file, atomically; `hcurv.load` reads it."""
        tensors = {**storage.matrix_tensors(self), **storage.coupling_tensors("near", self.near)}
        description = {**storage.describe_matrix(self), "near": len(self.near)}
        storage.write_file(self, path, NEAR_FIELD, tensors, description)


def make_near_field(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HMatrix:
    """The matrix that a file holds."""
    parts = storage.matrix_parts(description, tensors, siblings=False)
    tree: ClusterTree = parts["tree"]
    sizes = tree.bounds(tree.depth).diff()
    near = storage.read_couplings(tensors, "near", description["near"], sizes)
    check_couplings(near, sizes, parts["dtype"], siblings=False)
    matrix = NearFieldMatrix(**parts, near=near)
    return matrix.with_layout(storage.read_layout(description))


@dataclass(frozen=True)
class NearFieldStructure:
    """Dense blocks between near leaves, and couplings between pairs of nodes that are far.

    Attributes:
        budget: largest share of the leaves that may be near to a leaf.
        distance: distance of the nearest neighbours by which near leaves are chosen.
        seed: seed of the search for neighbours.
    """

    budget: float
    distance: Distance
    seed: int

    def pattern(self, source: EntrySource, tree: ClusterTree) -> Interactions:
        """Which leaves are near to each other."""
        diagonal = source.diagonal()
        return near_leaves(source, tree, diagonal, self.budget, self.distance, self.seed)

    def assemble(
        self, tree: ClusterTree, blocks: BuiltBlocks, dtype: torch.dtype
    ) -> NearFieldMatrix:
        """A `NearFieldMatrix`."""
        return NearFieldMatrix(tree, blocks.leaves, blocks.levels, None, dtype, None, blocks.dense)
