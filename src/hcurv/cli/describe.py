"""Describe saved matrices and factorizations, for JSON and for people."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from hcurv.hierarchical import Factorization, HMatrix, load
from hcurv.memory import format_bytes

__all__ = ["describe", "facts_of", "load_matrix", "rank_rows"]


def load_matrix(path: Path) -> HMatrix:
    """Read a compressed matrix.

    Raises:
        FileNotFoundError, FileFormatError: there is no such matrix.
        TypeError: the file holds a factorization.
    """
    stored = load(path)
    if not isinstance(stored, HMatrix):
        raise TypeError(f"{path} is a factorization: the compressed matrix itself is needed")
    return stored


def describe(stored: HMatrix | Factorization) -> dict[str, Any]:
    """Describe everything except the values, as numbers and strings."""
    tree = stored.tree
    shared = {
        "kind": type(stored).__name__,
        "size": stored.shape[0],
        "dtype": str(stored.dtype).removeprefix("torch."),
        "num_stored": stored.num_stored,
        "nbytes": stored.nbytes,
        "compression_rate": stored.compression_rate,
        "num_tree_rows": tree.num_kept,
        "depth": tree.depth,
        "ordering": tree.ordering,
    }
    if isinstance(stored, Factorization):
        return {
            **shared,
            "damping": stored.damping,
            "log_determinant": float(stored.logdet()),
            "num_negative": stored.num_negative,
        }
    record = asdict(stored.record)
    return {
        **shared,
        "estimated_error": stored.estimated_error,
        "global_rank": stored.global_rank,
        "ranks": [_summary(level, ranks) for level, ranks in enumerate(stored.ranks, start=1)],
        "plan": record.pop("plan"),
        "seconds": record.pop("seconds"),
        "settings": {name: value for name, value in record.items() if name != "estimated_error"},
    }


def _summary(level: int, ranks: Tensor) -> dict[str, float | int]:
    values = ranks.double()
    return {
        "level": level,
        "nodes": ranks.numel(),
        "min": int(ranks.min()),
        "mean": float(values.mean()),
        "max": int(ranks.max()),
    }


def facts_of(stored: HMatrix | Factorization) -> list[tuple[str, str]]:
    """Describe the same for people: a name and a text for each line."""
    size, tree = stored.shape[0], stored.tree
    dense = format_bytes(size**2 * stored.dtype.itemsize)
    shape = f"depth {tree.depth}, ordering {tree.ordering}"
    if isinstance(stored, HMatrix):
        shape += f", leaves of up to {stored.record.leaf_size} rows"
    alone = "a diagonal" if tree.num_kept else "none"
    shared = [
        ("kind", type(stored).__name__),
        ("N", str(size)),
        ("type", str(stored.dtype).removeprefix("torch.")),
        (
            "stored",
            f"{stored.compression_rate:.4%} of N², {format_bytes(stored.nbytes)} (dense: {dense})",
        ),
        ("tree", f"{tree.num_kept} rows, {shape}" if tree.has_clusters else alone),
    ]
    if isinstance(stored, Factorization):
        return [
            *shared,
            ("damping", f"{stored.damping:.6g}"),
            ("log-determinant", f"{float(stored.logdet()):.10g}"),
            ("negative", f"{stored.num_negative} eigenvalues"),
        ]
    record = stored.record
    damped, aim = "not for solves with a certain damping", "asked for"
    if record.damping is not None and record.damped_error is not None:
        aim = "aimed at"
        asked = f", {record.damped_tolerance:.2e} asked for" if record.damped_tolerance else ""
        damped = (
            f"for solves with damping {record.damping:.6g}, variances wrong by"
            f" {record.damped_error.variance:.2e} (estimated{asked})"
        )
    return [
        *shared,
        ("global rank", str(stored.global_rank)),
        ("error", f"{stored.estimated_error:.2e} estimated, {record.tolerance:.2e} {aim}"),
        ("compressed", damped),
        (
            "settings",
            f"method {record.method}, seed {record.seed}, max rank"
            f" {'unlimited' if record.max_rank is None else record.max_rank}",
        ),
    ]


def rank_rows(matrix: HMatrix) -> list[tuple[str, ...]]:
    """Make the rows of a table: level, nodes, and the smallest, mean and largest rank."""
    rows = [_summary(level, ranks) for level, ranks in enumerate(matrix.ranks, start=1)]
    return [
        (str(r["level"]), str(r["nodes"]), str(r["min"]), f"{r['mean']:.1f}", str(r["max"]))
        for r in rows
    ]
