"""Files of matrices and factorizations: which tensors and which description they are stored as.

Tensors are named after the parts that they belong to, for example ``levels.0.bases.1.weights``.
`file_format` writes and reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from hcurv.damping import Damping
from hcurv.hierarchical.matrix.build_record import BuildRecord, DampedError
from hcurv.hierarchical.matrix.file_format import (
    FLOAT_TYPES,
    FileFormatError,
    make_tree,
    read_file,
    write_file,
)
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.parts.global_part import GlobalPart, GlobalUpdate
from hcurv.hierarchical.parts.levels import Basis, Coupling, LeafBlocks, Level
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.solving.elimination import Elimination, LevelFactor, Split
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.layout import ParameterLayout

__all__ = [
    "FACTORIZATION",
    "MATRIX",
    "FileFormatError",
    "coupling_tensors",
    "describe_matrix",
    "level_tensors",
    "make_factorization",
    "make_matrix",
    "make_record",
    "matrix_parts",
    "matrix_tensors",
    "read_couplings",
    "read_file",
    "read_layout",
    "read_level",
    "save",
    "write_file",
]

# The names of the two formats.
MATRIX, FACTORIZATION = "hcurv.HMatrix", "hcurv.Factorization"


def save(stored: HMatrix | Factorization, path: str | PathLike[str]) -> None:
    """Write a file; an existing one is replaced only once the new one is complete."""
    if isinstance(stored, HMatrix):
        write_file(stored, path, MATRIX, matrix_tensors(stored), describe_matrix(stored))
    else:
        description = _describe_factors(stored)
        write_file(stored, path, FACTORIZATION, _factor_tensors(stored), description)


def matrix_tensors(matrix: HMatrix) -> dict[str, Tensor]:
    """Return the tensors of a matrix by name, apart from those that follow from others."""
    tensors = {"leaves.values": matrix.leaves.values}
    if matrix.global_part is not None:
        tensors["global.rows"] = matrix.global_part.rows
        tensors["global.factor"] = matrix.global_part.factor
    for number, level in enumerate(matrix.levels):
        tensors |= level_tensors(f"levels.{number}", level)
    return tensors


def coupling_tensors(name: str, couplings: tuple[Coupling, ...]) -> dict[str, Tensor]:
    """Return the tensors of couplings, named after the place where they belong."""
    tensors = {}
    for place, coupling in enumerate(couplings):
        tensors[f"{name}.{place}.pairs"] = coupling.pairs
        tensors[f"{name}.{place}.values"] = coupling.values
    return tensors


def read_couplings(
    tensors: Mapping[str, Tensor], name: str, count: int, sizes: Tensor
) -> tuple[Coupling, ...]:
    """Return the couplings that `coupling_tensors` named, between nodes of the given sizes."""
    return tuple(
        Coupling.of(tensors[f"{name}.{place}.pairs"], sizes, tensors[f"{name}.{place}.values"])
        for place in range(count)
    )


def level_tensors(name: str, level: Level) -> dict[str, Tensor]:
    """Return the tensors of a level, named after the place where it belongs."""
    tensors = {f"{name}.ranks": level.ranks}
    for place, basis in enumerate(level.bases):
        for part in ("nodes", "skeleton", "rest", "weights"):
            tensors[f"{name}.bases.{place}.{part}"] = getattr(basis, part)
    return tensors | coupling_tensors(f"{name}.couplings", level.couplings)


def read_level(
    tensors: Mapping[str, Tensor], name: str, counts: Sequence[int], size_below: int
) -> Level:
    """Return the level that `level_tensors` named, with so many batches of bases and couplings."""
    ranks, bases = tensors[f"{name}.ranks"], []
    for place in range(counts[0]):
        group = f"{name}.bases.{place}"
        parts = [tensors[f"{group}.{part}"] for part in ("skeleton", "rest", "weights")]
        bases.append(Basis.of(tensors[f"{group}.nodes"], ranks, *parts))
    couplings = read_couplings(tensors, f"{name}.couplings", counts[1], ranks)
    return Level(ranks, size_below, tuple(bases), couplings)


def describe_matrix(matrix: HMatrix) -> dict[str, Any]:
    """Return what describes a matrix beside its tensors."""
    shapes = None if matrix.layout is None else matrix.layout.shapes
    return {
        "layout": None if shapes is None else [[name, list(shapes[name])] for name in shapes],
        "levels": [[len(level.bases), len(level.couplings)] for level in matrix.levels],
        "record": asdict(matrix.record),
    }


def _factor_tensors(stored: Factorization) -> dict[str, Tensor]:
    tensors = {}
    for number, level in enumerate(stored.levels):
        for part in ("starts", "counts", "left"):
            tensors[f"levels.{number}.{part}"] = getattr(level.split, part)
        for place, step in enumerate(level.eliminations):
            for field in fields(Elimination):
                values = getattr(step, field.name)
                if values is not None:
                    tensors[f"levels.{number}.eliminations.{place}.{field.name}"] = values
    if isinstance(stored.damping, Tensor):
        tensors["damping"] = stored.damping
    if stored.update is not None:
        for part in ("rows", "basis", "values"):
            tensors[f"update.{part}"] = getattr(stored.update, part)
    return tensors


def _describe_factors(stored: Factorization) -> dict[str, Any]:
    return {
        "levels": [[len(level.eliminations), level.size] for level in stored.levels],
        "damping": None if isinstance(stored.damping, Tensor) else stored.damping,
        "log_determinant": stored.log_determinant,
        "num_negative": stored.num_negative,
        "update_between": stored.update is not None and stored.update.between,
    }


def matrix_parts(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `HMatrix` that a file holds."""
    tree = make_tree(description, tensors)
    levels: list[Level] = []
    size_below = tree.num_kept
    for number, counts in enumerate(description["levels"]):
        if any(counts[2:]):
            raise ValueError("it stores couplings in a way that is no longer read; compress again")
        levels.append(read_level(tensors, f"levels.{number}", counts, size_below))
        size_below = levels[-1].size
    global_part = None
    if "global.rows" in tensors:
        global_part = GlobalPart(tensors["global.rows"], tensors["global.factor"])
    return {
        "tree": tree,
        "leaves": LeafBlocks.of(tree.bounds(tree.depth), tensors["leaves.values"]),
        "levels": tuple(levels),
        "record": make_record(description["record"]),
        "dtype": FLOAT_TYPES[description["dtype"]],
        "global_part": global_part,
    }


