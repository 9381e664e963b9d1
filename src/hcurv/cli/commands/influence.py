"""``hcurv influence``: find the training points that matter for some queries."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hcurv.cli import options
from hcurv.cli.output import (
    check_out,
    facts_of,
    print_document,
    print_json,
    print_table,
    shows_progress,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hcurv.applications.influence_scores import Influence, InfluentialPoints

__all__ = ["EXAMPLES", "influence"]

EXAMPLES = (
    "hcurv influence W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --queries Q.npz --top 5",
    "hcurv influence W.safetensors --data mnist --num-points 5000 --activation relu"
    " --loss cross-entropy --queries test --num-queries 4 --picture influence.png",
    "hcurv influence W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --queries Q.npz --damping 1e-3 --out scores.safetensors",
    "hcurv influence W.safetensors --data X.npz --activation relu --loss cross-entropy"
    " --self-scores --out self.npy",
)
# Names of data sets of which there is a test set.
_WITH_TEST = ("mnist", "fashion-mnist", "cifar10")
_COLUMNS = ("query", "helpful points (scores)", "harmful points (scores)")


def influence(
    weights: options.Weights = None,
    *,
    data: options.Data,
    loss: options.Loss,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|test",
            help="Points with targets whose losses are explained, as for --data; or test, the test"
            " set of mnist, fashion-mnist or cifar10.",
        ),
    ] = None,
    num_queries: Annotated[
        int | None, typer.Option(min=1, help="Use the first queries only.")
    ] = None,
    self_scores: Annotated[
        bool,
        typer.Option(
            "--self-scores",
            help="Instead: the influence of each training point on itself. Mislabelled points have"
            " large values.",
        ),
    ] = False,
    damping: Annotated[
        float | None,
        typer.Option(
            help="Added to the diagonal; the weight decay, if there was any. By default ten times"
            " the mean diagonal entry.",
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Relative error of solves.")] = 3e-3,
    top: Annotated[
        int, typer.Option(min=1, help="Show so many helpful and harmful points of each query.")
    ] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write all scores, (queries, points), .safetensors; a run that was interrupted"
            " continues. With --self-scores an .npy file."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the queries, which are images, beside these points: .png, .svg or .pdf;"
            " .html for a page with all results."
        ),
    ] = None,
    activation: options.Activation = None,
    output_activation: options.OutputActivation = None,
    model: options.Factory = None,
    dtype: options.Dtype = None,
    data_dir: options.DataFolder = None,
    num_points: options.NumPoints = None,
    seed: options.Seed = 0,
    progress: options.Progress = None,
    as_json: options.Json = False,
) -> None:
    """Find the training points that matter for the losses of some queries.

    A positive score means that the point helps: without it, the loss of the query would be higher
    by about the score.
    """
    if (queries is None) != self_scores:
        raise typer.BadParameter("one of --queries and --self-scores is needed")
    if picture is not None and self_scores:
        raise typer.BadParameter("--picture is for --queries")
    given = options.Given(
        weights,
        model,
        activation,
        output_activation,
        dtype,
        loss,
        data,
        data_dir,
        num_points,
    )
    endings = (".npy",) if self_scores else (".safetensors",)
    target = check_out(out, *given.files, queries, suffixes=endings)
    from hcurv.report.picture import PICTURE_ENDINGS

    check_out(picture, *given.files, queries, suffixes=PICTURE_ENDINGS)
    import hcurv
    from hcurv.cli.problem import read_problem

    problem = read_problem(given)
    asked = None if queries is None else _read_queries(given, queries, num_queries)
    shown = shows_progress(progress)
    start = time.perf_counter()
    infl = hcurv.influence(
        problem.model,
        problem.loss,
        problem.data,
        damping,
        tolerance=tolerance,
        seed=seed,
        progress=shown,
    )
    document: dict[str, Any] = {
        "size": infl.matrix.shape[0],
        "num_points": infl.num_points,
        "damping": infl.damping,
    }
    if infl.factorized.plan is not None:
        document["way"] = infl.factorized.plan.chosen.description
    if asked is None:
        _show_self_scores(infl, document, top, target, shown, as_json, start)
        return
    if top > infl.num_points:
        raise ValueError(f"--top {top} is more than there are points, {infl.num_points}")
    scores = infl.scores(asked, path=target, progress=shown)
    helpful, harmful = (_extreme(scores, top, largest) for largest in (True, False))
    document |= {"num_queries": len(asked[0]), "seconds": time.perf_counter() - start}
    document |= {"file": target, "picture": picture}
    rows = [(str(q), _listed(helpful, q), _listed(harmful, q)) for q in range(len(helpful.points))]
    if picture is not None:
        assert isinstance(problem.data, tuple)
        _draw(picture, asked, problem.data, helpful, harmful, rows, facts_of(document))
    if as_json:
        found = {
            "helpful": helpful.points,
            "helpful_scores": helpful.scores,
            "harmful": harmful.points,
            "harmful_scores": harmful.scores,
        }
        print_json({**document, **found})
        return
    print_table(_COLUMNS, rows)
    print_document(document, as_json)


def _read_queries(given: options.Given, queries: str, count: int | None) -> tuple[Tensor, Tensor]:
    """Read points with targets in the same way as the training points."""
    from hcurv.cli.problem import read_problem

    if queries == "test" and given.data in _WITH_TEST:
        from hcurv.experiments import datasets

        readers = (datasets.mnist, datasets.fashion_mnist, datasets.cifar10)
        read = readers[_WITH_TEST.index(given.data)]
        inputs, labels = read(given.data_dir, train=False)
        dtype = read_problem(replace(given, num_points=1)).data[0].dtype
        return inputs[:count].to(dtype), labels[:count]
    found = read_problem(replace(given, data=queries, num_points=count)).data
    if not isinstance(found, tuple):
        raise ValueError(f"{queries} has no targets, which the losses of queries need")
    return found


def _extreme(scores: Tensor, count: int, largest: bool) -> InfluentialPoints:
    """The largest or smallest scores of each query, and the points that they belong to."""
    from hcurv.applications.influence_scores import InfluentialPoints

    found = scores.topk(count, largest=largest)
    return InfluentialPoints(found.indices, found.values)


def _listed(found: InfluentialPoints, query: int) -> str:
    pairs = zip(found.points[query].tolist(), found.scores[query].tolist(), strict=True)
    return ", ".join(f"{point} ({score:+.1e})" for point, score in pairs)


def _show_self_scores(
    infl: Influence,
    document: dict[str, Any],
    top: int,
    target: Path | None,
    progress: bool,
    as_json: bool,
    start: float,
) -> None:
    from hcurv.cli.arrays import write_array

    values = infl.self_scores(progress=progress)
    largest = values.topk(min(top, len(values)))
    if target is not None:
        write_array(target, values)
    document |= {"seconds": time.perf_counter() - start, "file": target}
    if as_json:
        print_json({**document, "points": largest.indices, "self_scores": largest.values})
        return
    pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
    print_table(("point", "self score"), [(str(point), f"{score:.3e}") for point, score in pairs])
    print_document(document, as_json)


def _draw(
    picture: Path,
    queries: tuple[Tensor, Tensor],
    training: tuple[Tensor, Tensor],
    helpful: InfluentialPoints,
    harmful: InfluentialPoints,
    rows: list[tuple[str, str, str]],
    facts: list[tuple[str, str]],
) -> None:
    from hcurv.report.influential_images import draw_influential_images
    from hcurv.report.picture import ResultPage, save_picture

    words = ResultPage(
        "Which training points matter?",
        f"The training points that help and harm {len(queries[0])} queries most.",
        "Each query, then its most helpful (blue) and its most harmful (red) training points, with"
        " their labels and scores.",
        facts,
        _COLUMNS,
        rows,
        text=2,
    )
    found = (helpful.points, helpful.scores), (harmful.points, harmful.scores)
    save_picture(picture, lambda: draw_influential_images(queries, training, *found), words)
