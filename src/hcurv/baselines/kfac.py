"""K-FAC (Martens and Grosse 2015; paper, §4.3): Kronecker factors of the Fisher matrix.

All structures act on the matrix V of a layer's parameters (see `kronecker_moments`):
block-diagonal, V → G V A; block-tridiagonal, whose *inverse* is block-tridiagonal and which agrees
with the Kronecker blocks on and next to the diagonal; full, all Kronecker blocks (the paper's last
K-FAC equation). EKFAC (George et al. 2018) keeps the eigenvectors of A and G and measures the
eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.baselines.kronecker_chain import Chain, KroneckerPair
from hcurv.baselines.kronecker_moments import (
    LayerView,
    Moments,
    Piece,
    accumulate,
    exact_pieces,
    sampled_pieces,
)
from hcurv.batches import Batches, Data
from hcurv.gauss_newton import GaussNewton
from hcurv.indexing import check_count
from hcurv.losses import Loss, as_loss
from hcurv.network import check_reading, read_network
from hcurv.operators import SymmetricOperator
from hcurv.precompute import check_targets, loss_scale

__all__ = ["KFAC", "KFACFactors"]

Structure = Literal["block-diagonal", "block-tridiagonal", "full"]


class KFAC(SymmetricOperator):
    """A Kronecker-factored approximation of the Gauss-Newton Hessian.

    Args:
        model: as for `GaussNewton`.
        loss: as for `GaussNewton`.
        data: as for `GaussNewton`.
        structure: "block-diagonal", "block-tridiagonal" or "full" (which has no cheap inverse).
        num_samples: samples of the targets from the model's prediction, per point; None for their
            exact expectation.
        ekfac: correct the eigenvalues ("block-diagonal" only).
        seed: of the samples.
        progress: show a progress bar.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        *,
        structure: Structure = "block-diagonal",
        num_samples: int | None = 1,
        ekfac: bool = False,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        if structure not in ("block-diagonal", "block-tridiagonal", "full"):
            raise ValueError(
                'structure must be "block-diagonal", "block-tridiagonal" or "full";'
                f" got {structure!r}"
            )
        if ekfac and structure != "block-diagonal":
            raise ValueError(f'ekfac works with structure="block-diagonal"; got "{structure}"')
        if num_samples is not None:
            num_samples = check_count(num_samples, "num_samples")
        self.structure: Structure = structure
        pieces = _Pieces(model, loss, data, num_samples, seed)
        self._network = pieces.network
        self._views = [LayerView(layer) for layer in self._network.layers if layer.trainable]
        count = len(self._views)
        reach = {"block-diagonal": 0, "block-tridiagonal": 1, "full": count}[structure]
        pairs = [(i, j) for i in range(count) for j in range(i, min(count, i + reach + 1))]
        passes = 2 if ekfac else 1
        with (
            torch.no_grad(),
            tqdm(total=passes * pieces.num_points, unit="points", disable=not progress) as bar,
        ):
            self.moments: Moments = accumulate(pieces.again(), pairs, pieces.num_points, bar.update)
            self._eigen = _corrected(self.moments, pieces, bar) if ekfac else None

    def __repr__(self) -> str:
        """Size and structure in one line."""
        kind = "EKFAC" if self._eigen is not None else "KFAC"
        return f"{kind}(N={self.shape[0]}, structure={self.structure!r}, dtype={self.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._network.num_parameters, self._network.num_parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's parameters."""
        return self._network.dtype

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return self._network.device

    @property
    def num_stored(self) -> int:
        """Floats of all Kronecker factors."""
        if self._eigen is not None:
            return sum(part.numel() for parts in self._eigen for part in parts)
        sums = (*self.moments.inputs.values(), *self.moments.gradients.values())
        return sum(part.numel() for part in sums)

    def diagonal(self) -> Tensor:
        """The N diagonal entries."""
        result = torch.zeros(self.shape[0], 1, dtype=self.dtype, device=self.device)
        for number, view in enumerate(self._views):
            if self._eigen is not None:
                inputs, gradients, values = self._eigen[number]
                block = gradients.square() @ values @ inputs.square().T
            else:
                gradients = self.moments.gradients[number, number].diagonal()
                block = torch.outer(gradients, self.moments.inputs[number, number].diagonal())
            view.write(result, block[None])
        return result.squeeze(1)

    def _matmat(self, rhs: Tensor) -> Tensor:
        values = [view.read(rhs) for view in self._views]
        if self._eigen is not None:
            values = [
                gradients @ (scale * (gradients.T @ block @ inputs)) @ inputs.T
                for block, (inputs, gradients, scale) in zip(values, self._eigen, strict=True)
            ]
        elif self.structure == "block-tridiagonal":
            values = Chain.of(self._diagonal_pairs(None), self.moments).apply(values)
        else:
            values = self._multiply(values)
        return self._flat(values, rhs)

    def _multiply(self, values: list[Tensor]) -> list[Tensor]:
        """All Kronecker blocks that there are."""
        result = [torch.zeros_like(block) for block in values]
        for (i, j), inputs in self.moments.inputs.items():
            gradients = self.moments.gradients[i, j]
            result[i] += gradients @ values[j] @ inputs.T
            if i != j:
                result[j] += gradients.T @ values[i] @ inputs
        return result

    def _flat(self, values: list[Tensor], like: Tensor) -> Tensor:
        result = torch.empty_like(like, memory_format=torch.contiguous_format)
        for view, block in zip(self._views, values, strict=True):
            view.write(result, block)
        return result

    def _diagonal_pairs(self, damping: float | None) -> list[KroneckerPair]:
        """Factors of the diagonal blocks, with factored damping, in double precision.

        (A + π√λ I) ⊗ (G + √λ/π I), where π² is the ratio of their mean eigenvalues (Martens and
        Grosse 2015, §6.3).
        """
        result = []
        for number in range(len(self._views)):
            inputs = self.moments.inputs[number, number].double()
            gradients = self.moments.gradients[number, number].double()
            if damping is not None:
                sizes = [float(m.trace()) / m.shape[0] for m in (inputs, gradients)]
                ratio = math.sqrt(sizes[0] / sizes[1]) if min(sizes) > 0 else 1.0
                inputs, gradients = inputs.clone(), gradients.clone()
                inputs.diagonal().add_(ratio * math.sqrt(damping))
                gradients.diagonal().add_(math.sqrt(damping) / ratio)
            result.append(KroneckerPair(inputs, gradients))
        return result

    def factorize(self, damping: float) -> KFACFactors:
        """What solving with this damping needs.

        The damping is factored, as K-FAC does it; EKFAC adds it to the eigenvalues.
        """
        if self.structure == "full":
            raise ValueError(
                'structure="full" has no cheap inverse; use hcurv.cg, or another structure'
            )
        if not (math.isfinite(damping) and damping > 0):
            raise ValueError(f"damping must be positive; got {damping}")
        return KFACFactors(self, float(damping))

    def solve(self, rhs: Tensor, damping: float) -> Tensor:
        """Solve with damping; `factorize` once for several right-hand sides."""
        return self.factorize(damping).solve(rhs)

    def logdet(self, damping: float) -> Tensor:
        """log det with damping, in double precision."""
        return self.factorize(damping).logdet()


