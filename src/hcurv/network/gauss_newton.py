"""The Gauss-Newton Hessian of a network as a matrix: exact entries, blocks and products."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hcurv.damping import DampingLike, as_damping
from hcurv.factorized import Factorized
from hcurv.indexing import check_count, check_seed
from hcurv.losses import Loss
from hcurv.network.batches import Data
from hcurv.network.choose_root import Factors, make_root
from hcurv.network.factored_matrix import FactoredMatrix
from hcurv.network.gradient import WeightedPoints, loss_gradient
from hcurv.network.jacobian_rows import JacobianRows, gradient_rows, jacobian_rows
from hcurv.network.loss_rows import Fisher, RowChoice
from hcurv.network.memory_plan import MemoryPlan
from hcurv.network.model.snapshot import ForwardFunction
from hcurv.network.point_sum import PointSum
from hcurv.network.problem import read_problem
from hcurv.network.random_draws import draw_points
from hcurv.network.reading import Network
from hcurv.network.representable import require_representable
from hcurv.network.sampling import SampledEntries, Scheme
from hcurv.network.shards import Shard
from hcurv.ranks import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GaussNewton"]

# Less temporary memory than this, in bytes, would not hold one column of a small network.
MIN_WORKSPACE = 2**16


class GaussNewton(FactoredMatrix):
    """H = Σ_i J_iᵀ Q_i J_i, the generalised Gauss-Newton / Fisher matrix (paper, Definition 1.1).

    The constructor runs the precomputation (paper, Theorem 3.1) once. After that the model and the
    data are no longer needed, and training the model further does not change this matrix. Rows and
    columns are numbered as in `torch.nn.utils.parameters_to_vector` over the parameters with
    ``requires_grad``; `layout` gives them names.

    For deep chains of Linear layers with many outputs, products need much less memory than entries.
    What entries need is then made when they are first asked for, and kept; `memory_plan` says how
    much that is.

    Args:
        model: any model that treats its points independently. It is read from what autograd
            records in a forward pass, so that control flow, attention, recurrence, tied weights
            and functions of your own are fine. Chains of Linear layers have faster forms.
        loss: a torch loss module or an `hcurv.losses.Loss`; its ``reduction`` is respected.
        data: inputs, a tuple (inputs, targets), or an iterable of batches of either that can be
            read twice and yields the same both times; a list of inputs and targets is such a tuple
            if it cannot be two batches. Inputs are a tensor, a dictionary of tensors
            (the model's keyword arguments) or, in a batch with targets, a tuple of tensors (its
            arguments).
        num_samples: m, to estimate H without bias from m sampled targets a point instead of all
            outputs. It saves time and memory where there are many outputs, as in language models.
            None for the exact matrix.
        fisher: "exact", or "empirical" for Σ g_i g_iᵀ with the gradients g_i at the targets of the
            data, one for each point, which is another matrix.
        forward_fn: a function of the model and the inputs of a batch that returns the outputs, for
            models with unusual signatures.
        seed: the seed of sampled targets.
        factors: "memory" keeps the layer Jacobians of all points, which makes everything fast.
            "recompute" computes them batch by batch at each call, by one pass over the data, so
            that memory does not grow with the number of points; all columns of a product and all
            blocks of a request share a pass. "auto" keeps them if they take less than 60 % of free
            memory; `factors` says what was decided, and ``memory_plan()`` why.
        process_group: a group of `torch.distributed`, such as ``torch.distributed.group.WORLD``, if
            several processes work together. Each of them passes its own points, of any number, and
            everything else alike. All of them make the same calls, with the same arguments, and
            all of them receive the same results, which are those of all points together.
        workspace: the number of bytes of temporary memory that one call may use beyond its result.
        progress: whether to show a progress bar of the precomputation.

    Raises:
        UnsupportedModelError: points of a batch influence each other, or the forward pass is
            random.
        InsufficientMemoryError: the factors would not fit into free memory. What entries alone need
            is checked when they are first asked for.
        RanksError: processes of a group passed different models, losses or options, or one of them
            has ended. An error of one of them is raised on all.
        TypeError, ValueError: the model, the loss or the data do not fit; the message says what to
            do about it.

    Examples:
        >>> H = hcurv.GaussNewton(model, torch.nn.CrossEntropyLoss(), inputs)
        >>> H[:10, [0, 5, 9]].shape, H.diagonal().shape, (H @ b).shape
        (torch.Size([10, 3]), torch.Size([51]), torch.Size([51]))
        >>> H[H.layout.select("0.bias"), H.layout.select("2.*")].shape
        torch.Size([6, 21])
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | Loss,
        data: Data,
        *,
        num_samples: int | None = None,
        fisher: Fisher = "exact",
        forward_fn: ForwardFunction | None = None,
        seed: int = 0,
        factors: Factors = "auto",
        process_group: ProcessGroup | None = None,
        workspace: int = 2**28,
        progress: bool = False,
    ) -> None:
        self._ranks = ranks_of(process_group)
        with self._ranks.agreed():
            _check_options(workspace, factors)
            choice = _row_choice(num_samples, fisher, check_seed(seed))
        self._ranks.same(factors=factors, workspace=int(workspace))
        problem = read_problem(
            model, loss, data, forward_fn=forward_fn, choice=choice, ranks=self._ranks
        )
        self._shard = Shard(self._ranks, problem.num_points)
        hidden = not progress or not self._ranks.first
        with (
            torch.no_grad(),
            tqdm(total=problem.num_points, unit="points", disable=hidden) as bar,
        ):
            root, problem, self._memory_plan = make_root(
                problem, self._shard, self._ranks, factors, int(workspace), bar.update
            )
            require_representable(problem, root, int(workspace))
        self._problem = problem
        self._points: Tensor | None = None
        self._point_weights: Tensor | None = None
        super().__init__(root, int(workspace))

    def __repr__(self) -> str:
        """Describe the size, the data and the memory in one line."""
        return (
            f"GaussNewton(N={self.shape[0]}, num_points={self.num_points},"
            f" loss={type(self._problem.loss).__name__}, dtype={self.dtype}, nbytes={self.nbytes}"
            + (", factors='recompute'" if self.factors == "recompute" else "")
            + (f", ranks={self._ranks.size}" if self._ranks.size > 1 else "")
            + ")"
        )

    @property
    def factors(self) -> Literal["memory", "recompute"]:
        """Whether layer Jacobians are kept in memory, or recomputed at each call.

        Examples:
            >>> H.factors
            'memory'
            >>> hcurv.GaussNewton(model, loss, inputs, factors="recompute").factors
            'recompute'
        """
        recomputed = isinstance(self._root, PointSum) and self._root.is_recomputed
        return "recompute" if recomputed else "memory"

    @property
    def num_passes(self) -> int:
        """How often this process has read its data so far.

        Examples:
            >>> again = hcurv.GaussNewton(model, loss, inputs, factors="recompute")
            >>> before = again.num_passes
            >>> products = again @ torch.eye(51).double()  # all columns share a pass
            >>> again.num_passes - before
            1
        """
        return self._problem.batches.num_passes

    @property
    def num_own_points(self) -> int:
        """The number of points that this process passed; the others of its group have the rest.

        Examples:
            >>> H.num_own_points  # there is one process
            20
        """
        return self._shard.num_own

    @property
    def network(self) -> Network | None:
        """The model as a chain of Linear layers, a snapshot; None if it is none."""
        return self._problem.network

    @property
    def loss_scale(self) -> float:
        """The number by which the loss multiplies the sum of the points' own losses.

        It is 1 for the reduction "sum", and 1/n for the mean of one loss for each of n points.
        """
        return self._problem.scale

    @property
    def point_shape(self) -> tuple[int, ...]:
        """The shape of the outputs of one point."""
        return self._problem.point_shape

    def memory_plan(self) -> MemoryPlan:
        """What is stored for each parameter, and in which form; it prints as a table.

        It was known before anything was allocated. ``stored_bytes`` is what the constructor stored,
        and ``later_bytes`` what is added when entries are first asked for.

        Examples:
            >>> H.memory_plan().stored_bytes == H.nbytes, H.memory_plan().later_bytes
            (True, 0)
        """
        return self._memory_plan

    def sample_entries(
        self, num_samples: int = 1000, scheme: Scheme = "importance", seed: int = 0
    ) -> SampledEntries:
        """Make a source of Monte Carlo entries (paper, Algorithm 3.1).

        Each entry costs O(n + q·num_samples) work.

        Args:
            num_samples: c, the number of samples per entry; `num_samples_for` gives it for a wanted
                accuracy.
            scheme: "importance", "stratified" or "uniform" (see `SampledEntries`).
            seed: the seed of all draws.

        Examples:
            >>> sampled = H.sample_entries(num_samples=20_000)
            >>> error = (sampled.block(range(3), range(3)) - H[:3, :3]).abs().max()
            >>> bool(error < 0.1 * H.diagonal().max())
            True
        """
        with torch.no_grad():
            return SampledEntries(self._root, num_samples, scheme, seed, self._workspace)

    def subsample(
        self, num_points: int, seed: int = 0, *, damping: DampingLike | None = None
    ) -> GaussNewton:
        """Estimate this matrix, without bias, from fewer points.

        ``num_points`` points are drawn with replacement and weighted by the inverse of their
        probabilities, so that the result is positive semi-definite. Without ``damping``, a point
        is drawn in proportion to ‖V(t)‖_F², its share in the trace: the result has the same trace,
        and E‖W − H‖_F² ≤ trace(H)²/num_points, which suits products. With ``damping``, it is drawn
        in proportion to its ridge leverage score tr(S_t (H + D)⁻¹ S_tᵀ), which keeps H + D
        spectrally and suits solves, variances and log-determinants. The scores are estimated at
        the cost of two or three products. A point that is drawn several times is stored once, so
        the result may hold fewer than ``num_points``; `points` says which.

        Args:
            num_points: the number of points to draw, at most n.
            seed: the seed of the draw.
            damping: D, positive: a number, a tensor (N,), or numbers by the names of parameters or
                layers; None to draw by norms.

        Returns:
            A `GaussNewton` over the drawn points; its entries and products are exact for them.

        Examples:
            >>> W = H.subsample(10)
            >>> W.num_points <= 10
            True
            >>> torch.allclose(W.diagonal().sum(), H.diagonal().sum())
            True
            >>> H.subsample(10, damping=1e-2).shape  # a subset to solve with, at this damping
            (51, 51)
        """
        num_points = check_count(num_points, "num_points", most=self.num_points)
        seed = check_seed(seed)
        with torch.no_grad():
            scores = self._point_scores(damping, seed)
            points, weights = draw_points(scores, num_points, seed)
            result = copy.copy(self)
            result._root = self._root.select(points, weights.sqrt().to(self.dtype))
            result._points = self.points[points]
            earlier = 1.0 if self._point_weights is None else self._point_weights[points]
            result._point_weights = weights * earlier
            return result

    def _point_scores(self, damping: DampingLike | None, seed: int) -> Tensor:
        """What points are drawn in proportion to, (n,)."""
        if damping is None:
            return self._root.point_norms()
        from hcurv.inversion.leverage import approximate_scores

        resolved = as_damping(damping, self.shape[0], self.layout)
        resolved.require_positive("leverage scores divide by it")
        return approximate_scores(self, resolved, seed)

    @property
    def points(self) -> Tensor:
        """The positions of this matrix's points in the data that it was built from, (n,)."""
        if self._points is None:
            return torch.arange(self.num_points, device=self.device)
        return self._points

    def factorize(
        self,
        damping: DampingLike,
        tolerance: float = 1e-2,
        *,
        method: Literal[
            "auto",
            "parameters",
            "samples",
            "iterations",
            "kronecker",
            "subset",
            "compressed",
            "compressed-samples",
        ] = "auto",
        seed: int = 0,
    ) -> Factorized:
        """Invert H + D, in the way that is predicted to be the fastest.

        Args:
            damping: D, positive: a number, a tensor (N,), or numbers by the names of parameters or
                layers.
            tolerance: relative error of solves. The two exact ways are as accurate as the
                precision of the model allows. The others run conjugate gradients on the exact H
                until the residual and the estimated error of every solve are below it.
            method: "parameters" factorizes the dense H + D, and "samples" the dense I + S D⁻¹ Sᵀ,
                which is smaller where n·q < N. The others differ in what preconditions conjugate
                gradients: "iterations" a low-rank sketch, "kronecker" EKFAC, "subset" some of the
                points, drawn by their leverage scores, "compressed" a hierarchical matrix of H, and
                "compressed-samples" one of S D⁻¹ Sᵀ. "auto" chooses; ``print(F.plan)`` shows what
                was weighed.
            seed: the seed of sketches and of draws.

        Returns:
            What solves, samples and has a log-determinant. Where the way is iterative, the
            log-determinant and the diagonal of the inverse are exact if a dense factorization is
            affordable, which is then made when they are first asked for; if not, they are estimated
            from random probes. ``F.accuracy`` says how accurate everything is.

        Raises:
            ValueError: the damping is not positive, or the tolerance is beyond the precision of
                the model.
            InsufficientMemoryError: there is no memory for the method that was asked for.

        Warns:
            AccuracyWarning: later, by a solve or a log-determinant that misses the tolerance.

        Examples:
            >>> F = H.factorize(1e-2)
            >>> x = F.solve(b)
            >>> torch.allclose(H @ x + 1e-2 * x, b)
            True
            >>> F.plan.chosen.name in ("parameters", "samples")
            True
            >>> iterative = H.factorize(1e-2, tolerance=1e-6, method="iterations")
            >>> bool((iterative.solve(b) - x).norm() < 1e-5 * x.norm())
            True
        """
        from hcurv.inversion.factorize import factorize

        return factorize(self, self._problem, damping, tolerance, method, check_seed(seed))

    def jacobian(self, inputs: Data) -> JacobianRows:
        """The Jacobian of the model's outputs at any inputs, as an operator (n·outputs, N).

        Args:
            inputs: inputs of n points, or an iterable of batches of them; targets are not used.

        Returns:
            What multiplies vectors, ``J @ v`` and ``J.T @ u``. Row i·outputs + a is the derivative
            of output a at point i. It belongs to the weights of this matrix, like everything here.

        Examples:
            >>> J = H.jacobian(inputs[:5])
            >>> J
            JacobianRows(num_points=5, rows_per_point=3, N=51, dtype=torch.float64)
            >>> variances = H.factorize(1e-2).quadratic(J, diagonal=True)  # of 15 outputs
        """
        return jacobian_rows(self._problem, inputs, self._workspace)

    def point_gradients(
        self, inputs: Data, targets: Tensor | None = None, *, loss: Loss | None = None
    ) -> JacobianRows:
        """The gradient of each point's own loss, as an operator (n, N) that is never formed.

        The loss of a point is not divided by anything, whatever its reduction is: for "sum", the
        rows add up to the gradient of the loss over these points.

        Args:
            inputs: inputs of n points; or a tuple (inputs, targets) or an iterable of batches.
            targets: the targets of these points, if they are not part of ``inputs``.
            loss: another function of the outputs, whose `Loss.gradient` is used; that of the
                matrix if None.

        Raises:
            ValueError: there are no targets, or they do not fit.

        Examples:
            >>> G = H.point_gradients(inputs, targets)
            >>> G.shape, torch.allclose(G.T @ torch.ones(20).double() / 20, H.gradient())
            ((20, 51), True)
        """
        data = inputs if targets is None else (inputs, targets)
        if loss is not None and not hasattr(loss, "gradient"):
            raise TypeError(f"loss must be a hcurv.losses.Loss or None; got {type(loss).__name__}")
        problem = self._problem if loss is None else replace(self._problem, loss=loss)
        return gradient_rows(problem, data, self._workspace)  # type: ignore[arg-type]

    def gradient(self, targets: Tensor | None = None) -> Tensor:
        """Compute the flat gradient of the loss, with its reduction, over the data, (N,).

        Args:
            targets: the targets of all points, in the order of the data. They may be left out if
                the data came with targets. With a process group, each rank passes the targets of
                its own points. A matrix made by `subsample` takes the targets of its `points` and
                estimates the gradient over all of the data.

        Raises:
            ValueError: there are no targets, or they do not fit.

        Examples:
            >>> loss(model(inputs), targets).backward()
            >>> flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            >>> torch.allclose(H.gradient(), flat)
            True
        """
        weighted = WeightedPoints(self._shard, self._ranks, self.points, self._point_weights)
        with torch.no_grad():
            return loss_gradient(self._problem, self._root, weighted, targets, self._workspace)


def _check_options(workspace: int, factors: Factors) -> None:
    """Refuse options that mean nothing."""
    if check_count(workspace, "workspace", least=0) < MIN_WORKSPACE:
        raise ValueError(f"workspace must be at least {MIN_WORKSPACE} bytes; got {workspace}")
    if factors not in ("auto", "memory", "recompute"):
        raise ValueError(f'factors must be "auto", "memory" or "recompute"; got {factors!r}')


def _row_choice(num_samples: int | None, fisher: Fisher, seed: int) -> RowChoice:
    """Check which rows of R are asked for."""
    if fisher not in ("exact", "empirical"):
        raise ValueError(f'fisher must be "exact" or "empirical"; got {fisher!r}')
    if num_samples is not None:
        num_samples = check_count(num_samples, "num_samples")
        if fisher == "empirical":
            raise ValueError(
                'num_samples= draws targets from the model, fisher="empirical" takes those of the'
                " data: pass one of them"
            )
    return RowChoice(num_samples, fisher, seed)
