"""Elimination of the rows of nodes outside of their skeletons: one level of a factorization.

Let M be the diagonal block of a node, S its skeleton rows, R the others, and [I; W] its basis: what
couples the node to the rest of the matrix is a multiple of it. With Q = [I, −Wᵀ; 0, I], QᵀMQ is
coupled to the rest through S alone, and R can be eliminated:

    G = M_RS − W M_SS,    X = M_RR − W M_SR − G Wᵀ,    M_SS − Gᵀ X⁻¹ G  goes on to the parent.

X⁻¹ = E J Eᵀ is kept, E upper triangular and J = I where X is positive definite: solving is then
nothing but products. Since det Q = 1, the determinant is the product of those of all X, and the
matrix is positive definite if and only if all X are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hcurv.hierarchical.parts.levels import put_rows, take_rows

__all__ = [
    "BlockInverse",
    "Elimination",
    "IndefiniteError",
    "LevelFactor",
    "Split",
    "cholesky_inverse",
    "eliminate",
    "permute",
    "spectral_inverse",
]


class IndefiniteError(ArithmeticError):
    """A block that must be positive definite (or at least regular) is not."""


@dataclass(frozen=True)
class Elimination:
    """Nodes of one level and of like shape, R eliminated.

    Attributes:
        nodes: (B,).
        skeleton: positions of S on the level below, (B, r).
        rest: positions of R on the level below, (B, m).
        target: positions of S on this level, (B, r).
        weights: W, (B, m, r).
        root: E, (B, m, m).
        cross: Z = EᵀG, (B, m, r).
        signs: J, (B, m); None where it is the identity.
    """

    nodes: Tensor
    skeleton: Tensor
    rest: Tensor
    target: Tensor
    weights: Tensor
    root: Tensor
    cross: Tensor
    signs: Tensor | None

    @property
    def num_stored(self) -> int:
        """Number of stored floats."""
        signs = 0 if self.signs is None else self.signs.numel()
        return self.weights.numel() + self.root.numel() + self.cross.numel() + signs

    def up(self, below: Tensor, here: Tensor) -> None:
        """Eliminate R from a right-hand side; its rows R become Eᵀ times what is left of them."""
        kept, rest = take_rows(below, self.skeleton), take_rows(below, self.rest)
        rest.baddbmm_(self.weights, kept, alpha=-1)
        scaled = self.root.transpose(1, 2) @ rest
        put_rows(below, self.rest, scaled)
        kept.baddbmm_(self.cross.transpose(1, 2), self._signed(scaled), alpha=-1)
        put_rows(here, self.target, kept)

    def down(self, here: Tensor, below: Tensor) -> None:
        """Solve for R, given S."""
        kept, rest = take_rows(here, self.target), take_rows(below, self.rest)
        rest.baddbmm_(self.cross, kept, alpha=-1)
        solved = self.root @ self._signed(rest)
        put_rows(below, self.rest, solved)
        kept.baddbmm_(self.weights.transpose(1, 2), solved, alpha=-1)
        put_rows(below, self.skeleton, kept)

    def _signed(self, values: Tensor) -> Tensor:
        return values if self.signs is None else values * self.signs[:, :, None]


@dataclass(frozen=True)
class Split:
    """How the rows of the nodes of a level lie on the level below, and come from two children.

    Attributes:
        starts: first row of each node, (nodes,).
        counts: number of its rows, (nodes,).
        left: how many of them are the left child's, (nodes,); all of them for a leaf.
    """

    starts: Tensor
    counts: Tensor
    left: Tensor

    def widths(self, nodes: Tensor) -> tuple[int, int]:
        """Return the largest numbers of rows of a left and of a right child of some nodes."""
        left = self.left[nodes]
        return int(left.max()), int((self.counts[nodes] - left).max())

    def places(self, nodes: Tensor, positions: Tensor) -> Tensor:
        """Return where positions (B, k) lie in padded blocks. Padding lies at the very end."""
        left_width, right_width = self.widths(nodes)
        left = self.left[nodes, None]
        places = positions - self.starts[nodes, None]
        outside = (places < 0) | (places >= self.counts[nodes, None])
        places = places + torch.where(places >= left, left_width - left, 0)
        return places.masked_fill_(outside, left_width + right_width)


@dataclass(frozen=True)
class LevelFactor:
    """All eliminations of one level; the last level is the root, where everything is eliminated.

    Attributes:
        split: rows of its nodes.
        size: rows of a vector on this level.
        size_below: rows of a vector on the level below.
        eliminations: by shape.
    """

    split: Split
    size: int
    size_below: int
    eliminations: tuple[Elimination, ...]

    def up(self, below: Tensor) -> Tensor:
        """Eliminate; change ``below`` as `Elimination.up` does, and return what goes on."""
        here = below.new_zeros(self.size + 1, below.shape[1])
        for elimination in self.eliminations:
            elimination.up(below, here)
        return here

    def skip(self, below: Tensor) -> Tensor:
        """Return the skeleton rows of a vector of the level below."""
        here = below.new_zeros(self.size + 1, below.shape[1])
        for elimination in self.eliminations:
            put_rows(here, elimination.target, take_rows(below, elimination.skeleton))
        return here

    def put_back(self, here: Tensor, below: Tensor) -> None:
        """Set the skeleton rows of ``below`` to a vector of this level."""
        for elimination in self.eliminations:
            put_rows(below, elimination.skeleton, take_rows(here, elimination.target))

    def down(self, here: Tensor, below: Tensor) -> None:
        """Solve for the rows of ``below``, given those of this level."""
        for elimination in self.eliminations:
            elimination.down(here, below)


class BlockInverse(NamedTuple):
    """X⁻¹ = E J Eᵀ of a batch of blocks.

    Attributes:
        root: E.
        signs: J, None for the identity.
        log_determinant: sum of log |det X|.
    """

    root: Tensor
    signs: Tensor | None
    log_determinant: float


def cholesky_inverse(blocks: Tensor, is_padding: Tensor, floor: float) -> BlockInverse:
    """X⁻¹ = L⁻ᵀ L⁻¹ of positive definite blocks.

    Args:
        blocks: X, (B, m, m); rows and columns of padding are zero.
        is_padding: which rows are padding, (B, m). They are inverted as rows of the identity.
        floor: every pivot of X must be larger than this number.

    Raises:
        IndefiniteError: a block is not positive definite.
    """
    blocks.diagonal(dim1=1, dim2=2).add_(is_padding.to(blocks.dtype))
    factors, info = torch.linalg.cholesky_ex(blocks)
    pivots = factors.diagonal(dim1=1, dim2=2)
    too_small = (pivots.square() <= floor) & ~is_padding
    if bool((info > 0).any()) or bool(too_small.any()):
        raise IndefiniteError
    identity = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
    inverse = torch.linalg.solve_triangular(factors, identity.expand_as(blocks), upper=False)
    return BlockInverse(inverse.transpose(1, 2), None, 2 * float(pivots.log().sum()))


def spectral_inverse(blocks: Tensor, is_padding: Tensor, floor: float) -> BlockInverse:
    """X⁻¹ from the eigenvalues of symmetric blocks.

    The columns of E are eigenvectors, and `Elimination.up` stores one number per column in the row
    of the same position. So the columns of padding must be the last ones, as its rows are, and must
    not mix with any eigenvector of X. Padding therefore gets an eigenvalue that is far above all
    eigenvalues of X.

    Args:
        blocks: X, (B, m, m); rows and columns of padding are zero.
        is_padding: which rows are padding, (B, m); they come last.
        floor: every eigenvalue of X must be larger than this number in absolute value.

    Raises:
        IndefiniteError: a block is singular.
    """
    # The Frobenius norm is at least the largest eigenvalue.
    above = 2 * torch.linalg.matrix_norm(blocks) + 1
    blocks.diagonal(dim1=1, dim2=2).add_(is_padding * above[:, None])
    values, vectors = torch.linalg.eigh(blocks)
    values = torch.where(is_padding, 1.0, values)
    if bool(((values.abs() <= floor) & ~is_padding).any()):
        raise IndefiniteError
    # Rounding leaves tiny numbers between rows of X and columns of padding.
    vectors = vectors.masked_fill(is_padding[:, :, None] != is_padding[:, None, :], 0.0)
    root = vectors * values.abs().rsqrt()[:, None]
    return BlockInverse(root, values.sign(), float(values.abs().log().sum()))


def permute(blocks: Tensor, index: Tensor) -> Tensor:
    """Return symmetric blocks (B, w, w) in the order of ``index`` (B, k), as (B, k, k)."""
    number, width = blocks.shape[:2]
    first = torch.arange(0, number * width, max(1, width), device=index.device)[:number]
    flat = (index + first[:, None]).reshape(-1)
    half = blocks.reshape(number * width, width).index_select(0, flat)
    count = index.shape[1]
    half = half.view(number, count, width).transpose(1, 2).reshape(number * width, count)
    return half.index_select(0, flat).view(number, count, count)


def eliminate(
    blocks: Tensor,
    weights: Tensor,
    is_padding: Tensor,
    invert: Callable[[Tensor, Tensor], BlockInverse],
) -> tuple[BlockInverse, Tensor, Tensor]:
    """Eliminate R from blocks M in the order (S, R).

    Args:
        blocks: M, (B, r + m, r + m).
        weights: W, (B, m, r).
        is_padding: which rows of R are none, (B, m).
        invert: takes X and ``is_padding``, and gives X⁻¹.

    Returns:
        X⁻¹, Z, and the Schur complement that goes on to the parent, (B, r, r).
    """
    rank = weights.shape[2]
    kept, mixed, rest = blocks[:, :rank, :rank], blocks[:, rank:, :rank], blocks[:, rank:, rank:]
    coupled = torch.baddbmm(mixed, weights, kept, alpha=-1)
    rest = torch.baddbmm(rest, weights, mixed.transpose(1, 2), alpha=-1)
    rest.baddbmm_(coupled, weights.transpose(1, 2), alpha=-1)
    inverse = invert(rest, is_padding)
    cross = inverse.root.transpose(1, 2) @ coupled
    signed = cross if inverse.signs is None else cross * inverse.signs[:, :, None]
    return inverse, cross, torch.baddbmm(kept, cross.transpose(1, 2), signed, alpha=-1)
