"""K-FAC (Martens and Grosse 2015; paper, §4.3): Kronecker factors of the Fisher matrix.

All structures act on the matrix V of a layer's parameters (see `kronecker_moments` for chains of
Linear layers, `model_blocks` and `model_factors` for other models, which are block-diagonal). The
block-diagonal one is V → G V A. The block-tridiagonal one has a block-tridiagonal *inverse*, and
agrees with the Kronecker blocks on the diagonal and next to it. The full one has all Kronecker
blocks (the paper's last K-FAC equation). EKFAC (George et al. 2018) keeps the eigenvectors of A and
G and measures the eigenvalues anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.baselines.chain_factors import ChainFactors
from hcurv.baselines.kfac_calibration import calibrate, check_reference
from hcurv.baselines.kfac_factorization import KFACFactorization
from hcurv.baselines.kronecker_chain import (
    Chain,
    Identity,
    InverseBlock,
    InverseChain,
    KroneckerPair,
    damped,
    eigenvectors,
)
from hcurv.baselines.kronecker_moments import Moments, ParameterMatrix, write_layers
from hcurv.baselines.model_factors import ModelFactors, Positions
from hcurv.damping import Damping, DampingLike, as_damping
from hcurv.factorized import Factorized, NotFactorizableError
from hcurv.indexing import check_count, check_seed
from hcurv.layout import ParameterLayout
from hcurv.losses import Loss
from hcurv.memory import require_bytes
from hcurv.network.batches import Data
from hcurv.network.forward_pass import verified
from hcurv.network.model.snapshot import ForwardFunction
from hcurv.network.problem import Problem, read_problem
from hcurv.network.tracing import UnsupportedModelError
from hcurv.operators import SymmetricOperator
from hcurv.residuals import warn_of_residual

__all__ = ["KFAC", "even_damping", "kfac_of_problem"]

Structure = Literal["block-diagonal", "block-tridiagonal", "full"]


class KFAC(SymmetricOperator):
    """A Kronecker-factored approximation of the Gauss-Newton Hessian.

    It reads every model that `GaussNewton` reads. What a parameter gets depends on how it is used:

    - The weight of a Linear layer, over any leading dimensions, or of a convolution: a Kronecker
      block. Other products z = W x count, too, transposed convolutions among them. The groups of a
      convolution, or matrices that are multiplied side by side, have a block each.
    - A weight that is used several times as the same linear map, as by a module that is called
      twice: one block. All uses count as positions.
    - The bias of such a layer: it joins the block of its weight, as the weight of an input that is
      one, if it is added wherever the weight is used.
    - Everything else: the exact diagonal of H (that of the drawn targets, if there are any).
      These are scales and shifts of normalisations, embeddings and learned positions, biases
      whose weight is frozen (those of a chain of Linear layers keep their G) or shared with
      another layer, and weights with a use that is no z = W x or sees W transposed, such as
      embeddings that are the output layer as well.

    Args:
        model: the network, as for `GaussNewton`.
        loss: the loss, as for `GaussNewton`.
        data: the data, as for `GaussNewton`.
        structure: "block-diagonal"; or, for chains of Linear layers, "block-tridiagonal" or "full"
            (which has no cheap inverse).
        positions: how weights are treated that are used at several positions of a point (pixels,
            words). "expand" (Grosse and Martens 2016) takes each position for a point of its own;
            "reduce" (Eschenhagen et al. 2023) averages inputs and adds up gradients over them.
        num_samples: the number of targets drawn from the model's prediction for each point; None
            takes the exact expectation over them.
        ekfac: whether to measure the eigenvalues anew; only with "block-diagonal".
        forward_fn: as for `GaussNewton`.
        seed: the seed of the drawn targets.
        progress: whether to show a progress bar.

    Raises:
        UnsupportedModelError: the model cannot be read, or is no chain although the structure
            needs one.
        InsufficientMemoryError: the factors would not fit into free memory.
        TypeError, ValueError: the model, the loss, the data or an option do not fit.

    Examples:
        >>> K = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None)
        >>> K.shape, K.num_stored < H.num_stored
        ((51, 51), True)
        >>> E = hcurv.baselines.KFAC(model, loss, inputs, num_samples=None, ekfac=True)
        >>> E.relative_error(H) < K.relative_error(H) < 1
        True
        >>> images = torch.ones(5, 1, 6, 6)
        >>> cnn = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(1))
        >>> hcurv.baselines.KFAC(cnn, torch.nn.MSELoss(), images, positions="reduce").num_stored
        116
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        *,
        structure: Structure = "block-diagonal",
        positions: Positions = "expand",
        num_samples: int | None = 1,
        ekfac: bool = False,
        forward_fn: ForwardFunction | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        if structure not in ("block-diagonal", "block-tridiagonal", "full"):
            raise ValueError(
                'structure must be "block-diagonal", "block-tridiagonal" or "full";'
                f" got {structure!r}"
            )
        if positions not in ("expand", "reduce"):
            raise ValueError(f'positions must be "expand" or "reduce"; got {positions!r}')
        if ekfac and structure != "block-diagonal":
            raise ValueError(f'ekfac works with structure="block-diagonal"; got "{structure}"')
        if num_samples is not None:
            num_samples = check_count(num_samples, "num_samples")
        seed = check_seed(seed)
        with torch.no_grad():
            problem = verified(read_problem(model, loss, data, forward_fn=forward_fn))
        passes = 2 if ekfac else 1
        total = passes * problem.num_points
        with torch.no_grad(), tqdm(total=total, unit="points", disable=not progress) as bar:
            factors = self._measure(problem, structure, positions, num_samples, seed, bar.update)
            if ekfac:
                self._measure_eigenvalues(factors, bar.update)

    def _measure(
        self,
        problem: Problem,
        structure: Structure,
        positions: Positions,
        num_samples: int | None,
        seed: int,
        advance: Callable[[int], object],
    ) -> ChainFactors | ModelFactors:
        """Find the factors in one pass over the data; return what can make another one."""
        self.structure: Structure = structure
        self._layout, self._dtype, self._device = problem.layout, problem.dtype, problem.device
        factors: ChainFactors | ModelFactors
        if problem.network is not None:
            factors = ChainFactors(problem, num_samples, seed)
        elif structure == "block-diagonal":
            factors = ModelFactors(problem, positions, num_samples, seed)
        else:
            raise UnsupportedModelError(
                f'structure="{structure}" couples neighbouring layers, so that it needs a chain of'
                " Linear layers; this model is none.",
                'Use structure="block-diagonal", which reads any model.',
            )
        count = len(factors.layers)
        # The layers of diagonal blocks come after those of Kronecker blocks.
        self._layers = [*factors.layers, *factors.others]
        reach = {"block-diagonal": 0, "block-tridiagonal": 1, "full": count}[structure]
        pairs = [(i, j) for i in range(count) for j in range(i, min(count, i + reach + 1))]
        self._require_memory(pairs)
        self.moments: Moments
        self.moments, self._diagonals = factors.moments(pairs, advance)
        self._eigenbases: list[tuple[KroneckerPair | Identity, Tensor]] | None = None
        return factors

    def _measure_eigenvalues(
        self, factors: ChainFactors | ModelFactors, advance: Callable[[int], object]
    ) -> None:
        """Become EKFAC by another pass. The same seed gives the same gradients again."""
        bases = eigenvectors(self.moments)
        values = factors.eigenvalues(bases, advance)
        self._eigenbases = [
            *zip(bases, values, strict=True),
            *((Identity(), diagonal) for diagonal in self._diagonals),
        ]

    def _require_memory(self, pairs: list[tuple[int, int]]) -> None:
        """Refuse factors that would not fit into free memory, before the data is read again."""
        widths = [layer.num_columns for layer in self._layers]
        heights = [layer.num_units for layer in self._layers]
        floats = sum(widths[i] * widths[j] + heights[i] * heights[j] for i, j in pairs)
        require_bytes(
            2 * floats * self.dtype.itemsize,  # A sum, and the moments of one batch.
            self.device,
            f"the Kronecker factors of {len({i for i, _ in pairs})} layers",
            (
                'use structure="block-diagonal", if another one is asked for',
                "freeze layers with many inputs with requires_grad_(False)",
                "use baselines.Diagonal instead",
            ),
        )

    def __repr__(self) -> str:
        """Describe the size and the structure in one line."""
        name = "EKFAC" if self._eigenbases is not None else "KFAC"
        return f"{name}(N={self.shape[0]}, structure={self.structure!r}, dtype={self.dtype})"

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``."""
        return (self._layout.size, self._layout.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's parameters."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return self._device

    @property
    def layout(self) -> ParameterLayout:
        """Names, shapes and places of the parameters in the flat vector."""
        return self._layout

    @property
    def num_stored(self) -> int:
        """The number of floats of all Kronecker factors and diagonal blocks."""
        if self._eigenbases is not None:
            return sum(basis.num_stored + values.numel() for basis, values in self._eigenbases)
        factors = (*self.moments.inputs.values(), *self.moments.gradients.values())
        return sum(factor.numel() for factor in (*factors, *self._diagonals))

    def diagonal(self) -> Tensor:
        """Compute the N diagonal entries.

        Examples:
            >>> K = hcurv.baselines.KFAC(model, loss, inputs)
            >>> torch.allclose(K.diagonal(), K.to_dense().diagonal())
            True
        """
        if self._eigenbases is not None:
            blocks = [basis.apply_squared(values) for basis, values in self._eigenbases]
        else:
            blocks = [
                torch.outer(
                    self.moments.gradients[number, number].diagonal(),
                    self.moments.inputs[number, number].diagonal(),
                )
                for number in range(self._num_pairs)
            ]
            blocks += self._diagonals
        return write_layers(self._layers, [block[None] for block in blocks]).squeeze(1)

    @property
    def _num_pairs(self) -> int:
        """The number of diagonal blocks that are Kronecker products."""
        return len(self._layers) - len(self._diagonals)

    def _matmat(self, rhs: Tensor) -> Tensor:
        values = [layer.read(rhs) for layer in self._layers]
        if self._eigenbases is not None:
            values = [
                basis.apply(scale * basis.apply_transposed(block))
                for block, (basis, scale) in zip(values, self._eigenbases, strict=True)
            ]
        elif self.structure == "block-tridiagonal":
            values = self._undamped_chain.apply(values)
        else:
            values = self._multiply(values)
        return write_layers(self._layers, values)

    def _multiply(self, values: list[Tensor]) -> list[Tensor]:
        """Multiply by all Kronecker blocks that are stored."""
        kronecker, others = values[: self._num_pairs], values[self._num_pairs :]
        result = [torch.zeros_like(block) for block in kronecker]
        for (i, j), inputs in self.moments.inputs.items():
            gradients = self.moments.gradients[i, j]
            result[i] += gradients @ values[j] @ inputs.T
            if i != j:
                result[j] += gradients.T @ values[i] @ inputs
        scaled = [d * block for d, block in zip(self._diagonals, others, strict=True)]
        return [*result, *scaled]

    @cached_property
    def _undamped_chain(self) -> Chain:
        """The block-tridiagonal structure without damping, to multiply with."""
        return Chain.of(self._diagonal_pairs(), self.moments).to(self.dtype)

    def _diagonal_pairs(self) -> list[KroneckerPair]:
        """The factors of the diagonal blocks, in double precision."""
        return [
            KroneckerPair(
                self.moments.inputs[number, number].double(),
                self.moments.gradients[number, number].double(),
            )
            for number in range(self._num_pairs)
        ]

    def factorize(
        self,
        damping: DampingLike | Damping,
        *,
        factored: bool = True,
        reference: Factorized | None = None,
        rows: Tensor | None = None,
        warn: bool = True,
    ) -> KFACFactorization:
        """Invert this matrix with damping.

        K-FAC damps its factors (Martens and Grosse 2015, §6.3): the inverted matrix has the
        diagonal blocks (G + √λ/π I) ⊗ (A + π√λ I), where π² is the ratio of the mean eigenvalues of
        A and G. It adds λ to diagonal blocks, and EKFAC to its eigenvalues e. With
        ``factored=False``, the blocks are G ⊗ A + λI, as a prior of the weights wants it.

        With ``reference`` and ``rows``, EKFAC is calibrated at the same storage: its eigenvalues
        become λ(1 + (ce/λ)^p)^(1/p), with c and p such that the variances of the rows are as near
        as possible to those of the reference, and the log-determinant is no further from the
        reference's than EKFAC's. On a classifier this halved the errors of variances at small
        dampings. On two regressions with n·q far below N it took an eighth to two thirds of them
        away, but 14 to 120 % remained. The correlations of layers are missing there, and on one of
        them no eigenvalues with such a log-determinant can bring the mean variance below 1.5 to 2.6
        times the truth (benchmarks/kfac.py).

        Args:
            damping: λ > 0, one number, or numbers by the names of layers (or of parameters, if
                those of one layer have the same number).
            factored: whether K-FAC damps its factors; EKFAC never does.
            reference: what to calibrate EKFAC against, such as ``H.factorize(damping)``.
            rows: Jacobians of some outputs, (m, N), for which variances shall be right; 16 were as
                good as 300. Take inputs outside of the training set, because variances at its
                points are smaller than elsewhere.
            warn: whether to warn of a large residual, which a preconditioner may have.

        Raises:
            NotFactorizableError: the structure is "full", or the factors are too ill-conditioned
                for this damping.
            TypeError, ValueError: the damping is not positive, or not the same within a layer; the
                reference or the rows do not fit.

        Warns:
            AccuracyWarning: the damping is too small for the precision: a random residual of
                G ⊗ A + λI, which is measured once, here, is above 1e-2.

        Examples:
            >>> K = hcurv.baselines.KFAC(model, loss, inputs, ekfac=True)
            >>> x = K.factorize(0.1).solve(b)
            >>> torch.allclose(K @ x + 0.1 * x, b)
            True
            >>> K.factorize({"0": 1.0, "2": 0.1}).logdet().shape
            torch.Size([])
            >>> F, J = H.factorize(0.1), torch.eye(51, dtype=b.dtype)
            >>> calibrated = K.factorize(0.1, reference=F, rows=J)
            >>> errors = [(E.inverse_diagonal() / F.inverse_diagonal()).log().norm()
            ...           for E in (calibrated, K.factorize(0.1))]
            >>> bool(errors[0] < errors[1])
            True
        """
        if self.structure == "full":
            raise NotFactorizableError(
                'structure="full" has no cheap inverse; use hcurv.cg, or another structure'
            )
        resolved = as_damping(damping, self.shape[0], self.layout)
        if isinstance(damping, Tensor) and damping.numel() > 1:
            raise TypeError(
                "K-FAC takes one damping for each layer, because it damps the factors of a layer;"
                f" got a tensor of shape {tuple(damping.shape)}. Pass a number, or a mapping from"
                f" the names of the layers ({', '.join(map(repr, self.layout.layers))}) to numbers"
            )
        resolved.require_positive("the factors may be singular")
        if self._eigenbases is None and (reference is not None or rows is not None):
            raise ValueError("only EKFAC can be calibrated: build KFAC(ekfac=True)")
        try:
            factors = self._invert(resolved, factored, reference, rows)
        except RuntimeError as error:  # torch's LinAlgError is one of these
            if type(error).__name__ != "_LinAlgError":
                raise
            lowest = float(resolved.tensor.detach().min())
            raise NotFactorizableError(
                f"the factors of K-FAC cannot be inverted with damping = {lowest:.1e}: they are"
                f" singular up to rounding in {self.dtype}. Choose a larger damping, or a model and"
                f" data in torch.float64 ({error})"
            ) from error
        # With damped factors, or when calibrated, it is another matrix that is inverted.
        is_plain = self._eigenbases is not None or not factored
        if warn and is_plain and reference is None:
            warn_of_residual(self, factors)
        return factors

    def _invert(
        self,
        resolved: Damping,
        factored: bool,
        reference: Factorized | None,
        rows: Tensor | None,
    ) -> KFACFactorization:
        """See `factorize`."""
        with torch.no_grad():
            numbers = [self._layer_damping(layer, resolved) for layer in self._layers]
            shifts: list[tuple[float, float] | None] | None = None
            bases = self._eigenbases
            if bases is None and not factored:
                bases = self._product_eigenbases()
            if bases is not None:
                if reference is None and rows is None:
                    eigenvalues = [
                        values + number for (_, values), number in zip(bases, numbers, strict=True)
                    ]
                else:
                    reference, rows = check_reference(reference, rows, resolved, self.shape[0])
                    eigenvalues = self._calibrated(numbers, reference, rows)
                chain = InverseChain(
                    [
                        InverseBlock.of(basis, values)
                        for (basis, _), values in zip(bases, eigenvalues, strict=True)
                    ]
                )
            else:
                chain, shifts = self._damped_chain(numbers)
            return KFACFactorization(self._layers, chain, resolved, shifts)

    def _product_eigenbases(self) -> list[tuple[KroneckerPair | Identity, Tensor]]:
        """Eigenvectors and eigenvalues of G ⊗ A, and the diagonal blocks."""
        if self.structure != "block-diagonal":
            raise NotFactorizableError('factored=False needs structure="block-diagonal"')
        found: list[tuple[KroneckerPair | Identity, Tensor]] = []
        for pair in self._diagonal_pairs():
            inputs, right = torch.linalg.eigh(pair.inputs)
            gradients, left = torch.linalg.eigh(pair.gradients)
            values = torch.outer(gradients.clamp(min=0), inputs.clamp(min=0))
            found.append((KroneckerPair(right, left).to(None, self.dtype), values.to(self.dtype)))
        return [*found, *((Identity(), diagonal) for diagonal in self._diagonals)]

    def _damped_chain(
        self, numbers: list[float]
    ) -> tuple[InverseChain, list[tuple[float, float] | None]]:
        """Invert the matrix with factored damping; also return what was added to A and G."""
        pairs: list[KroneckerPair] = []
        shifts: list[tuple[float, float] | None] = []
        for pair, number in zip(self._diagonal_pairs(), numbers[: self._num_pairs], strict=True):
            damped_pair, shift = damped(pair, number)
            pairs.append(damped_pair)
            shifts.append(shift)
        moments = self.moments if self.structure == "block-tridiagonal" else None
        chain = Chain.of(pairs, moments).invert().to(None, self.dtype)
        others = [
            InverseBlock.of(Identity(), diagonal + number)
            for diagonal, number in zip(self._diagonals, numbers[self._num_pairs :], strict=True)
        ]
        return InverseChain([*chain.blocks, *others], chain.links), [*shifts, *[None] * len(others)]

    def _calibrated(
        self, numbers: list[float], reference: Factorized, rows: Tensor
    ) -> list[Tensor]:
        """Fit the eigenvalues of all layers to a reference."""
        assert self._eigenbases is not None
        columns = rows.to(self.device, self.dtype).T.contiguous()
        squares = [
            basis.apply_transposed(layer.read(columns)).double().square().flatten(1)
            for layer, (basis, _) in zip(self._layers, self._eigenbases, strict=True)
        ]
        values = [values.double().flatten() for _, values in self._eigenbases]
        dampings = [
            torch.full_like(part, number) for part, number in zip(values, numbers, strict=True)
        ]
        variances = reference.quadratic(rows.to(reference.device, reference.dtype), diagonal=True)
        found = calibrate(
            torch.cat(values),
            torch.cat(dampings),
            torch.cat(squares, 1),
            variances.to(self.device, torch.float64),
            float(reference.logdet()),
        )
        parts = found.split([part.numel() for part in values])
        return [
            part.view_as(old).to(old)
            for part, (_, old) in zip(parts, self._eigenbases, strict=True)
        ]

    def _layer_damping(self, layer: ParameterMatrix, damping: Damping) -> float:
        """Find the one number that damps all parameters of a layer."""
        if damping.is_number:
            return damping.number
        values = damping.rows(layer.rows())
        low, high = float(values.min()), float(values.max())
        if low != high:
            first = int(layer.rows()[0])
            name = self.layout.names[int(self.layout.locate(torch.tensor(first))[0])]
            raise ValueError(
                "K-FAC takes one damping for each layer, because it damps the factors of a layer;"
                f" got numbers from {low} to {high} for the layer of '{name}'"
            )
        return low


def kfac_of_problem(problem: Problem) -> tuple[KFAC, Callable[[], KFAC]]:
    """K-FAC with the exact expectation, and what makes EKFAC of it by another pass.

    Args:
        problem: a model, a loss and data that were read, and verified, for another matrix.
    """
    found = KFAC.__new__(KFAC)
    factors = found._measure(problem, "block-diagonal", "expand", None, 0, lambda count: None)

    def with_eigenvalues() -> KFAC:
        result = copy.copy(found)
        result._measure_eigenvalues(factors, lambda count: None)
        return result

    return found, with_eigenvalues


def even_damping(kfac: KFAC, damping: Damping) -> Damping:
    """A damping that K-FAC can have: within each layer, the geometric mean of the values.

    Args:
        kfac: the matrix that will be damped.
        damping: D, positive.
    """
    if damping.is_number:
        return Damping(damping.tensor.detach())
    values = damping.diagonal(kfac.shape[0], kfac.device).clone()
    for layer in kfac._layers:
        rows = layer.rows()
        values[rows] = values[rows].log().mean().exp()
    return Damping(values)