def make_matrix(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HMatrix:
    """Return the matrix that a file holds."""
    return HMatrix(**matrix_parts(description, tensors)).with_layout(read_layout(description))


def read_layout(description: Mapping[str, Any]) -> ParameterLayout | None:
    """Return the layout of the parameters that a file holds, or None."""
    shapes = description["layout"]
    return None if shapes is None else ParameterLayout(dict(shapes))


def make_record(values: Mapping[str, Any]) -> BuildRecord:
    """Return the build record that a file holds."""
    plan, damped = values.get("plan"), values.get("damped_error")
    parts = {
        "plan": None if plan is None else Plan.from_dict(plan),
        "damped_error": None if damped is None else DampedError(**damped),
    }
    return BuildRecord(**{**values, **parts})


def make_factorization(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Factorization:
    """Return the factorization that a file holds."""
    tree = make_tree(description, tensors)
    levels: list[LevelFactor] = []
    size_below = tree.num_kept
    for number, (num_eliminations, size) in enumerate(description["levels"]):
        split = Split(
            *(tensors[f"levels.{number}.{part}"] for part in ("starts", "counts", "left"))
        )
        eliminations = []
        for place in range(num_eliminations):
            name = f"levels.{number}.eliminations.{place}"
            parts = {f.name: tensors.get(f"{name}.{f.name}") for f in fields(Elimination)}
            if any(value is None for part, value in parts.items() if part != "signs"):
                raise KeyError(name)
            eliminations.append(Elimination(**parts))  # type: ignore[arg-type]
        levels.append(LevelFactor(split, size, size_below, tuple(eliminations)))
        size_below = size
    update = None
    if "update.rows" in tensors:
        update = GlobalUpdate(
            tensors["update.rows"],
            tensors["update.basis"],
            tensors["update.values"],
            bool(description["update_between"]),
        )
    damping = tensors.get("damping")
    if damping is None:
        damping = torch.tensor(float(description["damping"]), dtype=torch.float64)
    return Factorization(
        tree,
        tuple(levels),
        Damping(damping),
        description["log_determinant"],
        description["num_negative"],
        FLOAT_TYPES[description["dtype"]],
        update,
    )
