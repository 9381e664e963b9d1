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


def cells(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", TABLES)
def test_quick_run(name: str, tmp_path: Path) -> None:
    path = reproduce(name, tmp_path, quick=True)
    assert path == tmp_path / f"{name}-quick.md"
    rows = json.loads((tmp_path / f"{name}-quick.json").read_text())["rows"]
    assert list(rows) == list(TABLES[name].rows(True))
    for row in rows.values():
        assert row["seconds"] > 0
        assert {"torch", "python", "hcurv"} <= set(row["versions"])
        assert row["machine"]["threads"] >= 1
    check_values(name, [row["values"] for row in rows.values()])
    header, *lines = cells(path)
    assert lines
    assert all(len(line) == len(header) for line in lines)
    text = path.read_text()
    assert f"hcurv reproduce {name} --quick" in text
    assert (tmp_path / f"{name}-quick.png").read_bytes().startswith(b"\x89PNG")
    assert f"({name}-quick.png)" in text


def check_values(name: str, rows: list[dict[str, Any]]) -> None:
    """What was measured makes sense."""
    if name == "pruning":
        magnitude, steps = rows
        assert steps["accuracies"]["0.95"] > magnitude["accuracies"]["0.95"] + 10
        assert steps["dense"] == magnitude["dense"] > steps["accuracies"]["0.95"]
    for row in rows:
        if name == "cost-accuracy":
            assert row["tree"]["error"] < 0.1
            assert row["default"]["error"] < 1.5e-2
            assert 0 < row["default"]["storage"] < 1
        elif name == "comparison":
            assert row["hm_storage"] <= 0.05
            assert row["hm_error"] < row["kfac_exact_error"]
        elif name == "sampling":
            assert row["errors"][0] > row["errors"][-1] > 0
        elif name == "sampled-compression":
            assert row["errors"] == sorted(row["errors"], reverse=True)
            assert 0 < row["errors"][-1] < 0.5
        elif name == "training":
            assert row["loss"] < row["curve"][0][1]
        elif name == "complexity":
            assert all(row[method]["solve"] > 0 for method in ("MF", "RSVD", "K-FAC", "HM"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The networks that a table of made-up values has measured; the second one stops it once."""
    names: list[str] = []
    found = {"storage": 0.1, "error": 0.1, "build_seconds": 1.0, "product_seconds": float("nan")}

    def measure(settings: dict[str, Any], data: str | None) -> dict[str, Any]:
        names.append(settings["network"])
        if settings["network"] == "AE (digits)" and len(names) < 3:
            raise KeyboardInterrupt
        return {"size": 1, "dense_product_seconds": None, "tree": found, "default": found}

    table = replace(TABLES["cost-accuracy"], measure=measure)
    monkeypatch.setitem(TABLES, "cost-accuracy", table)
    monkeypatch.setattr(module, "_markdown", lambda *_: "")
    monkeypatch.setattr(module, "_draw", lambda *_: None)
    return names


def test_a_row_is_measured_once_with_the_same_settings(tmp_path: Path, measured: list[str]) -> None:
    path = tmp_path / "cost-accuracy-quick.json"
    with pytest.raises(KeyboardInterrupt):
        reproduce("cost-accuracy", tmp_path, quick=True)
    assert list(tmp_path.iterdir()) == [path]
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["classifier (digits)"]
    assert rows["classifier (digits)"]["values"]["tree"]["product_seconds"] is None
    reproduce("cost-accuracy", tmp_path, quick=True)
    reproduce("cost-accuracy", tmp_path, quick=True)
    assert measured == ["classifier (digits)", "AE (digits)", "AE (digits)"]
    content = json.loads(path.read_text())
    content["rows"]["AE (digits)"]["settings"]["num_points"] = 7
    content["rows"]["AE (digits)"]["values"]["size"] = 123
    path.write_text(json.dumps(content))
    reproduce("cost-accuracy", tmp_path, quick=True)
    assert measured[3:] == ["AE (digits)"]
    assert json.loads(path.read_text())["rows"]["AE (digits)"]["values"]["size"] == 1


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
