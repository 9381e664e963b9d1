"""Whatever goes wrong is one line on stderr, with an exit code, and leaves no files."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hcurv
from command_line import CROSS_ENTROPY, Network, fail, run, write_network
from hcurv.cli import arrays, problem
from hcurv.hierarchical import CompressionWarning
from matrices import kernel_matrix


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return write_network(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A compressed matrix of 40 rows, which has negative eigenvalues."""
    matrix = hcurv.compress(
        kernel_matrix("gaussian", 40, 1), leaf_size=8, max_rank=1, tolerance=0, global_rank=0
    )
    matrix.save(tmp_path / "A.safetensors")
    return tmp_path / "A.safetensors"


def diagonal_of(network: Network, state: dict[str, torch.Tensor], *arguments: object) -> str:
    """Why the diagonal of a network with this state dict is refused."""
    path = network.folder / "other.safetensors"
    save_file(state, path)
    rest = [*network.options[1:3], *CROSS_ENTROPY, *arguments]
    return fail("diagonal", path, *rest)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"0.weight": (2, 3, 3, 3)}, "'0.weight' with shape (2, 3, 3, 3) belongs to no Linear"),
        ({"0.weight": (4, 9), "1.weight": (4,)}, "'1.weight' with shape (4,) belongs to no"),
        ({"0.weight": (4, 9), "2.bias": (4,)}, "'2.bias' with shape (4,) belongs to no"),
        ({"0.weight": (4, 9), "scale": (1,)}, "'scale' with shape (1,) belongs to no"),
        ({"0.weight": (4, 9), "0.bias": (3,)}, "the bias of '0' has shape (3,)"),
        ({"0.weight": (4, 9), "2.weight": (4, 5)}, "'0' gives 4 values, but '2' takes 5"),
        ({"up.weight": (4, 9), "down.weight": (9, 4)}, "do not tell which layer comes first"),
    ],
)
def test_state_dicts_that_are_no_chain(
    network: Network, state: dict[str, tuple[int, ...]], message: str
) -> None:
    tensors = {name: torch.ones(shape) for name, shape in state.items()}
    found = diagonal_of(network, tensors, "--activation", "relu")
    assert message in found
    assert "--model package.module:function" in found


def test_unfit_weights(network: Network, saved: Path) -> None:
    rest = network.options[1:]
    assert "no weights of Linear layers" in diagonal_of(network, {})
    assert "say what lies between them" in diagonal_of(network, network.model.state_dict())
    assert "is a compressed matrix" in fail("diagonal", saved, *rest)
    assert fail("diagonal", "nowhere.safetensors", *rest) == "no such file: nowhere.safetensors"
    message = fail("diagonal", "model.pt", *rest)
    assert "torch.load('model.pt', weights_only=True)" in message
    assert "'model.safetensors'" in message
    network.weights.write_bytes(b"nonsense")
    assert "no safetensors file" in fail("diagonal", *network.options)
    assert "WEIGHTS are needed" in fail("diagonal", *rest)


def test_nan_in_weights(network: Network) -> None:
    state = {"weight": torch.full((4, 9), torch.nan)}
    assert "has NaN or infinite values" in diagonal_of(network, state)


def test_unfit_data(network: Network, tmp_path: Path) -> None:
    def message(path: str | Path, *arguments: object) -> str:
        options = [network.weights, "--data", path, "--activation", "relu", *CROSS_ENTROPY]
        return fail("diagonal", *options, *arguments)

    assert "no such file: nowhere.npz" in message("nowhere.npz")
    assert "those are digits, mnist" in message("digit")
    assert "must be an .npz, .npy or .safetensors file" in message("data.csv")
    path = tmp_path / "other.npz"
    np.savez(path, a=np.ones((3, 9)), b=np.ones(3))
    assert "must have an array named 'inputs' or 'x' or 'X'; it has 'a', 'b'" in message(path)
    np.savez(path, x=np.array(["a", "b"]))
    assert "the array 'x' of" in message(path)
    np.savez(path, x=np.array([{}, {}]))
    assert "holds Python objects" in message(path)
    np.savez(path, x=np.ones((3, 9)), y=np.ones(2, int))
    assert "has 3 inputs, but targets of shape (2,)" in message(path)
    np.savez(path, x=np.ones((0, 9)))
    assert "has no points" in message(path)
    np.savez(path, x=np.ones((3, 8)))
    assert "the model cannot read points of shape (8,)" in message(path)
    np.savez(path, x=np.full((3, 9), np.nan))
    assert "NaN or infinite" in message(path)
    for content in (b"", b"nonsense", network.data.read_bytes()[:300]):
        path.write_bytes(content)
        assert "cannot be read" in message(path)
    assert "--num-points 41 is more than" in message(network.data, "--num-points", 41)


