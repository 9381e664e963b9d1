"""``import hcurv`` is quick: what needs torch is imported when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import hcurv


def test_import_does_not_import_torch() -> None:
    code = (
        "import sys, hcurv; assert 'torch' not in sys.modules, 'import';"
        "dir(hcurv); assert 'torch' not in sys.modules, 'dir'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    for name in hcurv.__all__:
        value = getattr(hcurv, name)
        assert value.__name__.rpartition(".")[2] == name
        assert name in dir(hcurv)
    scope: dict[str, object] = {}
    exec("from hcurv import *", scope)
    assert scope.keys() >= set(hcurv.__all__)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hcurv' has no attribute 'does_not_exist'"):
        hcurv.does_not_exist  # noqa: B018
    with pytest.raises(ImportError, match="does_not_exist"):
        from hcurv import does_not_exist  # noqa: F401


def test_no_module_takes_the_place_of_a_public_name() -> None:
    modules = {found.name for found in pkgutil.iter_modules(hcurv.__path__)} - {"__main__"}
    for name in modules:
        importlib.import_module(f"hcurv.{name}")
    for name in hcurv.__all__:
        assert isinstance(getattr(hcurv, name), ModuleType) == (name in modules)
