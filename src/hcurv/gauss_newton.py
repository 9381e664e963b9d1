"""The Gauss-Newton Hessian of a network as a matrix: entries, blocks, products, all exact."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv import entries, entry_batches, products
from hcurv.batches import Batches, Data
from hcurv.indexing import (
    Index,
    Indices,
    check_count,
    is_integer,
    resolve_indices,
    resolve_pairs,
)
from hcurv.layer_factors import LayerFactors
from hcurv.losses import Loss, as_loss
from hcurv.memory import require_bytes
from hcurv.network import Network, check_reading, read_network
from hcurv.operators import SymmetricOperator
from hcurv.precompute import check_targets, compute_factors, loss_scale
from hcurv.sampling import SampledEntries, Scheme, draw_points

__all__ = ["GaussNewton"]

MIN_WORKSPACE = 2**16


class GaussNewton(SymmetricOperator):
    """H = Σ_i J_iᵀ Q_i J_i, the generalised Gauss-Newton / Fisher matrix (paper, Definition 1.1).

    Building it runs the precomputation (paper, Theorem 3.1) once; after that the model and the
    data are no longer needed, and training the model further does not change this matrix. Rows
    and columns are numbered as in `torch.nn.utils.parameters_to_vector` over the parameters with
    ``requires_grad``.

    Args:
        model: a chain of Linear layers and elementwise activations, in any module.
        loss: a torch loss module or an `hcurv.losses.Loss`; its ``reduction`` is respected.
        data: an input tensor, a tuple (inputs, targets), or an iterable of batches of either that
            can be read twice and yields the same both times.
        workspace: bytes of temporary memory that one call may use beyond its result.
        progress: show a progress bar of the precomputation.

    Raises:
        UnsupportedModelError: the model is no such chain.
        InsufficientMemoryError: the factors would not fit into free memory.
        TypeError, ValueError: model, loss or data are unfit, with what to do about it.

    Examples:
        >>> H = hcurv.GaussNewton(model, torch.nn.CrossEntropyLoss(), inputs)
        >>> H[3, 17], H[:10, [0, 5, 9]], H.diagonal(), H @ v
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        *,
        workspace: int = 2**28,
        progress: bool = False,
    ) -> None:
        if workspace < MIN_WORKSPACE:
            raise ValueError(f"workspace must be at least {MIN_WORKSPACE} bytes; got {workspace}")
        self._loss = as_loss(loss)
        self._network = read_network(model)
        self._workspace = int(workspace)
        network = self._network
        with torch.no_grad():
            batches = Batches(data, network.dtype, network.device)
            survey = batches.survey()
            check_reading(network, model, survey.first_inputs)
            self._targets = survey.targets
            shape = (survey.num_points, network.num_outputs)
            check_targets(self._loss, *shape, survey.targets)
            self._scale = loss_scale(self._loss, *shape, survey.targets)
            self._points: Tensor | None = None
            self._point_weights: Tensor | None = None
            with tqdm(total=survey.num_points, unit="points", disable=not progress) as bar:
                self._factors = compute_factors(
                    network, self._loss, self._scale, batches, survey, self._workspace, bar.update
                )

    def __repr__(self) -> str:
        """Size, data and memory in one line."""
        return (
            f"GaussNewton(N={self.shape[0]}, num_points={self.num_points},"
            f" loss={type(self._loss).__name__}, dtype={self.dtype}, nbytes={self.nbytes})"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, N)``, N the number of parameters with ``requires_grad``."""
        return (self._factors.num_parameters, self._factors.num_parameters)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's parameters."""
        return self._factors.inputs.dtype

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return self._factors.inputs.device

    @property
    def num_points(self) -> int:
        """n, the number of data points."""
        return self._factors.num_points

    @property
    def num_stored(self) -> int:
        """Number of floats that the precomputation stored."""
        return self._factors.num_stored

    @property
    def network(self) -> Network:
        """The network as it was read, a snapshot."""
        return self._network

    @property
    def factors(self) -> LayerFactors:
        """The stored factors."""
        return self._factors

    def sample_entries(
        self, num_samples: int = 1000, scheme: Scheme = "importance", seed: int = 0
    ) -> SampledEntries:
        """Monte Carlo entries, O(n + q·num_samples) work each (paper, Algorithm 3.1).

        Args:
            num_samples: c, the samples per entry; `num_samples_for` gives it for an accuracy.
            scheme: "importance", "stratified" or "uniform" (see `SampledEntries`).
            seed: of all draws.
        """
        with torch.no_grad():
            return SampledEntries(self._factors, num_samples, scheme, seed, self._workspace)

    def subsample(self, num_points: int, seed: int = 0) -> GaussNewton:
        """An unbiased estimate of this matrix from fewer points, itself exact to work with.

        ``num_points`` points are drawn with replacement in proportion to ‖V(t)‖_F², their shares
        in the trace, and weighted by the inverse. The result is positive semi-definite, has the
        same trace, and E‖W − H‖_F² ≤ trace(H)²/num_points. Points drawn repeatedly are merged, so
        that it may hold fewer than ``num_points``; `points` says which.

        Args:
            num_points: points to draw, at most n.
            seed: of the draw.
        """
        num_points = check_count(num_points, "num_points", most=self.num_points)
        with torch.no_grad():
            points, weights = draw_points(self._factors, num_points, seed)
            result = copy.copy(self)
            result._factors = self._factors.select(points, weights.sqrt().to(self.dtype))
            result._points = self.points[points]
            result._targets = None if self._targets is None else self._targets[points]
            earlier = 1.0 if self._point_weights is None else self._point_weights[points]
            result._point_weights = weights * earlier
            return result

    @property
    def points(self) -> Tensor:
        """Positions of this matrix's points in the data that it was built from, (n,)."""
        if self._points is None:
            return torch.arange(self.num_points, device=self.device)
        return self._points

    def _matmat(self, rhs: Tensor) -> Tensor:
        return products.product(self._factors, rhs, self._workspace)

    def root_product(self, rhs: Tensor) -> Tensor:
        """S @ rhs with the tall root S = RJ of H = SᵀS: (N, k) to (n·q, k), point by point.

        These are linearised forward passes, weighted by the loss.
        """
        self._check_vectors(rhs)
        with torch.no_grad():
            columns = rhs.detach() if rhs.ndim == 2 else rhs.detach()[:, None]
            result = products.root_product(self._factors, columns, self._workspace)
        return result if rhs.ndim == 2 else result.squeeze(1)

    def root_transposed(self, values: Tensor) -> Tensor:
        """Sᵀ @ values, (n·q, k) to (N, k): backward passes."""
        rows = self.num_points * self._factors.jacobian.num_rows
        if values.ndim not in (1, 2) or values.shape[0] != rows or values.dtype != self.dtype:
            raise ValueError(
                f"values must have shape ({rows},) or ({rows}, k) and be {self.dtype};"
                f" got {tuple(values.shape)} of {values.dtype}"
            )
        with torch.no_grad():
            columns = values.detach() if values.ndim == 2 else values.detach()[:, None]
            result = products.root_transposed(self._factors, columns, self._workspace)
        return result if values.ndim == 2 else result.squeeze(1)

    def diagonal(self) -> Tensor:
        """All N diagonal entries, exactly."""
        return products.diagonal(self._factors, self._workspace)

    def __getitem__(self, index: tuple[Index, Index]) -> Tensor:
        """``H[i, j]`` one entry, ``H[rows, cols]`` the dense block rows x cols.

        Rows and cols are lists, ranges, slices, arrays, tensors or masks. As in NumPy, an integer
        drops its axis; unlike NumPy, two lists select a block, not pairs (see `pairs`).
        """
        if not isinstance(index, tuple) or len(index) != 2:
            raise TypeError("two indices are expected: H[i, j] or H[rows, cols]; for a row H[i, :]")
        rows, cols = index
        values = self.block(rows, cols)
        if is_integer(rows):
            return values[0, 0] if is_integer(cols) else values[0]
        return values[:, 0] if is_integer(cols) else values

    def block(self, rows: Index, cols: Index) -> Tensor:
        """The dense block ``rows`` x ``cols``, exactly; always two-dimensional."""
        with torch.no_grad():
            row_index = resolve_indices(rows, self.shape[0], self.device, "rows")
            col_index = resolve_indices(cols, self.shape[1], self.device, "cols")
            size = row_index.numel() * col_index.numel() * self.dtype.itemsize
            require_bytes(
                size + self._workspace,
                self.device,
                f"a dense block of {row_index.numel()} x {col_index.numel()} entries",
                ("ask for fewer rows or columns at a time", "use H @ v instead of a dense block"),
            )
            return entries.block(self._factors, row_index, col_index, self._workspace)

    def blocks(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Many blocks H[rows[b], cols[b]] of equal size, exactly; symmetric where rows equal cols.

        Args:
            rows: integers, (B, m).
            cols: integers, (B, k).

        Returns:
            (B, m, k).
        """
        with torch.no_grad():
            row_index, col_index = entry_batches.resolve_blocks(
                rows, cols, self.shape[0], self.device
            )
            size = row_index.numel() * col_index.shape[1] * self.dtype.itemsize
            require_bytes(
                size + self._workspace,
                self.device,
                f"{len(row_index)} blocks of {row_index.shape[1]} x {col_index.shape[1]} entries",
                ("ask for fewer blocks at a time", "ask for smaller blocks"),
            )
            return entry_batches.blocks(self._factors, row_index, col_index, self._workspace)

    def orders(self) -> dict[str, Tensor]:
        """Orders of the parameters that follow the network, by name, each a permutation (N,).

        "layer-output-input" and "layer-input-output", see `LayerFactors.structural_orders`.
        """
        return self._factors.structural_orders()

    def pairs(self, rows: Indices, cols: Indices) -> Tensor:
        """The entries H[rows[j], cols[j]], elementwise, exactly."""
        with torch.no_grad():
            index = resolve_pairs(rows, cols, self.shape[0], self.device)
            return entries.pairs(self._factors, *index, self._workspace)

    def to_dense(self) -> Tensor:
        """The whole matrix, (N, N), if there is memory for it."""
        return self.block(slice(None), slice(None))

    def gradient(self, targets: Tensor | None = None) -> Tensor:
        """Flat gradient of the loss (with its reduction) over the data, (N,).

        Args:
            targets: targets of all points, in the order of the data; may be left out if the data
                came with targets. A subset takes those of its `points`, and estimates the
                gradient over all of the data.
        """
        targets = self._targets if targets is None else targets
        if targets is None:
            raise ValueError("the data has no targets: pass gradient(targets)")
        if not isinstance(targets, Tensor) or targets.shape[:1] != (self.num_points,):
            given = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise ValueError(f"targets must be a tensor of {self.num_points} rows; got {given}")
        targets = targets.detach().to(self.device)
        if targets.is_floating_point():
            targets = targets.to(self.dtype)
        shape = (self.num_points, self._network.num_outputs)
        check_targets(self._loss, *shape, targets)
        if self._point_weights is None:
            weights = torch.full_like(
                self._factors.inputs[0], loss_scale(self._loss, *shape, targets)
            )
        else:  # a subset estimates the gradient over all points
            weights = (self._scale * self._point_weights).to(self.dtype)
        with torch.no_grad():
            return products.gradient(
                self._network, self._factors, self._loss, targets, weights, self._workspace
            )