def test_pickles_are_never_loaded(network: Network, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    np.save(tmp_path / "X.npy", np.array([Malicious()]), allow_pickle=True)
    np.savez(tmp_path / "X.npz", x=np.array([Malicious()]))
    for name in ("X.npy", "X.npz"):
        options = [network.weights, "--data", tmp_path / name, "--activation", "relu"]
        assert "cannot be read" in fail("diagonal", *options, *CROSS_ENTROPY)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("command", ["compress", "diagonal", "compare"])
def test_targets_are_checked_before_any_work(
    network: Network, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(given: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr(problem, "read_problem", work)
    option = "--report" if command == "compare" else "--out"
    arguments = [command, *network.options, option]
    folder = network.folder
    assert "no such folder" in fail(*arguments, folder / "nowhere" / "x.npy")
    (folder / "folder.npy").mkdir()
    assert "is a folder" in fail(*arguments, folder / "folder.npy")
    if command == "compare":
        with monkeypatch.context() as patch:
            patch.setattr("hcurv.cli.commands.compare.find_spec", lambda name: None)
            assert "pip install 'hcurv[plots]'" in fail(*arguments, folder / "report.html")
    if command == "diagonal":
        assert "must end with .npy" in fail(*arguments, folder / "d.txt")
    else:
        assert "is an input" in fail(*arguments, network.weights)
        assert "is an input" in fail(*arguments, network.data)


def test_unfit_files(network: Network, saved: Path, tmp_path: Path) -> None:
    assert "no such file" in fail("info", "nowhere.safetensors")
    assert "holds nothing of hcurv" in fail("info", network.weights)
    assert "a state dict needs --data and --loss" in fail("eigs", network.weights)
    hcurv.load(saved).factorize(10.0).save(tmp_path / "F.safetensors")  # type: ignore[union-attr]
    factorization = tmp_path / "F.safetensors"
    assert "is a factorization" in fail("eigs", factorization)
    assert "only compressed matrices" in fail("info", factorization, "--plot", tmp_path / "F.png")
    message = fail("solve", factorization, "--rhs", "random", "--damping", 1)
    assert "with damping 10: leave --damping out" in message
    assert "must end with .png or .svg or .pdf" in fail("info", saved, "--plot", tmp_path / "A.txt")


def test_unfit_solves(saved: Path, tmp_path: Path) -> None:
    assert "give one with --damping" in fail("solve", saved, "--rhs", "random")
    message = fail("solve", saved, "--rhs", "random", "--damping", "1e-9")
    assert "is not positive definite" in message
    path = tmp_path / "b.npy"
    arguments = ["solve", saved, "--damping", 10, "--rhs", path]
    assert "no such file" in fail(*arguments)
    np.save(path, np.ones(39))
    assert "must have shape (40,) or (40, k); got (39,)" in fail(*arguments)
    np.save(path, np.full(40, np.inf))
    assert "NaN or infinite" in fail(*arguments)
    np.savez(tmp_path / "b.npz", a=np.ones(40), b=np.ones(40))
    message = fail(*arguments[:-1], tmp_path / "b.npz")
    assert "must hold one array; it has 'a', 'b'" in message


def test_unfit_eigenvalues(network: Network, saved: Path) -> None:
    assert "k must be less than N = 40" in fail("eigs", saved, "-k", 40)
    message = fail("eigs", *network.options, "--near", 0.1)
    assert "need a factorization" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compres"], "No such command 'compres'"),
        (["compress", "--nonsense"], "--nonsense"),
        (["compress", "W.safetensors"], "Missing option '--data'"),
        (["diagonal", "W.safetensors", "--data", "x.npz", "--loss", "hinge"], "'hinge'"),
        (["eigs", "A.safetensors", "-k", "many"], "-k"),
        (["eigs", "A.safetensors", "-k", "0"], "-k"),
        (["eigs"], "a compressed matrix is needed"),
        (["eigs", "W.safetensors", "--data", "x.npz"], "needs --data and --loss"),
        (["info"], "Missing argument 'FILE'"),
        (["solve", "A.safetensors"], "one of --rhs, --sample"),
        (["solve", "--logdet"], "a compressed matrix is needed, or --data"),
        (["solve", "W.safetensors", "--logdet", "--data", "X.npz"], "needs --data and --loss"),
        (
            ["solve", "W.safetensors", "--logdet", "--data", "digits", "--loss", "mse"],
            "the exact matrix needs --damping",
        ),
        (["solve", "A.safetensors", "--logdet", "--tolerance", "0.1"], "--tolerance is for"),
        (["solve", "A.safetensors", "--rhs", "random", "--sample", "3"], "choose one of"),
        (["solve", "A.safetensors", "--logdet", "--out", "x.npy"], "--out is for"),
        (["reproduce", "everything"], "'everything'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in fail(*arguments, code=2)


def test_wrong_global_rank(network: Network) -> None:
    arguments = [*network.options, "--out", network.folder / "A.safetensors", "--global-rank", "x"]
    assert "for --global-rank: a number or auto" in fail("compress", *arguments, code=2)


def test_library_refusals_of_options(network: Network) -> None:
    arguments = ["compress", *network.options, "--out", network.folder / "A.safetensors"]
    before = sorted(network.folder.iterdir())
    assert "damping" in fail(*arguments, "--damping", "-1")
    assert "tolerance must be" in fail(*arguments, "--tolerance", "nan")
    assert "ordering" in fail(*arguments, "--ordering", "backwards")
    assert "storage must be" in fail("compare", *network.options, "--storage", "0")
    assert sorted(network.folder.iterdir()) == before


def test_too_little_memory_is_one_line(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcurv.memory.available_bytes", lambda device: 1000)
    message = fail("diagonal", *network.options)
    assert "only 1 kB is free" in message
    assert "Ways out: " in message
    assert " - " not in message


def test_missing_packages_are_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = fail("info", saved, "--plot", saved.with_suffix(".png"))
    assert "pip install 'hcurv[plots]'" in message


def test_bugs_are_one_line_unless_debugged(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(given: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(problem, "read_problem", bug)
    message = fail("diagonal", *network.options)
    assert message == "unexpected KeyError: 'surprise' (HCURV_DEBUG=1 shows where)"
    result = run("diagonal", *network.options, env={"HCURV_DEBUG": "1"})
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in bug" in result.stderr


def test_warnings_are_one_line(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    out = network.folder / "A.safetensors"
    options = ("--max-rank", 1, "--leaf-size", 8, "--global-rank", 0, "--tolerance", "1e-5")
    with warnings.catch_warnings():
        warnings.simplefilter("always", CompressionWarning)
        result = run("compress", *network.options, "--out", out, *options, "--json")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: the estimated relative error")
    assert result.stdout.startswith("{")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_half_written_is_left(
    network: Network, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def save(stream: object, *_: object, **__: object) -> None:
        stream.write(b"half")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(arrays.np, "save", save)
    before = sorted(network.folder.iterdir())
    result = run("diagonal", *network.options, "--out", network.folder / "d.npy")
    interrupted = isinstance(error, KeyboardInterrupt)
    assert result.exit_code == (130 if interrupted else 1)
    assert result.stderr.strip() == ("interrupted" if interrupted else f"error: {error}")
    assert sorted(network.folder.iterdir()) == before
