"""Random products for a build, and again for another one of the same tree."""

from __future__ import annotations

import pytest
import torch

from hcurv.hierarchical.building.sketch import RandomProducts
from hcurv.hierarchical.parts.row_share import RowShare
from hcurv.sources import DenseMatrix
from matrices import kernel_matrix

ROWS = torch.tensor([3, 0, 5, 7, 2])


def random_products(max_kept: int) -> tuple[torch.Tensor, RandomProducts]:
    dense = kernel_matrix("gaussian", 9, 1)
    return dense, RandomProducts(DenseMatrix(dense), RowShare(ROWS), 0, max_kept=max_kept)


def is_product(dense: torch.Tensor, panel: tuple[torch.Tensor, torch.Tensor]) -> bool:
    inputs, outputs = panel
    padded = not inputs[-1].any() and not outputs[-1].any()
    return padded and torch.allclose(outputs[:-1], dense[ROWS][:, ROWS] @ inputs[:-1])


def test_kept_panels_are_given_again_unchanged() -> None:
    dense, products = random_products(max_kept=1000)
    first, second = products.panel(0, 4), products.panel(1, 3)
    assert is_product(dense, first)
    assert is_product(dense, second)
    first[1].zero_()
    again = products.panel(0, 2)
    assert torch.equal(again[0], first[0])
    assert is_product(dense, again)
    assert torch.equal(products.panel(1, 3)[0], second[0])


@pytest.mark.parametrize("room", [0, 39, 40])
def test_what_is_not_kept_is_drawn_anew(room: int) -> None:
    dense, products = random_products(max_kept=room)
    panels = [products.panel(number, 4) for number in (0, 1, 2, 0, 1, 2)]
    assert all(is_product(dense, panel) for panel in panels)
    vectors = [panel[0] for panel in panels]
    kept = room // (4 * len(ROWS))  # products alone: random vectors are drawn again
    for number in range(3):
        assert torch.equal(vectors[number], vectors[3 + number]) == (number < kept)
    assert not torch.equal(vectors[1], vectors[2])
    assert not torch.equal(vectors[4], vectors[5])
