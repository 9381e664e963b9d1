"""The examples in the docstrings of the public API run, and every public name has one.

A name is public when it is in ``hcurv.__all__`` or in that of ``hcurv.baselines`` or
``hcurv.losses``, or when it is a public method or property of a class there. Examples start with
the names of ``predefined`` below already set, and run in an empty folder of their own.
"""

from __future__ import annotations

import copy
import doctest
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

import hcurv


def public_objects() -> dict[str, object]:
    """Every public function, class, method and property, by its name below ``hcurv``.

    A method appears once, under the class that defines it.
    """
    objects: dict[str, object] = {}
    seen: set[int] = set()

    def add(name: str, value: object) -> None:
        if id(value) not in seen:
            seen.add(id(value))
            objects[name] = value

    classes: dict[type, str] = {}
    for module in (hcurv, hcurv.baselines, hcurv.losses, hcurv.optim):
        prefix = module.__name__.removeprefix("hcurv").removeprefix(".")
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            path = f"{prefix}.{name}".removeprefix(".")
            if isinstance(value, type):
                classes.setdefault(value, path)
            add(path, value)
    for public in list(classes):
        for owner in inspect.getmro(public):
            if owner.__module__.partition(".")[0] == "hcurv":
                path = classes.setdefault(owner, owner.__qualname__)
                for name, value in members(owner):
                    add(f"{path}.{name}", value)
    return objects


def members(owner: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that a class itself defines."""
    for name, value in vars(owner).items():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if not name.startswith("_") and isinstance(
            value, (FunctionType, property, cached_property)
        ):
            yield name, value


def docstring(name: str) -> str:
    """The docstring of a public object; that of the overridden method where it has none."""
    return inspect.getdoc(OBJECTS[name]) or ""


def has_example(name: str) -> bool:
    return "\nExamples:\n" in docstring(name) and ">>> " in docstring(name)


OBJECTS = public_objects()
NEED_EXAMPLE = sorted(
    name for name, value in OBJECTS.items() if not isinstance(value, (property, cached_property))
)
WITH_EXAMPLE = sorted(name for name, value in OBJECTS.items() if ">>> " in (value.__doc__ or ""))


@pytest.fixture(scope="module")
def predefined() -> dict[str, object]:
    """The names that examples can use without defining them; built once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)
        ).double()
        inputs = torch.randn(20, 4, dtype=torch.float64)
        targets = torch.randint(3, (20,))
        b = torch.randn(51, dtype=torch.float64)
    loss = torch.nn.CrossEntropyLoss()
    H = hcurv.GaussNewton(model, loss, (inputs, targets))
    A = hcurv.compress(H, tolerance=1e-2)
    F = A.factorize(1e-2)
    comparison = hcurv.compare(model, loss, inputs, storage=0.5, num_probes=16)
    return {
        "model": model,
        "loss": loss,
        "inputs": inputs,
        "targets": targets,
        "H": H,
        "A": A,
        "F": F,
        "b": b,
        "comparison": comparison,
    }


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_example_runs(
    name: str, predefined: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = docstring(name)
    used = {word: value for word, value in predefined.items() if re.search(rf"\b{word}\b", text)}
    scope = {"hcurv": hcurv, "torch": torch, **copy.deepcopy(used)}
    example = doctest.DocTestParser().get_doctest(
        text, scope, name, inspect.getsourcefile(hcurv), None
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    # Whatever an example draws is the same in every run, and no other test notices.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        failed = runner.run(example, out=output.append).failed
    assert not failed, "".join(output)


@pytest.mark.parametrize("name", NEED_EXAMPLE)
def test_public_name_has_an_example(name: str) -> None:
    assert has_example(name), f"the docstring of {name} needs 'Examples:' with a '>>> '"
