"""Every command gives what the library gives."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from typer.main import get_command

import hcurv
from command_line import LAYERS, Network, run, succeed, succeed_json, write_network
from hcurv.cli import models, options
from hcurv.cli.commands.reproduce import TABLES
from hcurv.cli.output import print_json
from hcurv.cli.program import app
from hcurv.experiments import demo as demonstration

COMMANDS = get_command(app).commands
DAMPING = 0.01


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return write_network(tmp_path_factory.mktemp("network"))


@pytest.fixture(scope="module")
def matrix(network: Network) -> hcurv.HMatrix:
    return hcurv.compress(
        network.exact(),
        tolerance=1e-3,
        leaf_size=16,
        global_rank=0,
        damping=DAMPING,
    )


@pytest.fixture(scope="module")
def saved(network: Network, matrix: hcurv.HMatrix) -> Path:
    path = network.folder / "A.safetensors"
    matrix.save(path)
    return path


@pytest.fixture(scope="module")
def factorization(network: Network, matrix: hcurv.HMatrix) -> Path:
    path = network.folder / "F.safetensors"
    matrix.factorize(0.05).save(path)
    return path


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--tolerance", "1e-3"], {"tolerance": 1e-3}),
        (["--accuracy", "high"], {"accuracy": "high"}),
        (["--max-storage", "0.4"], {"max_storage": 0.4}),
        (
            ["--leaf-size", "16", "--max-rank", "5", "--tolerance", "0.5"],
            {"leaf_size": 16, "max_rank": 5, "tolerance": 0.5},
        ),
        (["--global-rank", "3", "--seed", "7"], {"global_rank": 3, "seed": 7}),
        (["--ordering", "natural", "--leaf-size", "20"], {"ordering": "natural", "leaf_size": 20}),
        (["--damping", "0.1"], {"damping": 0.1}),
    ],
)
def test_compress_gives_the_matrix_of_the_library(
    network: Network, tmp_path: Path, given: list[str], wanted: dict[str, Any]
) -> None:
    out = tmp_path / "A.safetensors"
    document = succeed_json("compress", *network.options, "--out", out, *given)
    expected, found = hcurv.compress(network.exact(), **wanted), hcurv.load(out)
    assert isinstance(found, hcurv.HMatrix)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.record == expected.record
    assert document["estimated_error"] == expected.estimated_error
    assert document["compression_rate"] == expected.compression_rate
    assert document["nbytes"] == expected.nbytes
    assert document["num_points"] == 40
    assert document["settings"]["seed"] == wanted.get("seed", 0)
    assert document["file"] == str(out)
    assert document["compression_seconds"] > 0
    assert (document["plan"] is None) == (expected.plan is None)


def test_compress_tells_error_storage_time_and_plan(network: Network, tmp_path: Path) -> None:
    out = tmp_path / "A.safetensors"
    printed = succeed("compress", *network.options, "--tolerance", "0.01", "--out", out)
    found = hcurv.load(out)
    assert isinstance(found, hcurv.HMatrix)
    assert f"{found.estimated_error:.2e} estimated, 1.00e-02 asked for" in printed
    assert f"{found.compression_rate:.4%} of N²" in printed
    assert "s compression" in printed
    assert str(found.plan) in printed


def test_progress_goes_to_stderr(network: Network, tmp_path: Path) -> None:
    arguments = ("compress", *network.options, "--out", tmp_path / "A.safetensors", "--json")
    for option, shown in (("--progress", True), ("--no-progress", False)):
        result = run(*arguments, option)
        assert ("points" in result.stderr) == shown
        assert result.stdout.startswith("{")
    assert run(*arguments).stderr == ""  # which is no terminal


def test_info_describes_a_matrix(saved: Path, matrix: hcurv.HMatrix) -> None:
    document = succeed_json("info", saved)
    assert document["kind"] == "HMatrix"
    assert document["size"] == matrix.shape[0] == 102
    assert document["dtype"] == "float32"
    assert document["num_stored"] == matrix.num_stored
    assert document["settings"]["damping"] == DAMPING
    assert [level["max"] for level in document["ranks"]] == [int(r.max()) for r in matrix.ranks]
    assert document["versions"]["hcurv"] == hcurv.__version__
    assert document["versions"]["format"] >= 2
    printed = succeed("info", saved)
    assert f"{matrix.estimated_error:.2e} estimated" in printed
    assert "with damping 0.01" in printed
    assert "102 rows, depth 3" in printed
    assert "leaves of up to 16 rows" in printed


def test_info_describes_a_factorization(factorization: Path, matrix: hcurv.HMatrix) -> None:
    document = succeed_json("info", factorization)
    assert document["kind"] == "Factorization"
    assert document["damping"] == 0.05
    assert document["log_determinant"] == pytest.approx(float(matrix.factorize(0.05).logdet()))
    assert "Factorization" in succeed("info", factorization)


def test_info_draws(saved: Path, tmp_path: Path) -> None:
    picture = tmp_path / "A.SVG"
    assert str(picture) in succeed("info", saved, "--plot", picture)
    assert "<svg" in picture.read_text()
    assert list(tmp_path.iterdir()) == [picture]


@pytest.mark.parametrize("shape", [(102,), (102, 3)])
def test_solve_writes_the_solution(
    saved: Path, matrix: hcurv.HMatrix, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    right = np.random.default_rng(0).standard_normal(shape)
    np.save(tmp_path / "b.npy", right)
    out = tmp_path / "x.npy"
    arguments = ("--damping", "0.2", "--rhs", tmp_path / "b.npy", "--out", out)
    document = succeed_json("solve", saved, *arguments)
    expected = matrix.factorize(0.2).solve(torch.from_numpy(right).float())
    assert np.array_equal(np.load(out), expected.numpy())
    assert document["relative_residual"] < 1e-5
    assert document["num_columns"] == (1 if len(shape) == 1 else 3)
    assert document["damping"] == 0.2
    assert "relative residual" in succeed("solve", saved, *arguments)


def test_solve_uses_the_damping_that_the_file_has(
    saved: Path, factorization: Path, matrix: hcurv.HMatrix
) -> None:
    document = succeed_json("solve", saved, "--logdet")
    assert document["damping"] == DAMPING
    assert document["log_determinant"] == pytest.approx(float(matrix.factorize(DAMPING).logdet()))
    document = succeed_json("solve", factorization, "--rhs", "random", "--logdet")
    assert document["damping"] == 0.05
    assert document["relative_residual"] is None  # A itself is not known
    assert document["log_determinant"] == pytest.approx(float(matrix.factorize(0.05).logdet()))


def test_solve_samples_and_computes_variances(
    saved: Path, matrix: hcurv.HMatrix, tmp_path: Path
) -> None:
    out, factors = tmp_path / "out.npy", matrix.factorize(DAMPING)
    succeed("solve", saved, "--sample", "5", "--seed", "3", "--out", out)
    expected = factors.sample(5, torch.Generator().manual_seed(3))
    assert np.array_equal(np.load(out), expected.numpy())
    document = succeed_json("solve", saved, "--inverse-diagonal", "--out", out)
    assert np.array_equal(np.load(out), factors.inverse_diagonal().numpy())
    assert document["variances"]["max"] == pytest.approx(float(factors.inverse_diagonal().max()))


@pytest.mark.parametrize("where", ["largest", "smallest", "near"])
def test_eigs_of_a_file(saved: Path, matrix: hcurv.HMatrix, tmp_path: Path, where: str) -> None:
    every = torch.linalg.eigvalsh(matrix.to_dense().double())
    if where == "near":
        middle = 1.01 * float(every[-5])
        given, wanted = ["--near", middle], every[(every - middle).abs().argsort()[:3]]
    else:
        given = ["--which", where]
        wanted = every[:3] if where == "smallest" else every[-3:].flip(0)
    out = tmp_path / "pairs.npz"
    document = succeed_json("eigs", saved, "-k", 3, *given, "--tolerance", 1e-6, "--out", out)
    rounding = 1e-6 * float(every[-1])
    assert document["values"] == pytest.approx(wanted.tolist(), rel=1e-4, abs=rounding)
    assert document["exact"] is False
    assert document["which"] == where
    with np.load(out) as pairs:
        assert np.array_equal(pairs["values"], document["values"])
        values, vectors = (torch.from_numpy(pairs[name]) for name in ("values", "vectors"))
        left = matrix @ vectors - vectors * values
        assert float(left.norm()) < 10 * rounding


def test_eigs_of_the_exact_matrix(network: Network) -> None:
    document = succeed_json("eigs", *network.options, "-k", "4")
    expected = torch.linalg.eigvalsh(network.exact().to_dense().double())[-4:].flip(0)
    assert document["values"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert document["exact"] is True
    assert f"{document['values'][0]:.4g}"[:4] in succeed("eigs", *network.options, "-k", "4")


def test_solve_with_the_exact_matrix(network: Network, tmp_path: Path) -> None:
    right, out = tmp_path / "b.npy", tmp_path / "x.npy"
    exact = network.exact()
    factors = exact.factorize(0.05)
    b = exact @ torch.ones(exact.shape[0], dtype=exact.dtype)
    np.save(right, b.numpy())
    arguments = ["solve", *network.options, "--damping", "0.05"]
    document = succeed_json(*arguments, "--rhs", right, "--logdet", "--out", out)
    torch.testing.assert_close(torch.from_numpy(np.load(out)), factors.solve(b))
    assert document["exact"] is True
    assert document["way"] == factors.plan.chosen.description
    assert document["relative_residual"] < 1e-2
    assert document["log_determinant"] == pytest.approx(float(factors.logdet()))
    succeed(*arguments, "--inverse-diagonal", "--out", out)
    np.testing.assert_allclose(np.load(out), factors.inverse_diagonal(), rtol=1e-4)
    printed = succeed(*arguments, "--sample", "3", "--out", out, "--tolerance", "1e-3")
    assert np.load(out).shape == (3, exact.shape[0])
    assert f"way {factors.plan.chosen.name}" in " ".join(printed.split())


def test_diagonal_layer_by_layer(network: Network, tmp_path: Path) -> None:
    out, expected = tmp_path / "d.npy", network.exact().diagonal()
    document = succeed_json("diagonal", *network.options, "--out", out)
    assert np.array_equal(np.load(out), expected.numpy())
    first, second = document["layers"]
    assert first["sum"] == pytest.approx(float(expected[:70].sum()))
    assert second["max"] == pytest.approx(float(expected[70:].max()))
    assert first["zeros"] == pytest.approx(float((expected[:70] == 0).float().mean()))
    assert document["trace"] == pytest.approx(float(expected.sum()))
    printed = succeed("diagonal", *network.options)
    assert all(layer in printed for layer in LAYERS)


def test_compare_reports(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.html"
    arguments = ("compare", *network.options, "--storage", "0.3", "--damping", "0.01")
    document = succeed_json(*arguments)
    data = (network.inputs, network.targets)
    expected = hcurv.compare(
        network.model, torch.nn.CrossEntropyLoss(), data, storage=0.3, damping=0.01
    )
    # What is shown needs no further measurement.
    monkeypatch.setattr("hcurv.report.compare_methods.compare", lambda *_, **__: expected)
    printed = succeed(*arguments, "--report", report)
    assert "<html" in report.read_text()
    assert list(tmp_path.iterdir()) == [report]
    assert [method["name"] for method in document["methods"]] == [m.name for m in expected.methods]
    for found, wanted in zip(document["methods"], expected.methods, strict=True):
        assert found["error"] == pytest.approx(wanted.error)
        assert wanted.name in printed
    assert document["damping"] == 0.01
    assert document["report"] is None


def test_reproduce_calls_the_experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def stand_in(
        name: str,
        folder: Path,
        *,
        quick: bool,
        data: str | None,
        progress: bool,
        only: str | None,
        seconds: float | None,
    ) -> Path:
        print("measuring")
        calls.append((name, folder, quick, data, progress, only, seconds))
        path = tmp_path / f"{name}.md"
        path.write_text(f"| {name} |\n")
        return path

    module = ModuleType("hcurv.experiments.reproduce")
    module.reproduce = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert succeed("reproduce", "memory", "--quick", "--data", "folder") == "| memory |\n\n"
    assert calls == [("memory", Path("results"), True, "folder", False, None, None)]
    assert succeed("reproduce", "training", "--only", "Adam", "--seconds", "9")
    assert calls.pop() == ("training", Path("results"), False, None, False, "Adam", 9.0)
    document = succeed_json("reproduce", "all", "--out", tmp_path)
    assert [table["name"] for table in document["tables"]] == list(TABLES)
    assert [call[0] for call in calls[1:]] == list(TABLES)
    assert document["tables"][0]["markdown"] == f"| {TABLES[0]} |\n"


def test_tables_are_those_of_the_experiments() -> None:
    reproduce = pytest.importorskip("hcurv.experiments.reproduce")
    assert sorted(TABLES) == sorted(reproduce.TABLES)


def test_demo_runs_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(folder: Path) -> None:
        print("a picture")
        (folder / "picture.png").write_text("")

    monkeypatch.setattr(demonstration, "main", stand_in)
    assert succeed("demo", tmp_path) == "a picture\n"
    document = succeed_json("demo", tmp_path)
    assert document == {"folder": str(tmp_path), "files": [str(tmp_path / "picture.png")]}


def test_names_of_options_are_those_of_the_tables() -> None:
    assert get_args(options.ActivationName) == tuple(models.ACTIVATIONS)
    assert get_args(options.LossName) == tuple(models.LOSSES)
    assert get_args(options.DtypeName) == tuple(models.DTYPES)


def test_json_has_nothing_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor([1.5, torch.nan, -torch.inf])
    print_json({"a": values, "b": {"c": (math.inf, None, True)}, "d": Path("e"), "f": np.int64(3)})
    found = json.loads(capsys.readouterr().out)
    assert found == {"a": [1.5, None, None], "b": {"c": [None, None, True]}, "d": "e", "f": 3}


def shown_examples() -> list[str]:
    """Command lines of the tutorial, in blocks and within sentences, and of all help texts."""
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "command-line.md"
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    sentences = re.findall(r"`(hcurv [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    help_texts = [command.epilog or "" for command in COMMANDS.values()]
    lines = [line for block in (*blocks, *help_texts) for line in block.splitlines()]
    lines += [" ".join(sentence.split()) for sentence in sentences]
    found = [line.partition("#")[0].strip() for line in lines if line.strip().startswith("hcurv ")]
    return [line for line in found if not line.startswith("hcurv --")]


@pytest.mark.parametrize("line", shown_examples())
def test_examples_are_understood(line: str) -> None:
    _, name, *arguments = line.split()
    COMMANDS[name].make_context(name, arguments)  # raises on wrong usage


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in shown_examples()}
    assert shown == set(COMMANDS)
