"""Influence scores as the files that kronfluence writes, for tools that read these.

kronfluence keeps the scores of a run in one folder, ``<output_dir>/<analysis>/scores_<name>``, in
safetensors files: pairwise scores (query, train) and scores of training points on themselves
(train,). Scores of all layers together have the name "all_modules". Its signs are those of
`hcurv.influence`: a positive score belongs to a point that helps.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch import Tensor

from hcurv.files import write_atomically

__all__ = ["save_pairwise_scores", "save_self_scores"]

_ALL_MODULES = "all_modules"


def save_pairwise_scores(scores: Tensor, folder: str | PathLike[str]) -> Path:
    """Write scores of training points on queries to ``pairwise_scores.safetensors``.

    Args:
        scores: (queries, training points), as `Influence.scores` gives them. Multiplied by the
            number of training points, they are on the scale of kronfluence, which does not divide
            the gradients by it.
        folder: an existing folder, such as ``analyzer.scores_output_dir("name")``.

    Returns:
        The path of the file. ``analyzer.load_pairwise_scores("name")`` reads it.

    Examples:
        >>> from hcurv.interop.kronfluence import save_pairwise_scores
        >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
        >>> scores = infl.scores((inputs[:5], targets[:5]))
        >>> save_pairwise_scores(scores, ".").name
        'pairwise_scores.safetensors'
    """
    return _save(scores, 2, "(queries, training points)", folder, "pairwise_scores")


def save_self_scores(scores: Tensor, folder: str | PathLike[str]) -> Path:
    """Write scores of training points on themselves to ``self_scores.safetensors``.

    Args:
        scores: (training points,), as `Influence.self_scores` gives them.
        folder: as for `save_pairwise_scores`.

    Returns:
        The path of the file. ``analyzer.load_self_scores("name")`` reads it.

    Examples:
        >>> from hcurv.interop.kronfluence import save_self_scores
        >>> infl = hcurv.influence(model, loss, (inputs, targets), damping=0.1)
        >>> save_self_scores(infl.self_scores(), ".").name
        'self_scores.safetensors'
    """
    return _save(scores, 1, "(training points,)", folder, "self_scores")


def _save(
    scores: Tensor, num_dimensions: int, shape: str, folder: str | PathLike[str], name: str
) -> Path:
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise TypeError(f"scores must be a tensor of floats; got {type(scores).__name__}")
    if scores.ndim != num_dimensions:
        raise ValueError(f"scores must have the shape {shape}; got {tuple(scores.shape)}")
    place = Path(folder)
    if not place.is_dir():
        raise FileNotFoundError(f"no such folder: {place.absolute()}")
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "files need the package safetensors: pip install 'hcurv[files]'", name=error.name
        ) from error
    path = place / f"{name}.safetensors"
    values = scores.detach().cpu().contiguous()
    write_atomically(path, lambda target: save_file({_ALL_MODULES: values}, target))
    return path
