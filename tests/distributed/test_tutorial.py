"""The script of the tutorial prints the same with and without torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "scale.md"


def test_the_script_of_the_tutorial_runs_with_torchrun(tmp_path: Path) -> None:
    script, shown = re.findall(
        r"```python\n(import os\n.*?)```\s+<!-- output -->\s+```text\n(.*?)```",
        PAGE.read_text(),
        re.S,
    )[0]
    path = tmp_path / "curvature.py"
    path.write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == shown.strip()
