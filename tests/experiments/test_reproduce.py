"""The paper's tables: quick runs of each, resumed runs, and what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hcurv.experiments import reproduce as module
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS
from hcurv.experiments.reproduce import TABLES, reproduce


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


def cells(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", TABLES)
def test_quick_run(name: str, folder: Path) -> None:
    path = reproduce(name, folder, quick=True)
    assert path == folder / f"{name}-quick.md"
    rows = json.loads((folder / f"{name}-quick.json").read_text())["rows"]
    assert list(rows) == list(TABLES[name].rows(True))
    for row in rows.values():
        assert row["seconds"] > 0
        assert {"torch", "python", "hcurv"} <= set(row["versions"])
        assert row["machine"]["threads"] >= 1
    header, *lines = cells(path)
    assert lines
    assert all(len(line) == len(header) for line in lines)
    text = path.read_text()
    assert f"hcurv reproduce {name} --quick" in text
    assert (folder / f"{name}-quick.png").read_bytes().startswith(b"\x89PNG")
    assert f"({name}-quick.png)" in text


def test_quick_values_make_sense(folder: Path) -> None:
    """Of the files that the runs above have left, or made here."""
    values: dict[str, list[dict[str, Any]]] = {}
    for name in TABLES:
        reproduce(name, folder, quick=True)
        rows = json.loads((folder / f"{name}-quick.json").read_text())["rows"]
        values[name] = [row["values"] for row in rows.values()]
    for row in values["cost-accuracy"]:
        assert row["tree"]["error"] < 0.1
        assert row["default"]["error"] < 1.5e-2
        assert 0 < row["default"]["storage"] < 1
    for row in values["comparison"]:
        assert row["hm_storage"] <= 0.05
        assert row["hm_error"] < row["kfac_exact_error"]
    sampling = json.loads((folder / "sampling-quick.json").read_text())["rows"]
    for row in sampling.values():
        errors = row["values"]["errors"]
        assert errors[0] > errors[-1] > 0
    for row in values["sampled-compression"]:
        assert row["errors"] == sorted(row["errors"], reverse=True)
        assert 0 < row["errors"][-1] < 0.5
    magnitude, steps = values["pruning"]
    assert steps["accuracies"]["0.95"] > magnitude["accuracies"]["0.95"] + 10
    assert steps["dense"] == magnitude["dense"] > steps["accuracies"]["0.95"]
    for row in values["training"]:
        assert row["loss"] < row["curve"][0][1]
    for row in values["complexity"]:
        assert all(row[method]["solve"] > 0 for method in ("MF", "RSVD", "K-FAC", "HM"))


def test_a_row_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(settings: dict[str, Any], data: str | None) -> dict[str, Any]:
        measured.append(settings["network"])
        if settings["network"] == "AE (digits)" and len(measured) < 3:
            raise KeyboardInterrupt
        return {"size": 1, "dense_product_seconds": None, "tree": found, "default": found}

    found = {"storage": 0.1, "error": 0.1, "build_seconds": 1.0, "product_seconds": float("nan")}
    table = replace(TABLES["cost-accuracy"], measure=measure)
    monkeypatch.setitem(TABLES, "cost-accuracy", table)
    with pytest.raises(KeyboardInterrupt):
        reproduce("cost-accuracy", tmp_path, quick=True)
    assert [path.name for path in tmp_path.iterdir()] == ["cost-accuracy-quick.json"]
    reproduced = json.loads((tmp_path / "cost-accuracy-quick.json").read_text())
    assert list(reproduced["rows"]) == ["classifier (digits)"]
    assert reproduced["rows"]["classifier (digits)"]["values"]["tree"]["product_seconds"] is None
    monkeypatch.setattr(module, "_markdown", lambda *_: "")
    reproduce("cost-accuracy", tmp_path, quick=True)
    reproduce("cost-accuracy", tmp_path, quick=True)
    assert measured == ["classifier (digits)", "AE (digits)", "AE (digits)"]


def test_other_settings_are_measured_anew(folder: Path) -> None:
    reproduce("memory", folder, quick=True)
    path = folder / "memory-quick.json"
    content = json.loads(path.read_text())
    content["rows"]["AE (digits)"]["settings"]["num_points"] = 7
    content["rows"]["AE (digits)"]["values"]["size"] = 123
    path.write_text(json.dumps(content))
    reproduce("memory", folder, quick=True)
    assert json.loads(path.read_text())["rows"]["AE (digits)"]["values"]["size"] == 1354


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 9, "rows": {}}'])
def test_foreign_results_are_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "memory-quick.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no results of table 'memory': move it away"):
        reproduce("memory", tmp_path, quick=True)
    assert path.read_text() == content


def test_some_rows_with_another_time(tmp_path: Path) -> None:
    for only, count in (("digits autoencoder, Adam", 1), ("digits autoencoder, L-BFGS", 2)):
        path = reproduce("training", tmp_path, quick=True, only=only, seconds=0.05)
        rows = json.loads((tmp_path / "training-quick.json").read_text())["rows"]
        assert len(rows) == count
        assert rows[only]["settings"]["seconds"] == 0.05
        assert rows[only]["values"]["curve"][-1][0] >= 0.05
        assert "digits autoencoder" in path.read_text()
    with pytest.raises(ValueError, match="no row contains 'Newton-CG'"):
        reproduce("training", tmp_path, quick=True, only="Newton-CG")
    with pytest.raises(ValueError, match="seconds must be positive, and is for the table training"):
        reproduce("memory", tmp_path, quick=True, seconds=3)


def test_unknown_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no table 'memories': choose one of cost-accuracy"):
        reproduce("memories", tmp_path)


@pytest.mark.parametrize("name", TABLES)
def test_full_settings(name: str) -> None:
    settings = TABLES[name].rows(False)
    assert json.loads(json.dumps(settings)) == settings
    for row in settings.values():
        if "network" in row and TABLES[name].number is not None:
            assert row["network"] in REFERENCE_NETWORKS
            # The whole set, or none of it: part of it is for quick runs.
            assert "digits" not in row["network"] or row["num_points"] == 1797


def test_the_published_network_is_read_from_the_data_folder(tmp_path: Path) -> None:
    from hcurv.experiments.datasets import find_file
    from hcurv.experiments.tables import pruning

    shapes = {"fc1.weight": (40, 784), "fc2.weight": (20, 40), "fc3.weight": (10, 20)}
    weights = {name: torch.rand(shape) for name, shape in shapes.items()}
    path = tmp_path / "pruning" / "mnist-mlpnet-93.97.safetensors"
    path.parent.mkdir()
    save_file(weights, path)
    model = pruning._published_network(str(tmp_path))
    found = dict(model.named_parameters())
    assert list(found) == list(shapes)
    assert all(torch.equal(found[name], weights[name]) for name in shapes)
    with pytest.raises(FileNotFoundError, match=r"pruning/none.txt not found: put it into"):
        find_file(tmp_path, "pruning/none.txt")


def test_committed_results_of_pruning_reach_what_is_claimed() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "pruning.json"
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == list(TABLES["pruning"].rows(False))
    imitation = rows["784-40-20-10, steps, 4 corrections, imitation"]["values"]["accuracies"]
    for sparsity, least in (("0.9", 93.5), ("0.95", 93.0), ("0.98", 91.0)):
        assert imitation[sparsity] >= least
    one_step = rows["784-40-20-10, one step, 100 points, 8 corrections"]["values"]["accuracies"]
    assert one_step["0.95"] >= 88
