"""Eigenpairs of W Wᵀ from tall columns W, against dense ones in double precision."""

from __future__ import annotations

import pytest
import torch

from cases import both_dtypes, normal
from hcurv.linalg.nystrom import outer_eigenpairs


def graded(size: int, width: int, decay: float) -> torch.Tensor:
    """Columns whose norms fall by 10^-decay."""
    return normal(size, width) * torch.logspace(0, -decay, width, dtype=torch.float64)


@both_dtypes
@pytest.mark.parametrize("kind", ["graded", "dependent", "zero", "none", "square"])
def test_outer_products_are_those_of_orthonormal_eigenvectors(
    kind: str, dtype: torch.dtype
) -> None:
    columns = {
        "graded": graded(90, 12, 4.0),
        "dependent": normal(90, 3) @ normal(3, 12, seed=2),
        "zero": torch.cat([normal(90, 4), torch.zeros(90, 2)], 1).double(),
        "none": normal(90, 0),
        "square": normal(12, 12),
    }[kind].to(dtype)
    basis, values = outer_eigenpairs(columns)
    exact = columns.double() @ columns.double().T
    eps = torch.finfo(dtype).eps
    assert values.dtype == torch.float64
    assert bool((values >= 0).all())
    gram = basis.double().T @ basis.double()
    assert torch.allclose(gram, torch.eye(len(values)).double(), atol=100 * eps)
    found = (basis.double() * values) @ basis.double().T
    assert float((found - exact).norm()) <= 100 * eps * float(exact.norm())
    largest = torch.linalg.eigvalsh(exact).flip(0)[: len(values)]
    scale = float(exact.norm())
    assert torch.allclose(values.sort(descending=True).values, largest, atol=100 * eps * scale)
