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
from hcurv.hierarchical.matrix.file_checks import (
    check_couplings,
    check_dtype,
    check_elimination,
    check_finite,
    check_group,
    check_groups,
    check_leaves,
    check_number,
    check_pairs,
    check_part,
    check_types,
    require,
)
from hcurv.hierarchical.matrix.file_format import (
    FLOAT_TYPES,
    FileFormatError,
    make_tree,
    read_file,
    write_file,
)
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.parts.global_part import GlobalPart, GlobalUpdate
from hcurv.hierarchical.parts.levels import Basis, Coupling, Level
from hcurv.hierarchical.parts.plan import Plan
from hcurv.hierarchical.solving.elimination import Elimination, LevelFactor, Split
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.hierarchical.tree.cluster_tree import ClusterTree
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
    couplings = []
    for place in range(check_number(count, f"the number of {name}", most=len(tensors))):
        pairs, values = tensors[f"{name}.{place}.pairs"], tensors[f"{name}.{place}.values"]
        check_pairs(pairs, values, sizes.numel())
        couplings.append(Coupling.of(pairs, sizes, values))
    return tuple(couplings)


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


def matrix_parts(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], siblings: bool = True
) -> dict[str, Any]:
    """Return the arguments of `HMatrix` that a file holds, checked.

    Args:
        description: what the file says.
        tensors: its tensors.
        siblings: whether only siblings are coupled.

    Raises:
        KeyError, TypeError, ValueError: the parts do not fit together.
    """
    tree, dtype = make_tree(description, tensors), FLOAT_TYPES[description["dtype"]]
    leaves = check_leaves(tensors["leaves.values"], tree, dtype)
    require(len(description["levels"]) == tree.depth, "there are levels too many or too few")
    levels: list[Level] = []
    counts = tree.bounds(tree.depth).diff()
    for number, (num_bases, num_couplings) in enumerate(description["levels"]):
        ranks = tensors[f"levels.{number}.ranks"]
        check_dtype(ranks, torch.long, "ranks")
        fits = ranks.shape == counts.shape and bool(((ranks >= 0) & (ranks <= counts)).all())
        require(fits, f"ranks of level {number} do not fit")
        bases = []
        for place in range(check_number(num_bases, "the number of bases", most=len(tensors))):
            name = f"levels.{number}.bases.{place}"
            nodes, skeleton, rest, weights = (
                tensors[f"{name}.{part}"] for part in ("nodes", "skeleton", "rest", "weights")
            )
            check_group(nodes, skeleton, rest, weights, counts.numel(), dtype)
            bases.append(Basis.of(nodes, ranks, skeleton, rest, weights))
        check_groups(bases, counts.cumsum(0) - counts, counts, ranks, ranks > 0)
        couplings = read_couplings(tensors, f"levels.{number}.couplings", num_couplings, ranks)
        check_couplings(couplings, ranks, dtype, siblings)
        levels.append(Level(ranks, int(counts.sum()), tuple(bases), couplings))
        counts = ranks.view(-1, 2).sum(1)
    global_part = None
    if "global.rows" in tensors:
        rows, factor = tensors["global.rows"], tensors["global.factor"]
        check_part(rows, factor, tree.size, dtype)
        global_part = GlobalPart(rows, factor)
    return {
        "tree": tree,
        "leaves": leaves,
        "levels": tuple(levels),
        "record": make_record(description["record"]),
        "dtype": dtype,
        "global_part": global_part,
    }


