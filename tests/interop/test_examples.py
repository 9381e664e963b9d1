"""The examples of the page on other libraries, and of the docstrings, run where these are."""

from __future__ import annotations

import doctest
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import hcurv

PAGE = (Path(__file__).parents[2] / "docs" / "interop.md").read_text()
BLOCK = re.compile(r"^```(?P<kind>python|py)\n(?P<text>.*?)^```$", re.M | re.S)
LIBRARIES = {
    "linear_operator": "linear_operator",
    "laplace": "laplace",
    "curvlinops": "curvlinops._torch_base",
    "dattri": "dattri",
    "kronfluence": "safetensors",
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
MODULES = pytest.mark.parametrize("module", LIBRARIES)


def require(module: str) -> None:
    name = LIBRARIES[module]
    if find_spec(name.partition(".")[0]) is None or find_spec(name) is None:
        pytest.skip(f"{name} is not installed (make test-interop)")


def section(module: str) -> str:
    """The part of the page that shows a module."""
    parts = re.split(r"^## ", PAGE, flags=re.M)
    (found,) = [part for part in parts if f"hcurv.interop.{module}" in part and ":::" not in part]
    return found


@MODULES
def test_the_page_runs(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(module)
    monkeypatch.chdir(tmp_path)
    first = BLOCK.search(PAGE)
    assert first is not None
    scope: dict[str, object] = {"__name__": "page"}
    with torch.random.fork_rng(devices=[]):
        for text in (first["text"], *(found["text"] for found in BLOCK.finditer(section(module)))):
            exec(compile(text, "interop.md", "exec"), scope)


@MODULES
def test_the_docstrings_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(module)
    monkeypatch.chdir(tmp_path)
    own = importlib.import_module(f"hcurv.interop.{module}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)
        ).double()
        inputs, targets = torch.randn(20, 4).double(), torch.randint(3, (20,))
        b = torch.randn(51).double()
        loss = torch.nn.CrossEntropyLoss()
        H = hcurv.GaussNewton(model, loss, (inputs, targets))
        scope = {"H": H, "F": H.factorize(1e-2), "b": b, "model": model, "loss": loss}
        scope |= {"inputs": inputs, "targets": targets, "torch": torch, "hcurv": hcurv}
        num_examples = 0
        for name in own.__all__:
            text = getattr(own, name).__doc__ or ""
            example = doctest.DocTestParser().get_doctest(text, dict(scope), name, None, None)
            num_examples += len(example.examples)
            output: list[str] = []
            assert not doctest.DocTestRunner().run(example, out=output.append).failed, output
    assert num_examples > 0
