"""Check the wheel and the sdist of a folder, and the wheel in a clean environment.

    python tests/check_package.py dist

`make package` builds them and runs this. Contents, metadata, and what an installation without any
extra can do: import, compute, say which extra is missing.
"""

from __future__ import annotations

import email
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
REQUIRED = {"torch", "numpy", "scipy", "threadpoolctl", "tqdm"}
# What an archive of the source must have, to build, test and cite from.
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Makefile",
    "constraints.txt",
    "mkdocs.yml",
    "src/hcurv/py.typed",
    "tests/conformance.py",
    "docs/index.md",
    "benchmarks/requirements.txt",
)
MAX_BYTES = 10 * 2**20
# Runs in an environment that has the wheel and what it requires, and nothing else.
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
import torch, hcurv
assert hcurv.__version__ == {version!r}, hcurv.__version__
for name in hcurv.__all__:
    getattr(hcurv, name)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
inputs, labels = torch.randn(20, 4), torch.randint(3, (20,))
H = hcurv.GaussNewton(model, torch.nn.CrossEntropyLoss(), (inputs, labels))
A = hcurv.compress(H, damping=0.1)
b = torch.ones(H.shape[0])
assert torch.allclose(A.factorize(0.1).solve(b), H.factorize(0.1).solve(b), rtol=0.1, atol=0.1)
assert hcurv.laplace(model, torch.nn.CrossEntropyLoss(), (inputs, labels)).predict(inputs)
optional = ("matplotlib", "sklearn", "safetensors", "typer", "rich", "linear_operator")
for name in optional:
    assert name not in sys.modules, name
for name, extra in (("laplace", "laplace-torch"), ("linear_operator", "linear-operator"),
                    ("curvlinops", "curvlinops"), ("dattri", "dattri")):
    try:
        importlib.import_module("hcurv.interop." + name)
    except ModuleNotFoundError as error:
        assert "hcurv[" + extra + "]" in str(error), error
    else:
        raise AssertionError(name + " is installed")
A.save("A.safetensors")
assert torch.equal(hcurv.load("A.safetensors") @ b, A @ b)
"""


def require(condition: object, message: str) -> None:
    if not condition:
        sys.exit(f"package: {message}")


def version() -> str:
    text = (ROOT / "src" / "hcurv" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    assert found is not None
    return found[1]


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    require(len(found) == 1, f"{folder} must hold one {pattern}; it has {len(found)}")
    require(found[0].stat().st_size < MAX_BYTES, f"{found[0]} is larger than {MAX_BYTES} bytes")
    return found[0]


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        info = f"hcurv-{version()}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    source = ROOT / "src"
    expected = {
        str(file.relative_to(source))
        for file in (source / "hcurv").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    packed = {name for name in names if not name.startswith(info)}
    require(packed == expected, f"the wheel differs from src/hcurv in {sorted(packed ^ expected)}")
    require("hcurv/py.typed" in names, "the wheel has no py.typed")
    require(f"{info}/licenses/LICENSE" in names, "the wheel has no licence")
    require("hcurv = hcurv.cli.app:main" in scripts, "the wheel has no command hcurv")
    check_metadata(metadata)


def check_metadata(metadata: Message) -> None:
    require(metadata["Version"] == version(), f"version {metadata['Version']}, not {version()}")
    require(metadata["License-Expression"] == "MIT", "no licence in the metadata")
    require(metadata["Requires-Python"] == ">=3.10", "no version of Python in the metadata")
    require(metadata.get_all("Project-URL"), "no project URLs in the metadata")
    require("# hcurv" in str(metadata.get_payload()), "the README is not in the metadata")
    requirements = metadata.get_all("Requires-Dist") or []
    plain = {re.split(r"[<>=~; \[]", item)[0] for item in requirements if "extra ==" not in item}
    require(plain == REQUIRED, f"the wheel requires {sorted(plain)}, not {sorted(REQUIRED)}")


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SOURCES if name not in names]
    require(not missing, f"the sdist lacks {missing}")
    odd = [name for name in names if re.match(r"(\.venv[^/]*|dist|site|demo)(/|$)", name)]
    require(not odd, f"the sdist holds {odd}")


def check_clean_installation(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        commands = ([str(python), "-m", "hcurv"], [str(python.parent / "hcurv")])
        with zipfile.ZipFile(wheel) as archive:
            metadata = archive.read(f"hcurv-{version()}.dist-info/METADATA")
        needed = email.message_from_bytes(metadata).get_all("Requires-Dist") or []
        link(needed, "", Path(folder))
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel))
        run(python, "-m", "pip", "check")
        run(python, "-W", "error", "-c", WITHOUT_EXTRAS.format(version=version()), cwd=folder)
        for command in commands:
            done = subprocess.run([*command, "--help"], capture_output=True, text=True)
            require(done.returncode == 1, f"{command} works without its extra")
            require("hcurv[cli]" in done.stderr, f"{command} says {done.stderr!r}")
        link(needed, "cli", Path(folder))
        run(python, "-m", "pip", "check")
        helps = [subprocess.run([*command, "--help"], capture_output=True) for command in commands]
        require(all(done.returncode == 0 for done in helps), f"{commands} fail with their extra")
        require(helps[0].stdout == helps[1].stdout, "python -m hcurv and hcurv differ")


def link(requirements: list[str], extra: str, folder: Path) -> None:
    """Link what is required, and what that requires in turn, from the present environment.

    A real installation would take minutes for torch alone, and give the same files.
    """
    (target,) = folder.glob("lib/python*/site-packages")
    waiting, known = [(item, extra) for item in requirements], set()
    while waiting:
        text, own_extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": own_extra}):
            continue
        if requirement.name == "hcurv":
            waiting += [(item, name) for name in requirement.extras for item in requirements]
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        require(distribution.version in requirement.specifier, f"{text} is not installed")
        if requirement.name in known:
            continue
        known.add(requirement.name)
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (target / name).exists():
                (target / name).symlink_to(distribution.locate_file(name))
        waiting += [(item, "") for item in distribution.requires or ()]


def run(python: Path, *arguments: str, cwd: str | None = None) -> None:
    done = subprocess.run([str(python), *arguments], capture_output=True, text=True, cwd=cwd)
    require(done.returncode == 0, f"{arguments[:3]} failed:\n{done.stdout}{done.stderr}")


def main(folder: str) -> None:
    wheel, sdist = only(Path(folder), "*.whl"), only(Path(folder), "*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    check_clean_installation(wheel.absolute())
    print(f"package: {wheel.name} and {sdist.name} are fine")


if __name__ == "__main__":
    main(*sys.argv[1:])