def make_matrix(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HMatrix:
    """Return the matrix that a file holds."""
    return HMatrix(**matrix_parts(description, tensors)).with_layout(read_layout(description))


def read_layout(description: Mapping[str, Any]) -> ParameterLayout | None:
    """Return the layout of the parameters that a file holds, or None."""
    shapes = description["layout"]
    if shapes is None:
        return None
    for name, shape in shapes:
        check_types(name, str, "the layout")
        for length in shape:
            check_number(length, f"the shape of {name}")
    require(len(dict(shapes)) == len(shapes), "two parameters have one name")
    return ParameterLayout(dict(shapes))


def make_record(values: Mapping[str, Any]) -> BuildRecord:
    """Return the build record that a file holds."""
    require(isinstance(values, dict), "it has no record of its build")
    plan, damped = values.get("plan"), values.get("damped_error")
    parts = {
        "plan": None if plan is None else Plan.from_dict(plan),
        "damped_error": None if damped is None else DampedError(**damped),
    }
    record = BuildRecord(**{**values, **parts})
    check_types(record, BuildRecord, "record")
    return record


def make_factorization(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Factorization:
    """Return the factorization that a file holds."""
    tree, dtype = make_tree(description, tensors), FLOAT_TYPES[description["dtype"]]
    require(len(description["levels"]) == tree.depth + 1, "there are levels too many or too few")
    levels: list[LevelFactor] = []
    counts = tree.bounds(tree.depth).diff()
    left = counts
    for number, (num_eliminations, size) in enumerate(description["levels"]):
        names = [f"levels.{number}.{part}" for part in ("starts", "counts", "left")]
        split = Split(*(tensors[name] for name in names))
        for found, expected in (
            (split.starts, counts.cumsum(0) - counts),
            (split.counts, counts),
            (split.left, left),
        ):
            is_equal = found.dtype == torch.long and torch.equal(found, expected)
            require(is_equal, f"level {number} does not fit that below")
        steps = []
        for place in range(check_number(num_eliminations, "eliminations", most=len(tensors))):
            name = f"levels.{number}.eliminations.{place}"
            parts = {f.name: tensors.get(f"{name}.{f.name}") for f in fields(Elimination)}
            steps.append(check_elimination(parts, counts.numel(), dtype))
        ranks = torch.zeros_like(counts)
        for step in steps:
            ranks[step.nodes] = (step.skeleton < int(counts.sum())).sum(1)
        require(size == int(ranks.sum()), f"level {number} says it has {size!r} rows")
        check_groups(steps, counts.cumsum(0) - counts, counts, ranks, counts > 0)
        levels.append(LevelFactor(split, size, int(counts.sum()), tuple(steps)))
        if number < tree.depth:
            counts, left = ranks.view(-1, 2).sum(1), ranks[::2]
    require(levels[-1].size == 0, "the root is not eliminated")
    update = None
    if "update.rows" in tensors:
        check_types(description["update_between"], bool, "update_between")
        rows, basis, values = (tensors[f"update.{part}"] for part in ("rows", "basis", "values"))
        check_part(rows, basis, tree.size, dtype)
        check_dtype(values, torch.float64, "update.values")
        require(values.shape == basis.shape[1:], "update.values do not fit the basis")
        update = GlobalUpdate(rows, basis, values, description["update_between"])
    damping = _read_damping(description, tensors, tree)
    num_negative = description["num_negative"]
    check_types(num_negative, int, "num_negative")
    require(
        num_negative == _count_negative(levels, update, damping.rows(tree.zero_rows)),
        f"it does not have {num_negative} negative eigenvalues",
    )
    log_determinant = check_finite(description["log_determinant"], "log_determinant")
    return Factorization(tree, tuple(levels), damping, log_determinant, num_negative, dtype, update)


def _count_negative(
    levels: Sequence[LevelFactor], update: GlobalUpdate | None, zero_rows: Tensor
) -> int:
    """Return the number of negative eigenvalues, as `factorize` counts them."""
    signs = [step.signs for level in levels for step in level.eliminations]
    count = sum(int((values < 0).sum()) for values in signs if values is not None)
    count += int((zero_rows < 0).sum())
    if update is None:
        return count
    require(not (update.between and count), "a solve of an indefinite matrix has no halves")
    return count if update.between else count - int((update.values < 0).sum())


def _read_damping(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], tree: ClusterTree
) -> Damping:
    """Return the damping, a number or one for each row."""
    if "damping" in tensors:
        damping = Damping(tensors["damping"])
        check_dtype(damping.tensor, torch.float64, "damping")
        shape = tuple(damping.tensor.shape)
        require(shape == (tree.size,), f"damping has shape {shape}")
        require(bool(torch.isfinite(damping.tensor).all()), "damping is not finite")
    else:
        number = check_finite(description["damping"], "damping")
        damping = Damping(torch.tensor(number, dtype=torch.float64))
    require(bool((damping.rows(tree.zero_rows) != 0).all()), "a row of zeros has no damping")
    return damping