class KFACFactors:
    """A damped K-FAC approximation, ready to solve with. Made by `KFAC.factorize`."""

    def __init__(self, matrix: KFAC, damping: float) -> None:
        self.shape, self.dtype, self.damping = matrix.shape, matrix.dtype, damping
        self._matrix = matrix
        self._chain: Chain | None = None
        if matrix._eigen is None:
            moments = matrix.moments if matrix.structure == "block-tridiagonal" else None
            self._chain = Chain.of(matrix._diagonal_pairs(damping), moments)

    def solve(self, rhs: Tensor) -> Tensor:
        """Solve for rhs, (N,) or (N, k)."""
        matrix = self._matrix
        matrix._check_vectors(rhs)
        columns = rhs if rhs.ndim == 2 else rhs[:, None]
        values = [view.read(columns) for view in matrix._views]
        if self._chain is not None:
            solved = self._chain.solve(values)
        else:
            assert matrix._eigen is not None
            solved = [
                gradients @ ((gradients.T @ block @ inputs) / (scale + self.damping)) @ inputs.T
                for block, (inputs, gradients, scale) in zip(values, matrix._eigen, strict=True)
            ]
        return matrix._flat(solved, columns).view_as(rhs)

    def logdet(self) -> Tensor:
        """log det, in double precision."""
        if self._chain is not None:
            return self._chain.logdet()
        assert self._matrix._eigen is not None
        total = torch.zeros((), dtype=torch.float64)
        for _, _, scale in self._matrix._eigen:
            total = total + (scale.double() + self.damping).log().sum().cpu()
        return total


class _Pieces:
    """The data as pieces of inputs and gradients, as often as needed."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        num_samples: int | None,
        seed: int,
    ) -> None:
        self._num_samples, self._seed = num_samples, seed
        if num_samples is None:
            self._matrix = GaussNewton(model, loss, data)
            self.network = self._matrix.network
            self.num_points = self._matrix.num_points
            return
        self.network = read_network(model)
        self._loss = as_loss(loss)
        self._batches = Batches(data, self.network.dtype, self.network.device)
        self._survey = self._batches.survey()
        check_reading(self.network, model, self._survey.first_inputs)
        self.num_points = self._survey.num_points
        shape = (self.num_points, self.network.num_outputs)
        check_targets(self._loss, *shape, self._survey.targets)
        self._scale = loss_scale(self._loss, *shape, self._survey.targets)

    def again(self) -> Iterator[Piece]:
        """From the beginning; the same samples every time."""
        if self._num_samples is None:
            return exact_pieces(self._matrix)
        return sampled_pieces(
            self.network,
            self._loss,
            self._scale,
            self._batches,
            self._survey,
            self._num_samples,
            self._seed,
        )


def _corrected(
    moments: Moments, pieces: _Pieces, bar: tqdm[object]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Eigenvectors of A and of G, and the curvature along their products, of each layer."""
    count = len(moments.inputs)
    bases = [
        tuple(
            torch.linalg.eigh(part[number, number].double()).eigenvectors.to(part[number, number])
            for part in (moments.inputs, moments.gradients)
        )
        for number in range(count)
    ]
    values = [torch.zeros_like(gradients[:, :1] @ inputs[:1]) for inputs, gradients in bases]
    for piece in pieces.again():
        for number, (inputs, gradients) in enumerate(bases):
            features = (piece.inputs[number] @ inputs).square_()
            rows = piece.gradients[number]
            if rows.ndim == 2:  # a diagonal
                turned = rows.square() @ gradients.square()
            else:
                turned = (rows @ gradients).square_().sum(1)
            values[number].addmm_(turned.T, features)
        bar.update(piece.inputs[0].shape[0])
    return [(*basis, value) for basis, value in zip(bases, values, strict=True)]
