"""Data that could be read in two ways, changes behind our back, or does not fit the type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hcurv
import oracles
from cases import assert_close, labels, normal, seeded

INPUTS, LABELS = normal(20, 6), labels(20, 3)
LOSS = nn.CrossEntropyLoss()


def chain(outputs: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs))).double()


def other() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))).double()


both = pytest.mark.parametrize("make", [chain, other])


def read(data: Any, make: Callable[[], nn.Module] = chain) -> hcurv.GaussNewton:
    return hcurv.GaussNewton(make(), LOSS, data)


def test_a_list_of_inputs_and_targets_is_read_as_a_pair() -> None:
    batch = next(iter(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=20)))
    assert isinstance(batch, list)
    expected = read((INPUTS, LABELS))
    assert_close(read(batch).to_dense(), expected.to_dense())
    assert_close(read(batch).gradient(), expected.gradient())
    targets = normal(20, 3, seed=5)
    pair = hcurv.GaussNewton(chain(), nn.MSELoss(), [INPUTS, targets])
    wanted = oracles.gradient(chain(), lambda outputs: nn.MSELoss()(outputs, targets), INPUTS)
    assert pair.num_points == 20
    assert_close(pair.gradient(), wanted, 1e2)


def test_a_list_of_two_tensors_of_one_shape_is_refused() -> None:
    targets = normal(20, 6, seed=5)
    with pytest.raises(ValueError, match=r"two batches of inputs: pass a tuple \(inputs, targets"):
        hcurv.GaussNewton(chain(6), nn.MSELoss(), [INPUTS, targets])
    two = hcurv.GaussNewton(chain(6), nn.MSELoss(), [(INPUTS,), (targets,)])
    one = hcurv.GaussNewton(chain(6), nn.MSELoss(), (INPUTS, targets))
    assert (two.num_points, one.num_points) == (40, 20)


def test_batches_of_unequal_size_are_batches() -> None:
    assert_close(read([INPUTS[:12], INPUTS[12:]]).to_dense(), read(INPUTS).to_dense())


class Reusing:
    """A loader that yields the same tensors again and again, with other values."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = torch.empty_like(INPUTS[:5]), torch.empty_like(LABELS[:5])
        for start in range(0, 20, 5):
            inputs.copy_(INPUTS[start : start + 5])
            targets.copy_(LABELS[start : start + 5])
            yield inputs, targets


@both
def test_loaders_may_reuse_their_memory(make: Callable[[], nn.Module]) -> None:
    found, expected = read(Reusing(), make), read((INPUTS, LABELS), make)
    assert_close(found.to_dense(), expected.to_dense(), 1e2)
    assert_close(found.gradient(), expected.gradient(), 1e2)
    empirical = hcurv.GaussNewton(make(), LOSS, Reusing(), fisher="empirical")
    wanted = hcurv.GaussNewton(make(), LOSS, (INPUTS, LABELS), fisher="empirical")
    assert_close(empirical.to_dense(), wanted.to_dense(), 1e2)
    assert_close(
        expected.point_gradients(Reusing()).to_dense(),
        expected.point_gradients(INPUTS, LABELS).to_dense(),
        1e2,
    )


class Relabelling:
    """A loader whose labels differ from pass to pass."""

    passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        yield INPUTS, (LABELS + self.passes) % 3


def test_labels_that_change_between_passes_are_noticed() -> None:
    with pytest.raises(ValueError, match="differs between two passes"):
        read(Relabelling())


def test_data_that_is_changed_later_is_noticed() -> None:
    inputs = INPUTS.clone()
    operator = read((inputs, LABELS), other)  # Its gradient takes another pass over the data.
    inputs.mul_(2)
    with pytest.raises(ValueError, match="differs between two passes"):
        operator.gradient()
    array = INPUTS.numpy().copy()
    operator = read((torch.from_numpy(array), LABELS), other)
    array[3] = 0.0
    with pytest.raises(ValueError, match="differs between two passes"):
        operator.gradient()


@both
def test_weights_of_the_loss_may_change_later(make: Callable[[], nn.Module]) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0]).double()
    for loss in (nn.CrossEntropyLoss(weight=weight), hcurv.losses.CrossEntropy(weight)):
        operator = hcurv.GaussNewton(make(), loss, (INPUTS, LABELS))
        before = operator.gradient(), operator.point_gradients(INPUTS, LABELS).to_dense()
        weight.mul_(10)
        assert torch.equal(operator.gradient(), before[0])
        assert torch.equal(operator.point_gradients(INPUTS, LABELS).to_dense(), before[1])
        weight.div_(10)


def test_the_data_is_not_changed() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), *chain()).double()
    inputs = INPUTS.clone()
    operator = read((inputs, LABELS), lambda: model)
    operator.gradient()
    operator.jacobian(inputs).to_dense()
    hcurv.baselines.KFAC(model, LOSS, (inputs, LABELS))
    assert torch.equal(inputs, INPUTS)


def _spoilt(values: Tensor, value: float) -> Tensor:
    result = values.clone()
    result[7, 1] = value
    return result


def _nested() -> Tensor:
    return torch.nested.nested_tensor([INPUTS[0], INPUTS[1, :3]])


