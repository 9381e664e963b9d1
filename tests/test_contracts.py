"""Every public function and method is called with every kind of bad argument, one at a time.

Only the exceptions of this package are accepted, with a message that names the argument. The public
names are found in ``hcurv.__all__``: a new function or argument without a row here fails a test.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hcurv
from cases import labels, normal, seeded

SPARSE = torch.eye(51, dtype=torch.float64).to_sparse()
META = torch.ones(51, dtype=torch.float64, device="meta")

# Bad values by kind of argument.
KINDS: dict[str, list[Any]] = {
    "seed": ["x", 1.5, None, 2**70, object()],
    "count": ["x", 1.5, -1, float("nan"), object(), [2]],
    "number": ["x", float("nan"), -1.0, object(), [1.0, 2.0]],
    "share": ["x", float("nan"), -1.0, object(), 1e9],
    "damping": ["x", float("nan"), torch.ones(3), object(), {"none": 1.0}, SPARSE],
    "indices": ["ab", [1.5], [10**6], [2**70], object(), range(10**12), SPARSE, META.long(), {1}],
    "index table": ["ab", 3, [[1.5]], torch.ones(3), torch.full((2, 2), 10**6), None],
    "vector": [None, "x", np.ones(7), torch.ones(7).double(), torch.ones(51).half(), SPARSE, META],
    "source": [None, "x", 3, torch.ones(2, 3), torch.ones(51, 51).long(), SPARSE, np.ones((2, 3))],
    "operator": [None, "x", 3, torch.ones(2, 3), SPARSE, np.ones((2, 3)), object()],
    "model": [None, "x", 3, object()],
    "loss": [None, "x", 3, object()],
    "data": [None, "x", 3, object(), (1, 2), (torch.ones(3, 9), torch.ones(3)), []],
    "callable": ["x", 3, object()],
    "path": [None, 3, "", "a\0b", b"x", ["x"], "/no/such/folder/file", "/dev/null"],
    "choice": ["nonsense", 3, object()],
    "device": ["nowhere", 3.5, "cuda:99", object()],
    "dtype": [torch.int32, "float32", torch.float16, object()],
    "generator": [3, "x", np.random.default_rng(0)],
    "inputs": ["x", 3, object(), torch.ones(2, 9).double()],
    "targets": ["x", 3, object(), torch.ones(3, 9).double()],
    "mapping": [3, "x", {"none": 1.0}],
    "jacobian": [3, "x", torch.ones(3, 7).double(), SPARSE, np.ones((2, 7))],
    "ratios": ["x", 3, [-1.0], object()],
    "nothing": [],
    "folder": [3, "", "a\0b", ["x"]],
    "group": ["x", 3, object()],
    "flat": [None, "x", np.ones(51), torch.ones(7).double(), SPARSE, META],
    "layout": ["x", 3, object()],
    "signed": ["x", float("nan"), object(), [1.0, 2.0]],
    "diagonal": [None, "x", np.ones((3, 3)), torch.ones(3, 3), torch.ones(51).half(), SPARSE, META],
    "other diagonal": ["x", np.ones(7), torch.ones(7).double(), SPARSE, META],
    "rank or auto": ["nonsense", -1, 1.5, object()],
    "schedule": ["nonsense", -1, 1.5, object(), [0.9, 0.1]],
    "preconditioner": ["nonsense", 3, object(), torch.ones(3)],
}

# The kind of an argument, by its name. Arguments of some functions differ: "function.argument".
ARGUMENTS: dict[str, str] = {
    "seed": "seed",
    **dict.fromkeys(
        ["num_probes", "leaf_size", "max_rank", "num_refinements", "num", "k", "num_samples"],
        "count",
    ),
    **dict.fromkeys(
        ["max_iterations", "workspace", "rank", "oversampling", "power_iterations", "num_pairs"],
        "count",
    ),
    **dict.fromkeys(["num_neighbors", "num_trees", "num_points", "level", "max_steps"], "count"),
    **dict.fromkeys(["max_levels", "stages", "corrections", "curvature_points"], "count"),
    **dict.fromkeys(["tolerance", "epsilon", "noise", "lr", "max_storage", "storage"], "number"),
    **dict.fromkeys(["weight_decay", "momentum", "damping_factor"], "number"),
    **dict.fromkeys(["delta", "near_budget", "sparsity"], "share"),
    **dict.fromkeys(["damping", "prior_precision"], "damping"),
    **dict.fromkeys(["rows", "cols", "index", "points"], "indices"),
    **dict.fromkeys(["rhs", "values", "flat"], "vector"),
    **dict.fromkeys(["source", "matrix"], "source"),
    **dict.fromkeys(["operator", "reference", "exact", "preconditioner"], "operator"),
    "model": "model",
    "loss": "loss",
    **dict.fromkeys(["data", "train_data", "queries"], "data"),
    **dict.fromkeys(["forward_fn", "measure"], "callable"),
    "path": "path",
    **dict.fromkeys(["method", "distance", "scheme", "fisher", "which", "accuracy"], "choice"),
    **dict.fromkeys(["global_rank", "ordering", "structure", "positions", "grouping"], "choice"),
    **dict.fromkeys(["saliency", "scope", "schedule"], "choice"),
    "device": "device",
    "dtype": "dtype",
    "generator": "generator",
    **dict.fromkeys(["start"], "vector"),
    "diagonal": "other diagonal",
    "near": "signed",
    **dict.fromkeys(["factorization", "approximation", "factorized", "sampled"], "operator"),
    **dict.fromkeys(["evaluate"], "callable"),
    **dict.fromkeys(["parameters", "leave_out"], "choice"),
    "max_points": "count",
    "inputs": "inputs",
    "targets": "targets",
    "factors": "ratios",
    **dict.fromkeys(["layer", "pattern"], "choice"),
    **dict.fromkeys(["prior"], "choice"),
    "ParameterLayout.expand.values": "mapping",
    "ParameterLayout.unflatten.flat": "flat",
    "ParameterLayout.flatten.values": "mapping",
    "Factorization.quadratic.rows": "jacobian",
    "Factorization.point_covariances.rows": "jacobian",
    "Diagonal.blocks.rows": "index table",
    "Diagonal.blocks.cols": "index table",
    "LaplacePosterior.tune.noise": "nothing",
    "HMatrix.with_layout.layout": "layout",
    "Factorization.quadratic.diagonal": "nothing",
    # Functions that give an argument another meaning than the others do.
    "compress.damping": "number",
    "compare.damping": "number",
    "prune.damping": "number",
    "gauss_newton_step.damping": "number",
    "optim.GaussNewton.damping": "number",
    "Diagonal.values": "diagonal",
    "GaussNewton.blocks.rows": "index table",
    "GaussNewton.partial_blocks.rows": "index table",
    "GaussNewton.partial_blocks.cols": "index table",
    "process_group": "group",
    "checkpoint": "folder",
    "GaussNewton.blocks.cols": "index table",
    "SampledEntries.blocks.rows": "index table",
    "SampledEntries.blocks.cols": "index table",
    "TangentKernel.blocks.rows": "index table",
    "TangentKernel.blocks.cols": "index table",
    "compress.global_rank": "rank or auto",
    "prune.schedule": "schedule",
    "baselines.KFAC.factorize.rows": "vector",
    "gauss_newton_step.preconditioner": "preconditioner",
}
# Flags take anything, as Python's own do, and "compression" and "curvature" are passed on.
FLAGS = {
    *("progress", "warn", "definite", "factored", "check_damping", "bias", "gradient", "harmful"),
    *("adapt_damping", "ekfac", "compression", "curvature", "damping_ratios", "weights", "groups"),
    *("params", "blocks", "covariances", "linearised"),
}
# What messages may say instead of the name of an argument.
ALIASES: dict[str, tuple[str, ...]] = {
    "rhs": ("right-hand side",),
    "train_data": ("data", "inputs", "points"),
    "data": ("inputs", "targets", "points", "pair"),
    "queries": ("data", "inputs", "points"),
    "source": ("the matrix", "a matrix", "Diagonal takes"),
    "matrix": ("the matrix", "a matrix"),
    "exact": ("reference", "matrix"),
    "prior_precision": ("prior", "damping"),
    "index": ("indices",),
    "inputs": ("points", "model", "data"),
    "factors": ("damping",),
    "layer": ("layer",),
    "prior": ("grouping",),
    "approximation": ("factoriz",),
    "structure": ("blocks",),
    "pattern": ("is called",),
    "grouping": ("grouped by",),
    "values": ("is called", "diagonal", "right-hand side"),
    "path": ("no such folder", "is no regular file", "no such file"),
    "global_rank": ("rank",),
}


@lru_cache(maxsize=1)
def _things() -> dict[str, Any]:
    """One small object of every kind that has public methods."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double())
    loss, data = nn.CrossEntropyLoss(), (normal(20, 4), labels(20, 3))
    exact = hcurv.GaussNewton(model, loss, data)
    compressed = hcurv.compress(exact, tolerance=1e-2, leaf_size=13)
    posterior = hcurv.laplace(model, loss, data)
    file = Path(tempfile.mkdtemp()) / "posterior"
    posterior.save(file)
    return {
        "model": model,
        "loss": loss,
        "data": data,
        "H": exact,
        "A": compressed,
        "F": compressed.factorize(0.1, warn=False),
        "S": exact.sample_entries(10),
        "K": exact.kernel(),
        "D": hcurv.Diagonal(exact),
        "tree": compressed.tree,
        "layout": exact.layout,
        "influence": hcurv.influence(model, loss, data, damping=0.1, check_damping=False),
        "posterior": posterior,
        "file": file,
        "low rank": hcurv.baselines.LowRank(exact, 5),
        "KFAC": hcurv.baselines.KFAC(model, loss, data, ekfac=True),
        "blocks": hcurv.baselines.BlockDiagonal(exact),
        "iterations": hcurv.baselines.MatrixFree(exact),
        "rows": exact.jacobian(data[0]),
        "b": torch.ones(51, dtype=torch.float64),
    }


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions and methods, with arguments that are right."""
    t = _things()
    problem = {"model": t["model"], "loss": t["loss"], "data": t["data"]}
    one, table = {"rows": [0, 1], "cols": [2, 3]}, torch.tensor([[0, 1], [2, 3]])
    many = {"rows": table, "cols": table}
    error = {"reference": t["H"], "num_probes": 2, "seed": 0}
    return {
        "compress": (hcurv.compress, {"source": t["H"], "tolerance": 0.5}),
        "cg": (hcurv.cg, {"operator": t["H"], "rhs": t["b"], "damping": 1.0}),
        "eigsh": (hcurv.eigsh, {"operator": t["H"], "k": 2}),
        "certify": (hcurv.certify, {"approximation": t["A"], "matrix": t["H"], "damping": 1.0}),
        "load": (hcurv.load, {"path": "none"}),
        "laplace": (hcurv.laplace, problem),
        "gauss_newton_step": (hcurv.gauss_newton_step, {**problem, "damping": 1.0}),
        "influence": (
            hcurv.influence,
            {"model": t["model"], "loss": t["loss"], "train_data": t["data"], "damping": 0.1},
        ),
        "prune": (hcurv.prune, {**problem, "sparsity": 0.5}),
        "compare": (hcurv.compare, problem),
        "nearest_neighbors": (hcurv.nearest_neighbors, {"source": t["H"], "num_neighbors": 2}),
        "num_samples_for": (hcurv.num_samples_for, {"epsilon": 0.1, "delta": 0.1}),
        "sampling_error": (hcurv.sampling_error, {"sampled": t["S"], "exact": t["H"]}),
        "GaussNewton": (hcurv.GaussNewton, problem),
        "GaussNewton.block": (t["H"].block, one),
        "GaussNewton.blocks": (t["H"].blocks, many),
        "GaussNewton.factorize": (t["H"].factorize, {"damping": 1.0}),
        "GaussNewton.in_precision": (t["H"].in_precision, {"dtype": torch.float32}),
        "GaussNewton.kernel": (t["H"].kernel, {}),
        "GaussNewton.of_points": (
            t["H"].of_points,
            {"points": torch.arange(2), "weights": torch.ones(2).double()},
        ),
        "GaussNewton.pairs": (t["H"].pairs, one),
        "GaussNewton.partial_blocks": (t["H"].partial_blocks, many),
        "GaussNewton.partial_product": (
            t["H"].partial_product,
            {"rhs": torch.ones(51, 1, dtype=torch.float64)},
        ),
        "GaussNewton.relative_error": (t["H"].relative_error, error),
        "GaussNewton.root_columns": (t["H"].root_columns, {"index": [0]}),
        "GaussNewton.root_product": (t["H"].root_product, {"rhs": t["b"][:, None]}),
        "GaussNewton.sample_entries": (t["H"].sample_entries, {"num_samples": 5}),
        "GaussNewton.subsample": (t["H"].subsample, {"num_points": 5}),
        "HMatrix.block": (t["A"].block, one),
        "HMatrix.factorize": (t["A"].factorize, {"damping": 1.0}),
        "HMatrix.pairs": (t["A"].pairs, one),
        "HMatrix.plot": (t["A"].plot, {}),
        "HMatrix.refresh": (t["A"].refresh, {"matrix": t["H"]}),
        "HMatrix.relative_error": (t["A"].relative_error, error),
        "HMatrix.save": (t["A"].save, {"path": "x"}),
        "HMatrix.to": (t["A"].to, {}),
        "Factorization.relative_error": (t["F"].relative_error, error),
        "Factorization.sample": (t["F"].sample, {"num": 1}),
        "Factorization.save": (t["F"].save, {"path": "x"}),
        "Factorization.solve": (t["F"].solve, {"rhs": t["b"]}),
        "Factorization.sqrt_solve": (t["F"].sqrt_solve, {"rhs": t["b"]}),
        "Factorization.to": (t["F"].to, {}),
        "SampledEntries.block": (t["S"].block, one),
        "SampledEntries.blocks": (t["S"].blocks, many),
        "SampledEntries.error_bound": (t["S"].error_bound, {**one, "delta": 0.1}),
        "SampledEntries.pairs": (t["S"].pairs, one),
        "TangentKernel.block": (t["K"].block, one),
        "TangentKernel.factorize": (t["K"].factorize, {"damping": 0.1}),
        "TangentKernel.in_precision": (t["K"].in_precision, {"dtype": torch.float32}),
        "TangentKernel.blocks": (t["K"].blocks, many),
        "TangentKernel.relative_error": (t["K"].relative_error, {**error, "reference": t["K"]}),
        "Diagonal": (hcurv.Diagonal, {"values": t["b"]}),
        "Diagonal.block": (t["D"].block, one),
        "Diagonal.factorize": (t["D"].factorize, {"damping": 1.0}),
        "Diagonal.relative_error": (t["D"].relative_error, error),
        "ClusterTree.bounds": (t["tree"].bounds, {"level": 0}),
        "Influence.scores": (t["influence"].scores, {"queries": t["data"]}),
        "Influence.self_scores": (t["influence"].self_scores, {"num_samples": 2}),
        "Influence.top": (t["influence"].top, {"queries": t["data"], "k": 2}),
        "LaplacePosterior.save": (t["posterior"].save, {"path": "x"}),
        "LaplacePosterior.load": (hcurv.LaplacePosterior.load, {"path": t["file"], **problem}),
        "LaplacePosterior.sample": (t["posterior"].sample, {"num": 1}),
        "LaplacePosterior.log_marginal_likelihood": (
            t["posterior"].log_marginal_likelihood,
            {"prior_precision": 1.0},
        ),
        "ParameterLayout.locate": (t["layout"].locate, {"index": 3}),
        "JacobianRows.chunks": (lambda **given: list(t["rows"].chunks(**given)), {}),
        "baselines.LowRank": (hcurv.baselines.LowRank, {"source": t["H"], "rank": 3}),
        "baselines.LowRank.factorize": (t["low rank"].factorize, {"damping": 1.0}),
        "baselines.LowRank.relative_error": (t["low rank"].relative_error, error),
        "baselines.KFAC": (hcurv.baselines.KFAC, problem),
        "baselines.KFAC.factorize": (t["KFAC"].factorize, {"damping": 1.0}),
        "baselines.KFAC.relative_error": (t["KFAC"].relative_error, error),
        "baselines.BlockDiagonal": (hcurv.baselines.BlockDiagonal, {"source": t["H"]}),
        "baselines.BlockDiagonal.factorize": (t["blocks"].factorize, {"damping": 1.0}),
        "baselines.BlockDiagonal.relative_error": (t["blocks"].relative_error, error),
        "baselines.MatrixFree": (hcurv.baselines.MatrixFree, {"matrix": t["H"]}),
        "baselines.MatrixFree.factorize": (t["iterations"].factorize, {"damping": 1.0}),
        "baselines.MatrixFree.relative_error": (t["iterations"].relative_error, error),
        "GaussNewton.gradient": (t["H"].gradient, {}),
        "GaussNewton.jacobian": (t["H"].jacobian, {"inputs": t["data"][0]}),
        "GaussNewton.point_gradients": (
            t["H"].point_gradients,
            {"inputs": t["data"][0], "targets": t["data"][1]},
        ),
        "GaussNewton.root_transposed": (
            t["H"].root_transposed,
            {"values": t["H"].root_product(t["b"])},
        ),
        "Factorization.quadratic": (t["F"].quadratic, {"rows": t["b"][None]}),
        "Factorization.point_covariances": (t["F"].point_covariances, {"rows": t["rows"]}),
        "HMatrix.with_layout": (t["A"].with_layout, {"layout": t["layout"]}),
        "Influence.leave_out": (t["influence"].leave_out, {"points": [0], "queries": t["data"]}),
        "Influence.damping_sensitivity": (
            t["influence"].damping_sensitivity,
            {"queries": t["data"]},
        ),
        "LaplacePosterior.predict": (t["posterior"].predict, {"inputs": t["data"][0]}),
        "LaplacePosterior.predictive_samples": (
            t["posterior"].predictive_samples,
            {"inputs": t["data"][0], "num": 2},
        ),
        "LaplacePosterior.score": (t["posterior"].score, {"data": t["data"]}),
        "LaplacePosterior.tune": (t["posterior"].tune, {}),
        "ParameterLayout.blocks": (t["layout"].blocks, {"grouping": "layer"}),
        "ParameterLayout.expand": (t["layout"].expand, {"values": {"*": 1.0}}),
        "ParameterLayout.flatten": (
            t["layout"].flatten,
            {"values": dict(t["model"].named_parameters())},
        ),
        "ParameterLayout.layer_shape": (t["layout"].layer_shape, {"layer": "0"}),
        "ParameterLayout.matching": (t["layout"].matching, {"pattern": "0"}),
        "ParameterLayout.of": (hcurv.ParameterLayout.of, {"model": t["model"]}),
        "ParameterLayout.unflatten": (t["layout"].unflatten, {"flat": t["b"]}),
        "losses.as_loss": (hcurv.losses.as_loss, {"loss": t["loss"]}),
        "Diagonal.blocks": (t["D"].blocks, many),
        "optim.GaussNewton": (
            hcurv.optim.GaussNewton,
            {"model": t["model"], "loss": t["loss"]},
        ),
    }


OURS = (TypeError, ValueError, IndexError, KeyError, OSError, hcurv.InsufficientMemoryError)


def _arguments(name: str, call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if name == "JacobianRows.chunks":
        call = _things()["rows"].chunks
    return dict(inspect.signature(call).parameters)


def _fault(call: Callable[..., Any], given: dict[str, Any], argument: str) -> str | None:
    """What is wrong with the answer to a bad argument; None if it is a clear refusal."""
    try:
        call(**given)
    except OURS as error:
        text = str(error).lower()
        names = (argument, *ALIASES.get(argument, ()))
        if not any(name.lower() in text for name in names):
            return f"{type(error).__name__} does not name it: {text[:90]}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return "accepted"


def _faults() -> Iterator[str]:
    for name, (call, good) in _calls().items():
        for argument, parameter in _arguments(name, call).items():
            if argument in FLAGS:
                continue
            kind = ARGUMENTS.get(f"{name}.{argument}", ARGUMENTS.get(argument))
            if kind is None:
                yield f"{name}({argument}=…): no row says what it must be"
                continue
            for value in KINDS[kind]:
                if value is None and parameter.default is None:
                    continue
                fault = _fault(call, {**good, argument: value}, argument)
                if fault is not None:
                    yield f"{name}({argument}={value!r:.40}): {fault}"


def test_every_bad_argument_is_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = list(_faults())
    assert not faults, "\n" + "\n".join(faults)
    assert not list(tmp_path.iterdir())


# Public callables that have no rows, each with the reason.
NOT_IN_THE_TABLE = {
    "EntrySource": "a protocol",
    "SymmetricOperator": "a base class; its methods are called on every operator",
    "Factorized": "a base class; its methods are called on Factorization",
    "Factorization": "made by HMatrix.factorize",
    "Factorization.with_global_part": "takes a part of an HMatrix",
    "HMatrix": "made by compress",
    "HMatrix.with_leaves": "takes parts of an HMatrix",
    "HMatrix.with_parts": "takes parts of an HMatrix",
    "ClusterTree": "made by compress",
    "SampledEntries": "made by GaussNewton.sample_entries",
    "TangentKernel": "made by GaussNewton.kernel",
    "TangentKernel.fill": "writes into a tensor of the caller",
    "JacobianRows": "made by GaussNewton.jacobian",
    "Influence": "made by influence",
    "LaplacePosterior": "made by laplace",
    "ParameterLayout": "made by GaussNewton; any names and shapes are right",
    "ParameterLayout.linear": "flags and counts of one layer, for the package",
    "ParameterLayout.select": "patterns, as for ParameterLayout.matching",
    "Pruning.apply_masks": "a model, as for prune",
    "Pruning.draw": "axes of matplotlib",
    "Prediction.join": "takes predictions",
    "Plan.from_dict": "reads what asdict wrote; files are checked on their own",
    "Comparison.save_report": "a path, as for HMatrix.save",
    "baselines.Diagonal": "hcurv.Diagonal",
    "optim.GaussNewton.add_param_group": "torch's own",
    "optim.GaussNewton.load_state_dict": "torch's own",
    "optim.GaussNewton.step": "a batch, as for GaussNewton",
}


def _public() -> Iterator[str]:
    """Names of public functions, of classes that are not mere results, and of their methods."""
    for name in hcurv.__all__:
        found = getattr(hcurv, name)
        members = {name: found}
        if inspect.ismodule(found):
            members = {f"{name}.{inner}": getattr(found, inner) for inner in found.__all__}
        for path, member in members.items():
            if not inspect.isclass(member):
                yield path
                continue
            is_loss = issubclass(member, hcurv.losses.Loss)  # checked in test_losses.py
            if issubclass(member, Exception) or is_loss:
                continue
            is_result = hasattr(member, "__dataclass_fields__") or issubclass(member, tuple)
            if not is_result:
                yield path
            for inner, method in inspect.getmembers(member, inspect.isroutine):
                own = str(getattr(method, "__module__", "")).startswith("hcurv")
                if inner.startswith("_") or not own:
                    continue
                if set(inspect.signature(method).parameters) - {"self"}:
                    yield f"{path}.{inner}"


def test_every_public_function_and_method_is_in_the_table() -> None:
    public, known = set(_public()), {*_calls(), *NOT_IN_THE_TABLE}
    inherited = {"Factorized.", "SymmetricOperator.", "EntrySource.", "baselines.Diagonal."}
    missing = {n for n in public - known if not n.startswith(tuple(inherited))}
    assert not missing, f"give them rows in _calls(): {sorted(missing)}"
    assert not {n for n in NOT_IN_THE_TABLE if n in _calls()}
