"""Influence functions: by how much would a prediction change without some training points?

With the training objective w Σ_i f_i(θ) + ½ θᵀDθ, where f_i is the loss of point i and w what the
reduction multiplies by (1, or 1/n for a mean), leaving out point i moves the minimum by
(H + D)⁻¹ w ∇f_i to first order, and a measurement m_q of a query q by

    score[q, i] = w ∇m_qᵀ (H + D)⁻¹ ∇f_i.

It is computed from the right: one solve for each query, and a product with the gradients of the
training points, which are never formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hcurv.applications.damping_choice import rank_correlations
from hcurv.applications.fingerprints import Ingredients, require_same_data
from hcurv.applications.influence_measure import Measure, MeasureLoss, with_some_targets
from hcurv.applications.nearby_systems import solve_at_other_damping, solve_without_points
from hcurv.applications.point_groups import check_groups, group_sums
from hcurv.applications.score_file import SharedScoreFile
from hcurv.applications.training_gradients import TrainingGradients
from hcurv.arguments import check_number
from hcurv.factorized import Factorized
from hcurv.indexing import Index, check_count, check_seed, resolve_indices
from hcurv.network.batches import Data
from hcurv.network.gauss_newton import GaussNewton
from hcurv.network.jacobian_rows import JacobianRows
from hcurv.precision import FullPrecision
from hcurv.ranks import OneRank
from hcurv.user_warnings import warn_user

__all__ = ["Influence", "InfluenceWarning", "InfluentialPoints"]

# So many queries are solved for at a time, if their vectors have no more floats than that.
_PANEL_QUERIES, _PANEL_FLOATS = 256, 2**25
# The dependence on the damping is measured on the first queries, by their scores at half and at
# twice the damping. It is warned about below this rank correlation. Classifiers of digits have
# 0.85 to 0.93 at dampings from 1e-2 to 1e-5 times the largest eigenvalue.
_CHECKED_QUERIES, _FACTORS, _LEAST_CORRELATION = 4, (0.5, 2.0), 0.9


class InfluenceWarning(UserWarning):
    """Influence scores depend on the damping. The message says how much, and what to do.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("ignore", hcurv.InfluenceWarning)
    """


@dataclass(frozen=True)
class InfluentialPoints:
    """The training points that matter most for each query, the most important first.

    Attributes:
        points: their positions in the training data, (m, k).
        scores: their scores, (m, k).

    Examples:
        >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
        >>> found = infl.top((inputs[:5], targets[:5]), k=3)
        >>> found.points.shape, bool((found.scores[:, 0] >= found.scores[:, 1]).all())
        (torch.Size([5, 3]), True)
    """

    points: Tensor
    scores: Tensor


class Influence(FullPrecision):
    """Influence of training points on queries. Made by `hcurv.influence`.

    Attributes:
        matrix: H, the exact Gauss-Newton Hessian over the training points.
        factorized: the inverse of H + D; ``print(infl.factorized.plan)`` says how it is computed.

    Examples:
        >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
        >>> infl
        Influence(num_points=20, N=51, damping=0.1)
        >>> scores = infl.scores((inputs[:5], targets[:5]))
        >>> helpful = scores.argmax(1)  # the training point that each query would miss most
    """

    def __init__(
        self,
        matrix: GaussNewton,
        curvature: Any,
        factorized: Factorized,
        gradients: TrainingGradients,
        made_of: Ingredients,
        check_damping: bool,
    ) -> None:
        self.matrix, self.factorized = matrix, factorized
        self._curvature, self._gradients, self._made_of = curvature, gradients, made_of
        self._check_pending = check_damping

    @property
    def num_points(self) -> int:
        """The number n of training points, of all ranks if there are several."""
        return self._gradients.num_points

    @property
    def _ranks(self) -> OneRank:
        return self.matrix.ranks

    @property
    def damping(self) -> float | Tensor:
        """D, as it was given or chosen."""
        return self.factorized.damping

    def __repr__(self) -> str:
        """Size and damping in one line."""
        damping = f"{self.damping:.3g}" if isinstance(self.damping, float) else "for each row"
        return (
            f"Influence(num_points={self.num_points}, N={self.matrix.shape[0]}, damping={damping})"
        )

    def scores(
        self,
        queries: Data,
        *,
        measure: Measure | None = None,
        groups: Tensor | Sequence[int] | None = None,
        path: str | PathLike[str] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Predict what leaving out training points would change at some queries, (m, n).

        Entry (q, i) is w ∇m_qᵀ (H + D)⁻¹ ∇f_i: to first order, the measurement at query q would be
        larger by this if training point i had been left out. If the measurement is the loss,
        positive scores mean that the point helps.

        Both sides are streamed: no matrix of queries or of training points times parameters is
        formed.

        Args:
            queries: m points with targets, as a tuple or as batches. Targets are not needed if
                ``measure`` does not use them.
            measure: a function of outputs (b, *shape) and targets that returns a number for each
                point, (b,), and is differentiable with respect to the outputs. None for the loss
                of the point, which is not divided by anything, whatever its reduction is.
            groups: a number from 0 to g - 1 for each training point. The scores of a group are
                added up, (m, g): the first-order effect of leaving out all of its points. With a
                process group, each rank passes those of its own points.
            path: a file to write the scores to, in the format of safetensors (the tensor
                ``scores``). A run that was interrupted continues where it stopped if it is called
                again in the same way. The result is then read from the file when it is used. With a
                process group, the first rank writes it, to a folder that all of them can read.
            progress: whether to show a progress bar over the queries.

        Raises:
            ValueError: the queries have no targets, groups do not fit, or the file was made for
                other scores.
            FileFormatError: the file is damaged, or holds something else.

        Warns:
            InfluenceWarning: the ranks of the scores depend on the damping. It is checked once.

        Examples:
            >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
            >>> margin = lambda outputs, labels: outputs[:, 0] - outputs[:, 1]
            >>> infl.scores(inputs[:5], measure=margin).shape
            torch.Size([5, 20])
            >>> infl.scores((inputs[:5], targets[:5]), groups=targets).shape  # by class
            torch.Size([5, 3])
        """
        rows = self._query_rows(queries, measure)
        members = None if groups is None else self._members(groups)
        width = self.num_points if members is None else int(members.max()) + 1
        shape = (rows.num_points, width)
        if path is None:
            result = torch.empty(shape, dtype=self.matrix.dtype, device=self.matrix.device)
            for points, values in self._panels(rows, None, progress):
                result[points] = group_sums(values, members, width)
            return result
        settings = self._made_of.describe(
            self.factorized.damping,
            self._curvature,
            self.matrix.dtype,
            queries,
            measure,
            members,
            self._ranks,
        )
        file = SharedScoreFile(path, settings, shape, self.matrix.dtype, self._ranks)
        if not file.is_complete:
            for points, values in self._panels(rows, file.known, progress):
                file.write(points, group_sums(values, members, width))
        return file.finish()

    def _members(self, groups: Tensor | Sequence[int]) -> Tensor:
        """The groups of all points, of which each rank was given those of its own."""
        with self._ranks.agreed():
            own = check_groups(groups, self.matrix.num_own_points, self.matrix.device)
        return self._gradients.gather(own)

    def top(
        self,
        queries: Data,
        k: int = 10,
        *,
        harmful: bool = False,
        measure: Measure | None = None,
        progress: bool = False,
    ) -> InfluentialPoints:
        """Find the k training points with the largest scores for each query.

        Args:
            queries: as for `scores`.
            k: the number of points for each query.
            harmful: find those with the smallest scores instead, the smallest first.
            measure: as for `scores`.
            progress: whether to show a progress bar over the queries.

        Examples:
            >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
            >>> queries = (inputs[:5], targets[:5])
            >>> helpful = infl.top(queries, k=3)
            >>> harmful = infl.top(queries, k=3, harmful=True)
            >>> bool((harmful.scores < helpful.scores).all())
            True
        """
        k = check_count(k, "k", most=self.num_points)
        rows = self._query_rows(queries, measure)
        found = [
            values.topk(k, largest=not harmful) for _, values in self._panels(rows, None, progress)
        ]
        points = torch.cat([part.indices for part in found])
        return InfluentialPoints(points, torch.cat([part.values for part in found]))

    def self_scores(
        self, *, num_samples: int | None = None, seed: int = 0, progress: bool = False
    ) -> Tensor:
        """The influence of each training point on its own loss, w ∇f_iᵀ (H + D)⁻¹ ∇f_i, (n,).

        Large values belong to points that only they themselves explain: rare or mislabelled ones.

        Args:
            num_samples: estimate the scores from so many samples of the weights, at the cost of one
                solve for each of them instead of one for each point. The estimates are unbiased,
                with a relative standard error of √(2/num_samples). None for the exact scores.
            seed: the seed of the samples.
            progress: whether to show a progress bar.

        Examples:
            >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
            >>> suspicious = infl.self_scores().argsort(descending=True)
            >>> rough = infl.self_scores(num_samples=1000)
            >>> torch.allclose(rough, infl.self_scores(), rtol=0.3)
            True
        """
        if num_samples is None:
            return self.matrix.loss_scale * self._self_products(progress)
        num_samples = check_count(num_samples, "num_samples")
        generator = torch.Generator().manual_seed(check_seed(seed))
        total = torch.zeros(self.num_points, dtype=torch.float64, device=self.matrix.device)
        hidden = not progress or not self._ranks.first
        with tqdm(total=num_samples, unit="samples", disable=hidden) as bar:
            for first in range(0, num_samples, self._panel):
                count = min(self._panel, num_samples - first)
                weights = self.factorized.sample(count, generator)
                total += (self._gradients @ weights.T.contiguous()).double().square().sum(1)
                bar.update(count)
        return (self.matrix.loss_scale / num_samples * total).to(self.matrix.dtype)

    def _self_products(self, progress: bool) -> Tensor:
        """∇f_iᵀ (H + D)⁻¹ ∇f_i of all training points, (n,)."""
        own = self._gradients.own
        if self._ranks.size == 1 and own is not None:
            return self.factorized.point_covariances(own, progress).reshape(-1)
        result = torch.empty(self.num_points, dtype=self.matrix.dtype, device=self.matrix.device)
        hidden = not progress or not self._ranks.first
        with torch.no_grad(), tqdm(total=self.num_points, unit="points", disable=hidden) as bar:
            for points, gradients in self._gradients.panels(self._panel):
                result[points] = self.factorized.quadratic(gradients, diagonal=True)
                bar.update(len(gradients))
        return result

    def leave_out(self, points: Index, queries: Data, *, measure: Measure | None = None) -> Tensor:
        """Predict what leaving out all of these training points together would change, (m,).

        Sums of scores are of first order: they take the curvature of all points, also of those that
        are left out. This takes the curvature H₋ of the points that stay, which is one Gauss-Newton
        step of training without the others: ∇m_qᵀ (H₋ + D)⁻¹ w Σ_i ∇f_i. It is exact for linear
        models with a squared error and weight decay, and costs one solve for each set of points.

        Args:
            points: the positions of the points to leave out in the training data: integers, a
                slice, or a mask (n,).
            queries: as for `scores`.
            measure: as for `scores`.

        Raises:
            IndexError: there is no such point.
            ValueError: no point would stay.

        Examples:
            >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
            >>> queries = (inputs[:5], targets[:5])
            >>> helpful = infl.top(queries, k=3)
            >>> together = infl.leave_out(helpful.points[0], queries)
            >>> bool(together[0] > helpful.scores[0].sum())
            True
        """
        matrix = self.matrix
        index = resolve_indices(points, self.num_points, matrix.device, "points").unique()
        if len(index) == self.num_points:
            raise ValueError("at least one training point must stay")
        rows = self._query_rows(queries, measure)
        chosen = torch.zeros(self.num_points, 1, dtype=matrix.dtype, device=matrix.device)
        chosen[index] = matrix.loss_scale
        with torch.no_grad():
            if not len(index):
                return chosen.new_zeros(rows.num_points)
            column = self._gradients.transposed_product(chosen)
            step = solve_without_points(
                matrix, self.factorized, column, index, self._made_of.tolerance
            )
            return (rows @ step).squeeze(1)

    def damping_sensitivity(
        self, queries: Data, *, measure: Measure | None = None, factors: Sequence[float] = _FACTORS
    ) -> dict[float, float]:
        """Measure how much the order of the training points depends on the damping.

        Args:
            queries: a few points, as for `scores`; all of them are solved for at once.
            measure: as for `scores`.
            factors: the damping is multiplied by each of these.

        Returns:
            For each factor, the mean over the queries of the rank correlation between the scores at
            the damping and those at the damping times the factor.

        Examples:
            >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
            >>> found = infl.damping_sensitivity((inputs[:2], targets[:2]))
            >>> list(found), all(0 < value <= 1 for value in found.values())
            ([0.5, 2.0], True)
        """
        if isinstance(factors, str) or not isinstance(factors, Sequence):
            raise TypeError(f"factors must be a list of numbers; got {type(factors).__name__}")
        checked = [check_number(factor, "factors", above=0) for factor in factors]
        columns = self._query_rows(queries, measure).to_dense().T.contiguous()
        with torch.no_grad():
            scores = (self._gradients @ self.factorized.solve(columns)).T
            return self._sensitivity(columns, scores, checked)

    def _sensitivity(
        self, columns: Tensor, scores: Tensor, factors: Sequence[float]
    ) -> dict[float, float]:
        """Rank correlations of scores (k, n) with those at other dampings, for columns (N, k)."""
        found = {}
        for factor in factors:
            if not factor > 0:
                raise ValueError(f"factors must be positive; got {factor}")
            solved = solve_at_other_damping(
                self._curvature, self.factorized, columns, factor, self._made_of.tolerance
            )
            other = (self._gradients @ solved).T
            found[float(factor)] = float(rank_correlations(scores, other).mean())
        return found

    def _query_rows(self, queries: Data, measure: Measure | None) -> JacobianRows:
        """The gradients of the measurements at the queries, which all ranks must have alike."""
        require_same_data(self._ranks, queries, self.matrix.dtype, "the queries")
        if measure is None:
            return self.matrix.point_gradients(queries)
        if not callable(measure):
            raise TypeError(
                f"measure must be a function of outputs and targets; got {type(measure).__name__}"
            )
        data, has_targets = with_some_targets(queries)
        loss = MeasureLoss(measure, self.matrix.point_shape, has_targets)
        return self.matrix.point_gradients(data, loss=loss)

    @property
    def _panel(self) -> int:
        """The number of vectors that are solved for at a time."""
        longest = max(self.matrix.shape[0], self.num_points)
        return max(1, min(_PANEL_QUERIES, _PANEL_FLOATS // longest))

    def _panels(
        self, rows: JacobianRows, known: Tensor | None, progress: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores (b, n) of some queries at a time; leave out those that are known."""
        hidden = not progress or not self._ranks.first
        with (
            torch.no_grad(),
            tqdm(total=rows.num_points, unit="queries", disable=hidden) as bar,
        ):
            for chunk in rows.chunks(self._panel):
                if known is None or not bool(known[chunk.points].all()):
                    columns = chunk.to_dense().T.contiguous()
                    values = (self._gradients @ self.factorized.solve(columns)).T
                    if self._check_pending:
                        self._check_pending = False
                        self._warn_of_damping(
                            columns[:, :_CHECKED_QUERIES], values[:_CHECKED_QUERIES]
                        )
                    yield chunk.points, self.matrix.loss_scale * values
                bar.update(chunk.root.num_points)

    def _warn_of_damping(self, columns: Tensor, scores: Tensor) -> None:
        found = self._sensitivity(columns.contiguous(), scores, _FACTORS)
        if min(found.values()) >= _LEAST_CORRELATION or not self._ranks.first:
            return
        shown = f"{self.damping:.2g}" if isinstance(self.damping, float) else "given for each row"
        smaller, larger = (f"{found[factor]:.2f}" for factor in _FACTORS)
        warn_user(
            f"influence scores depend on the damping, which is {shown}: their mean rank correlation"
            f" with those at half of it is {smaller}, and at twice {larger}. If the model"
            " was trained with weight decay, pass that as damping=; else compare several values."
            " check_damping=False turns this check off",
            InfluenceWarning,
        )
