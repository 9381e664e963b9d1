"""Influence scores in the interface of dattri, and in the files of kronfluence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hcurv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit")


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (24,), generator=generator)


def loader(data: tuple[Tensor, Tensor], points: slice = slice(None), size: int = 24) -> Any:
    return DataLoader(TensorDataset(data[0][points], data[1][points]), batch_size=size)


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 3)).double()


def task(model: nn.Module, checkpoints: Any = None) -> Any:
    tasks = pytest.importorskip("dattri.task", reason="dattri is not installed")

    def loss(parameters: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = torch.func.functional_call(model, parameters, batch[0])
        return nn.functional.cross_entropy(outputs, batch[1])

    return tasks.AttributionTask(
        loss_func=loss, model=model, checkpoints=checkpoints or model.state_dict()
    )


def test_scores_are_those_of_the_explicit_attributor_for_a_linear_model(
    data: tuple[Tensor, Tensor],
) -> None:
    """There the Gauss-Newton matrix is the Hessian that dattri forms."""
    own_task = task(linear())
    from dattri.algorithm.influence_function import IFAttributorExplicit

    from hcurv.interop.dattri import GaussNewtonAttributor

    found = []
    for attributor in (
        GaussNewtonAttributor(own_task, nn.CrossEntropyLoss(), damping=0.05),
        IFAttributorExplicit(own_task, regularization=0.05),
    ):
        attributor.cache(loader(data))
        for method in (None, "l", "theta"):
            found.append(
                attributor.attribute(
                    loader(data, size=10), loader(data, slice(7), size=4), relatif_method=method
                ).detach()
            )
    for own, theirs in zip(found[:3], found[3:], strict=True):
        assert own.shape == (24, 7)
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_scores_are_those_of_influence_times_the_number_of_points(
    data: tuple[Tensor, Tensor],
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    own_task = task(model)
    from hcurv.interop.dattri import GaussNewtonAttributor

    attributor = GaussNewtonAttributor(own_task, nn.CrossEntropyLoss(), damping=0.05)
    shuffled = DataLoader(TensorDataset(*data), batch_size=5, shuffle=True)
    attributor.cache(shuffled)
    scores = attributor.attribute(loader(data), loader(data, slice(6)))
    exact = hcurv.influence(model, nn.CrossEntropyLoss(), data, damping=0.05, check_damping=False)
    expected = 24 * exact.scores((data[0][:6], data[1][:6])).T
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-6)


def test_checkpoints_are_averaged_and_layers_selected(data: tuple[Tensor, Tensor]) -> None:
    model = linear()
    states = [linear().state_dict(), {k: 2 * v for k, v in linear().state_dict().items()}]
    both = task(model, [dict(state) for state in states])
    from hcurv.interop.dattri import GaussNewtonAttributor

    def scores(own_task: Any, layer: str | list[str] | None = None) -> Tensor:
        attributor = GaussNewtonAttributor(own_task, nn.CrossEntropyLoss(), 0.05, layer)
        attributor.cache(loader(data))
        return attributor.attribute(loader(data), loader(data, slice(5)))

    single = [scores(task(linear(), dict(state))) for state in states]
    torch.testing.assert_close(scores(both), sum(single) / 2)
    assert scores(both, "0.bias").shape == (24, 5)
    torch.testing.assert_close(scores(both, ["0.bias", "0.weight"]), scores(both))
    with pytest.raises(ValueError, match="no parameters"):
        scores(both, "1.bias")


def test_kronfluence_reads_the_scores(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from hcurv.interop.kronfluence import save_pairwise_scores, save_self_scores

    infl = hcurv.influence(linear(), nn.CrossEntropyLoss(), data, damping=0.05, check_damping=False)
    scores, own = infl.scores((data[0][:6], data[1][:6])), infl.self_scores()
    pairwise_path = save_pairwise_scores(scores.T.contiguous().T, tmp_path)
    self_path = save_self_scores(own, tmp_path)
    assert (pairwise_path.name, self_path.name) == (
        "pairwise_scores.safetensors",
        "self_scores.safetensors",
    )
    from safetensors.torch import load_file

    assert torch.equal(load_file(pairwise_path)["all_modules"], scores)
    pytest.importorskip("kronfluence", reason="kronfluence is not installed")
    from kronfluence.score.pairwise import load_pairwise_scores, pairwise_scores_exist
    from kronfluence.score.self import load_self_scores, self_scores_exist

    assert pairwise_scores_exist(tmp_path)
    assert self_scores_exist(tmp_path)
    assert torch.equal(load_pairwise_scores(tmp_path)["all_modules"], scores)
    assert torch.equal(load_self_scores(tmp_path)["all_modules"], own)


def test_scores_of_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    from hcurv.interop.kronfluence import save_pairwise_scores, save_self_scores

    with pytest.raises(ValueError, match=r"\(queries, training points\); got \(3,\)"):
        save_pairwise_scores(torch.ones(3), tmp_path)
    with pytest.raises(TypeError, match="tensor of floats; got list"):
        save_self_scores([1.0], tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        save_self_scores(torch.ones(3), tmp_path / "missing")
