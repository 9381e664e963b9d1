"""The parameter layout: names, layers and units as places in the flat vector."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from cases import CASES, Case, all_cases, assert_close, normal, seeded
from hcurv import ParameterLayout


def small_model() -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)))
    model[2].weight.requires_grad_(True)
    return model


@all_cases
def test_flattening_agrees_with_torch(case: Case) -> None:
    model = case.build()
    layout = ParameterLayout.of(model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    flat = layout.flatten(trainable)
    assert torch.equal(flat, parameters_to_vector(trainable.values()))
    assert layout.size == flat.numel()
    parts = layout.unflatten(flat)
    assert parts.keys() == trainable.keys()
    for name, part in parts.items():
        assert torch.equal(part, trainable[name])
        assert torch.equal(flat[layout.select(name)], trainable[name].reshape(-1))


@all_cases
def test_the_matrix_has_the_layout_of_its_model(case: Case) -> None:
    operator = case.operator()
    assert operator.layout == ParameterLayout.of(case.build())
    assert operator.layout.size == operator.shape[0]


def test_entries_can_be_asked_for_by_name() -> None:
    operator = CASES["classifier"].operator()
    layout, dense = operator.layout, operator.to_dense()
    rows, cols = layout.select("0.*"), layout.select("2.bias")
    assert rows.tolist() == list(range(40))
    assert cols.tolist() == [60, 61, 62, 63]
    assert_close(operator[rows, cols], dense[:40, 60:64])


def test_patterns_select_parameters_and_layers() -> None:
    layout = ParameterLayout(
        {"a.weight": (2, 3), "a.bias": (2,), "b.c.weight": (1, 2), "scale": ()}
    )
    assert layout.layers == {"a": ("a.weight", "a.bias"), "b.c": ("b.c.weight",), "": ("scale",)}
    assert layout.select("a").tolist() == list(range(8))
    assert layout.select("b").tolist() == [8, 9]
    assert layout.select("*.weight").tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert layout.select("scale", "a.bias").tolist() == [6, 7, 10]
    assert layout.select().numel() == 0
    with pytest.raises(KeyError, match="no trainable parameter or layer is called 'c'; there are"):
        layout.select("c")
    with pytest.raises(TypeError, match="a pattern must be a string; got int"):
        layout.select(3)


@given(
    heights=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    biases=st.lists(st.booleans(), min_size=4, max_size=4),
    grouping=st.sampled_from(["parameter", "layer", "unit"]),
)
def test_blocks_are_a_partition(
    heights: list[int], widths: list[int], biases: list[bool], grouping: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (height, width, bias) in enumerate(zip(heights, widths, biases, strict=False)):
        shapes[f"{number}.weight"] = (height, width)
        if bias:
            shapes[f"{number}.bias"] = (height,)
    layout = ParameterLayout(shapes)
    blocks = layout.blocks(grouping)
    assert torch.cat(blocks).sort().values.tolist() == list(range(layout.size))
    expected = {"parameter": len(shapes), "layer": len(heights), "unit": sum(heights)}[grouping]
    assert len(blocks) == expected


def test_units_hold_their_weights_and_bias() -> None:
    layout = ParameterLayout.of(small_model())
    assert [rows.tolist() for rows in layout.blocks("unit")] == [
        [0, 1, 2, 6],
        [3, 4, 5, 7],
        [8, 9],
        [10, 11],
    ]
    with pytest.raises(ValueError, match='must be grouped by "parameter", "layer" or "unit"'):
        layout.blocks("row")


def test_numbers_by_name_take_the_most_specific_one() -> None:
    layout = ParameterLayout.of(small_model())
    values = layout.expand({"*": 1.0, "0": 2.0, "0.bias": 3.0})
    assert values.tolist() == [2.0] * 6 + [3.0] * 2 + [1.0] * 4
    with pytest.raises(KeyError, match=r"none is given for 2\.weight"):
        layout.expand({"0": 1.0})
    with pytest.raises(ValueError, match=r"'0\.weight' is named twice, the second time by '0\*'"):
        layout.expand({"*": 1.0, "0*": 2.0})
    with pytest.raises(ValueError, match="must be one number; got shape"):
        layout.expand({"*": torch.ones(2)})


def test_numbers_by_name_keep_gradients() -> None:
    layout = ParameterLayout.of(small_model())
    number = torch.tensor(0.5, requires_grad=True)
    layout.expand({"0": number, "2": 1.0}).square().sum().backward()
    assert float(number.grad) == pytest.approx(8 * 2 * 0.5)


def test_wrong_input_is_refused() -> None:
    layout = ParameterLayout.of(small_model())
    with pytest.raises(KeyError, match=r"missing: .*not in the layout: .*'x'"):
        layout.flatten({"x": normal(3)})
    with pytest.raises(ValueError, match=r"'0\.weight' must have shape \(2, 3\); got \(3, 2\)"):
        layout.flatten({"0.weight": normal(3, 2), "0.bias": normal(2), "2.weight": normal(2, 2)})
    with pytest.raises(ValueError, match=r"must have shape \(12,\) or \(12, k\); got \(11,\)"):
        layout.unflatten(normal(11))


def test_columns_of_a_linear_layer_are_views() -> None:
    layout = ParameterLayout.of(small_model())
    flat = normal(12, 4)
    linear = layout.linear("0.weight", "0.bias", num_units=2, num_inputs=3)
    weight, bias = linear.read(flat, slice(1, 2))
    assert torch.equal(weight, flat[3:6][None])
    assert torch.equal(bias, flat[7:8])
    weight.zero_()
    assert not bool(flat[3:6].any())
    frozen = layout.linear("elsewhere", None, num_units=2, num_inputs=3)
    assert frozen.read(flat) == (None, None)


@all_cases
def test_located_indices_are_those_of_the_parameters(case: Case) -> None:
    layout = ParameterLayout.of(case.build())
    every = torch.arange(layout.size)
    parameter, row, place = layout.locate(every)
    for number, values in enumerate(layout.unflatten(every).values()):
        chosen = parameter == number
        table = values.reshape(len(values), -1)
        assert torch.equal(table[row[chosen], place[chosen]], every[chosen])
        assert int(chosen.sum()) == values.numel()
