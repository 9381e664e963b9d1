"""No part of torch that the library uses is deprecated, in any version of torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch, hcurv
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Softplus(), torch.nn.Linear(6, 3))
inputs, targets = torch.randn(20, 4), torch.randint(3, (20,))
H = hcurv.GaussNewton(model, torch.nn.CrossEntropyLoss(), (inputs, targets))
hcurv.compress(H, tolerance=1e-2).factorize(1e-2).solve(H.gradient())
"""


def test_a_fresh_process_with_warnings_as_errors_solves() -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
