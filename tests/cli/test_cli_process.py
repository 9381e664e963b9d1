"""The command line as a process of its own: quick help, interrupts, missing packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import save_file
from torch import nn

import hcurv
from cases import normal, seeded

COMMANDS = (
    "compress",
    "info",
    "solve",
    "eigs",
    "diagonal",
    "compare",
    "prune",
    "influence",
    "compare",
    "reproduce",
    "demo",
)


def python(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_help_needs_neither_torch_nor_numpy() -> None:
    code = f"""
import sys
from hcurv.cli.app import main
for command in (None, *{COMMANDS}):
    sys.argv = ["hcurv", "--help"] if command is None else ["hcurv", command, "--help"]
    try:
        main()
    except SystemExit as error:
        assert error.code == 0, (command, error.code)
    else:
        raise AssertionError(command)
slow = {{"torch", "numpy", "scipy", "matplotlib"}} & set(sys.modules)
assert not slow, slow
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: hcurv") == 1 + len(COMMANDS)
    assert done.stdout.count("Examples:") == 1 + len(COMMANDS)
    for command in COMMANDS:
        assert f"\n    hcurv {command}" in done.stdout


def test_it_runs_as_a_module() -> None:
    done = python("-m", "hcurv", "--version")
    assert (done.returncode, done.stdout) == (0, f"{hcurv.__version__}\n")
    done = python("-m", "hcurv")
    assert done.returncode == 0
    assert "Usage: hcurv" in done.stdout
    done = python("-m", "hcurv", "info")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_output_survives_a_terminal_without_unicode() -> None:
    code = """
import sys, types
stand_in = types.ModuleType("demo")
stand_in.main = lambda folder: print("1 % of N²")
sys.modules["hcurv.experiments.demo"] = stand_in
sys.argv = ["hcurv", "demo"]
from hcurv.cli.app import main
main()
"""
    done = python("-c", code, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "1 % of N?\n"), done.stderr


def test_without_typer_it_says_what_to_install() -> None:
    done = python(
        "-c", "import sys; sys.modules['typer'] = None; import hcurv.__main__ as m; m.main()"
    )
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs typer: pip install 'hcurv[cli]'\n"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 20)))
    save_file(model.state_dict(), tmp_path / "W.safetensors")
    np.save(tmp_path / "X.npy", normal(2000, 200).float().numpy())
    before = sorted(tmp_path.iterdir())
    arguments = ["compress", tmp_path / "W.safetensors", "--data", tmp_path / "X.npy"]
    arguments += ["--activation", "tanh", "--loss", "cross-entropy", "--tolerance", "1e-6"]
    arguments += ["--out", tmp_path / "A.safetensors", "--progress"]
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"  # if ignored
        "from hcurv.cli.app import main; main()"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.read(1)  # the first of the progress
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        assert process.stdout.read() == b""
    assert process.returncode == 130
    assert errors.rstrip().endswith("interrupted")
    assert "Traceback" not in errors
    assert sorted(tmp_path.iterdir()) == before