TARGETS = normal(20, 3, seed=5)
# 2^64 - 100 is -100 as a signed integer, which is the label that torch ignores.
LARGE = torch.where(torch.arange(20) == 3, -100, LABELS).view(torch.uint64)

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "NaN targets": ((INPUTS, _spoilt(TARGETS, torch.nan)), ValueError, "targets of batch 0 have"),
    "infinite targets": (
        [(INPUTS, TARGETS), (INPUTS, _spoilt(TARGETS, torch.inf))],
        ValueError,
        "targets of batch 1 have NaN or infinite values",
    ),
    "infinite inputs": (_spoilt(INPUTS, torch.inf), ValueError, "inputs of batch 0 have NaN or"),
    "meta": (INPUTS.to("meta"), TypeError, "inputs of batch 0 are on the device 'meta'"),
    "meta targets": ((INPUTS, TARGETS.to("meta")), TypeError, "targets of batch 0 are on the dev"),
    "sparse": (INPUTS.to_sparse(), TypeError, r"got torch.sparse_coo \(convert .*to_dense"),
    "sparse targets": ((INPUTS, TARGETS.to_sparse()), TypeError, "targets of batch 0 must be a d"),
    "nested": (lambda: _nested(), TypeError, "nested tensor: pad"),
    "no width": (INPUTS[:, :0], ValueError, r"points of shape \(0,\), which are empty"),
    "labels beyond 2^63": ((INPUTS, LARGE), ValueError, r"have labels of 2\^63 and more"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("data", "kind", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_values_that_make_no_sense_are_refused(
    data: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        hcurv.GaussNewton(chain(), nn.MSELoss(), data() if callable(data) else data)


def test_targets_of_later_calls_are_checked_too() -> None:
    operator = hcurv.GaussNewton(chain(), nn.MSELoss(), INPUTS)
    bad = _spoilt(TARGETS, torch.nan)
    with pytest.raises(ValueError, match="targets have NaN"):
        operator.gradient(bad)
    with pytest.raises(ValueError, match="targets of batch 0 have NaN"):
        operator.point_gradients(INPUTS, bad)


def test_errors_of_a_loader_say_at_which_batch() -> None:
    class Failing:
        def __iter__(self) -> Iterator[Tensor]:
            yield INPUTS
            raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        read(Failing())
    notes = getattr(caught.value, "__notes__", ["batch 1 of the data"])
    assert "batch 1 of the data" in notes[0]


MODELS_WITHOUT_BIAS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Linear(6, 3, bias=False),
    "any model": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 3, bias=False)),
}
without_bias = pytest.mark.parametrize(
    "make", MODELS_WITHOUT_BIAS.values(), ids=MODELS_WITHOUT_BIAS.keys()
)


@without_bias
@pytest.mark.parametrize("scale", [1e-26, 1e-20, 1e-17, 1e19, 1e25])
def test_matrices_beyond_the_range_of_their_type_are_refused(
    make: Callable[[], nn.Module], scale: float
) -> None:
    with pytest.raises(ValueError, match=r"(over|under)flow in torch\.float32.*float64"):
        hcurv.GaussNewton(seeded(make).float(), nn.MSELoss(), INPUTS.float() * scale)
    double = hcurv.GaussNewton(seeded(make).double(), nn.MSELoss(), INPUTS * scale)
    usual = hcurv.GaussNewton(seeded(make).double(), nn.MSELoss(), INPUTS)
    assert_close(double.to_dense() / scale / scale, usual.to_dense(), 1e2)


@without_bias
@pytest.mark.parametrize("scale", [1e-14, 1e-8, 1e8, 1e16])
def test_matrices_within_the_range_of_their_type_are_right(
    make: Callable[[], nn.Module], scale: float
) -> None:
    usual = hcurv.GaussNewton(seeded(make).double(), nn.MSELoss(), INPUTS)
    operator = hcurv.GaussNewton(seeded(make).float(), nn.MSELoss(), INPUTS.float() * scale)
    vector = normal(operator.shape[0])
    expected = usual.to_dense()
    assert_close(operator.to_dense().double() / scale / scale, expected, 1e10)
    assert_close((operator @ vector.float()).double() / scale / scale, expected @ vector, 1e10)


PARAMETERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: nn.Linear(6, 3, device="meta").double(), "'weight' is on the device 'meta'"),
    "lazy": (lambda: nn.LazyLinear(3).double(), "'weight' is lazy"),
}


@pytest.mark.parametrize(("make", "match"), PARAMETERS.values(), ids=PARAMETERS.keys())
def test_parameters_without_values_are_refused(make: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        hcurv.GaussNewton(make(), nn.MSELoss(), INPUTS)


def test_what_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, inputs = chain(), INPUTS * 1
    with pytest.raises(ValueError, match=r"was made inside torch\.inference_mode"):
        hcurv.GaussNewton(model, LOSS, INPUTS)
    for make in (chain, other):
        assert_close(read(inputs, make).to_dense(), read(INPUTS, make).to_dense())


def test_devices_that_are_not_there() -> None:
    factorization = read(INPUTS).factorize(0.1)
    for device in ("cuda:77", "nowhere", "meta"):
        with pytest.raises(ValueError, match=f"the device '{device}'"):
            factorization.to(device)
