"""Matrices that are spread over ranks: the same as those of one process, in less memory each."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import hcurv
from cases import normal, seeded
from hcurv.hierarchical.building.checkpoint import BuildCheckpoint
from hcurv.hierarchical.matrix.distributed import DistributedHMatrix
from hcurv.ranks import RanksError, ranks_of
from hcurv.sources import DenseMatrix
from several_ranks import run_ranks, values_of

SIZES = (4, 3, 2)  # The first writes shards, which the others read.


def kernel(size: int, decay: float, seed: int, zero_rows: tuple[int, ...] = ()) -> torch.Tensor:
    """exp(−decay·distance) of random points in the plane, with some rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(size, 2, dtype=torch.float64, generator=generator)
    values = torch.exp(-decay * torch.cdist(points, points))
    values[list(zero_rows)] = 0.0
    values[:, list(zero_rows)] = 0.0
    return values


class Collective(DenseMatrix):
    """A matrix that every rank has, but whose calls are collective."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.ranks = ranks_of(distributed.group.WORLD)

    def _matmat(self, rhs: torch.Tensor) -> torch.Tensor:
        self.ranks.same(rhs=rhs)
        return super()._matmat(rhs)

    def blocks(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        self.ranks.same(rows=rows, cols=cols)
        return super().blocks(rows, cols)


class Summed(Collective):
    """A matrix that is a sum of one term on each rank."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        weight = 2 * (self.ranks.rank + 1) / (self.ranks.size * (self.ranks.size + 1))
        self._term = DenseMatrix(weight * values)

    def partial_product(self, rhs: torch.Tensor) -> torch.Tensor:
        return self._term @ rhs

    def partial_blocks(self, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
        return self._term.blocks(rows, cols)


def network(_: torch.Tensor | None = None) -> hcurv.GaussNewton:
    """A small network, whose points lie on the ranks; the second of three or more has none."""
    inputs, ranks = normal(45, 7), ranks_of(distributed.group.WORLD)
    starts = [0, 45] if ranks.size == 1 else [0, 20, *[20] * (ranks.size > 2)]
    starts += [30] * (ranks.size == 4) + [45] * (ranks.size > 1)
    own = inputs[starts[ranks.rank] : starts[ranks.rank + 1]]
    model = seeded(
        lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh()).double()
    )
    group = distributed.group.WORLD
    return hcurv.GaussNewton(model, nn.MSELoss(), own, process_group=group)


# Sources by name: what is compressed, how ranks know it, and with what.
CASES = {
    "tree": (kernel(256, 3.0, 0), None, {"tolerance": 1e-3, "leaf_size": 16, "global_rank": 0}),
    "both": (
        kernel(230, 2.0, 1, (5, 17, 228)),
        Summed,
        {"tolerance": 1e-3, "leaf_size": 12, "global_rank": 8, "ordering": "angle"},
    ),
    "planned": (kernel(200, 4.0, 2).float(), Collective, {"tolerance": 2e-2}),
    "diagonal": (kernel(150, 0.003, 3, (0, 1)), Summed, {"damping": 0.5, "tolerance": 1e-2}),
    "uncut": (kernel(60, 3.0, 4), None, {"tolerance": 1e-3, "leaf_size": 40, "global_rank": 5}),
    "alone": (kernel(60, 0.01, 5, (3,)), Collective, {"tolerance": 1e-2}),
    "network": (
        network().to_dense(),
        network,
        {"tolerance": 1e-3, "leaf_size": 10, "global_rank": 6, "ordering": "layer-output-input"},
    ),
}
# All of them with four ranks, which save them; some with others.
NAMES = {4: tuple(CASES), 3: ("tree", "both", "alone", "network"), 2: ("tree", "both", "diagonal")}
RUNS = [(size, name) for size in SIZES for name in NAMES[size]]


def _compressed(name: str, **options: object) -> hcurv.HMatrix:
    values, kind, chosen = CASES[name]
    collective = kind is network or (kind is not None and distributed.is_initialized())
    source = kind(values) if collective else values
    group = distributed.group.WORLD if kind is None and distributed.is_initialized() else None
    return hcurv.compress(source, process_group=group, **chosen, **options)


def _answers(A: hcurv.HMatrix) -> dict[str, torch.Tensor]:
    """What a matrix and its factorizations answer to every public question."""
    size, dtype = A.shape[0], A.dtype
    generator = torch.Generator().manual_seed(9)
    b = torch.randn(size, 3, dtype=dtype, generator=generator)
    rows = torch.randint(size, (12,), generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hcurv.AccuracyWarning)
        F = A.factorize(0.5)
        by_row = A.factorize(torch.linspace(0.3, 0.9, size, dtype=torch.float64))
        indefinite = A.factorize(-0.0371, definite=False)
    answers = {
        "product": A @ b,
        "one product": A @ b[:, 0],
        "diagonal": A.diagonal(),
        "block": A[rows, ::7],
        "pairs": A.pairs(rows, rows.flip(0)),
        "gathered": A.gather() @ b,
        "converted": (A.to(dtype=torch.float64) @ b.double()).to(dtype),
        "solve": F.solve(b),
        "one solve": F.solve(b[:, 0]),
        "logdet": F.logdet(),
        "sample": F.sample(2, torch.Generator().manual_seed(1)),
        "inverse diagonal": F.inverse_diagonal(),
        "quadratic": F.quadratic(b.T),
        "solve by row": by_row.solve(b),
        "logdet by row": by_row.logdet(),
        "indefinite solve": indefinite.solve(b),
        "indefinite logdet": indefinite.logdet(),
        "indefinite inverse diagonal": indefinite.inverse_diagonal(),
        "negative": torch.tensor(float(indefinite.num_negative)),
        "stored": torch.tensor(float(A.num_stored)),
        "error": torch.tensor(A.estimated_error),
    }
    return {name: value.double() for name, value in answers.items()}


def _few_answers(A: hcurv.HMatrix) -> dict[str, torch.Tensor]:
    """Answers that show whether a matrix is the same as another one."""
    b = torch.randn(A.shape[0], 3, dtype=A.dtype, generator=torch.Generator().manual_seed(9))
    F = A.factorize(0.5, warn=False)
    found = {"product": A @ b, "solve": F.solve(b), "logdet": F.logdet()}
    return {name: value.double() for name, value in found.items()}


def _of_ranks(A: DistributedHMatrix) -> dict[str, object]:
    """What only a matrix on ranks knows: answers for own rows, floats, messages and bytes."""
    size, share, F = A.shape[0], A.share, A.factorize(0.5, warn=False)
    b = torch.randn(size, 3, dtype=A.dtype, generator=torch.Generator().manual_seed(9))
    own = {"product": A.own_product(b[A.own_rows]), "solve": F.own_solve(b[A.own_rows])}
    traffic = []
    for matrix in (A, F):
        share.ranks.traffic.clear()
        matrix @ b
        found = share.ranks.traffic.items()
        traffic.append({name: [cost.messages, cost.num_bytes] for name, cost in found})
    whole = A.gather().factorize(0.5, warn=False)
    return {
        "own": {name: share.spread(share.whole(v), size).double() for name, v in own.items()},
        "traffic": traffic,
        "stored": (A.num_own_stored, A.num_stored),
        "factors": (F.num_own_stored, F.num_stored, whole.num_stored),
        "shape": (max(A.cut_counts), max(share.counts), A.global_rank, A.dtype.itemsize),
    }


class InterruptedBuildError(Exception):
    """What a test interrupts a build with."""


def interrupting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a build after so many levels were saved."""
    save, saved = BuildCheckpoint.save, []

    def count(self: BuildCheckpoint, *args: object) -> None:
        save(self, *args)
        saved.append(1)
        if len(saved) == number:
            raise InterruptedBuildError

    monkeypatch.setattr(BuildCheckpoint, "save", count)


def resumed(name: str, folder: Path) -> tuple[hcurv.HMatrix, int]:
    """A matrix whose build is interrupted after each level, and how often it was."""
    for number in range(100):
        with pytest.MonkeyPatch.context() as patch:
            interrupting(1, patch)
            try:
                return _compressed(name, checkpoint=folder), number
            except InterruptedBuildError:
                assert folder.is_dir()
    raise AssertionError("the build never ends")


def _on_ranks(folder: str) -> dict[str, object]:
    """Everything that one rank is asked."""
    ranks, result = ranks_of(distributed.group.WORLD), {}
    for name in NAMES[ranks.size]:
        A = _compressed(name)
        assert isinstance(A, DistributedHMatrix)
        result[name] = {"answers": _answers(A), **_of_ranks(A)}
        if ranks.size == SIZES[0]:
            A.save(f"{folder}/{name}")
            if name == "alone":
                A.save(f"{folder}/{name}")  # replaces the first
        elif ranks.size == 3:
            B = hcurv.load(f"{folder}/{name}", process_group=distributed.group.WORLD)
            result[name]["loaded"] = _few_answers(B)
    if ranks.size == 2:
        A, number = resumed("both", Path(folder) / "checkpoint")
        result["resumed"] = (number, _few_answers(A))
        result["refusals"] = [_refusal(call) for call in _bad_calls(ranks.rank, folder)]
    return result


def _bad_calls(rank: int, folder: str) -> list[object]:
    group = distributed.group.WORLD
    values = CASES["tree"][0]
    return [
        lambda: hcurv.compress(values, process_group=group, seed=rank),
        lambda: hcurv.compress((1 + rank) * values, process_group=group),
        lambda: hcurv.compress(values / (1 - rank), process_group=group),
        lambda: hcurv.compress(values, process_group=group, near_budget=0.1),
        lambda: hcurv.compress(values, process_group=group, method="neighbors"),
        lambda: _compressed("uncut").save(folder),
        lambda: _compressed("uncut").factorize(-0.5),
        lambda: _compressed("uncut").factorize(0.5).save(f"{folder}/F"),
    ]


def _refusal(call: object) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    found = {
        size: values_of(run_ranks(size, _on_ranks, str(folder), time_limit=300, group_timeout=60))
        for size in SIZES
    }
    return folder, found


@pytest.fixture(scope="module")
def alone():
    return {name: _answers(_compressed(name)) for name in CASES}


def differences(
    name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """What differs by more than rounding, and by how much.

    Rounding differs between numbers of ranks. Interpolations of a relative error amplify it by the
    inverse of that error, and solves do so once more.
    """
    values, _, options = CASES[name]
    allowed = 10 * torch.finfo(values.dtype).eps / options["tolerance"] ** 2
    result = {}
    for key, value in found.items():
        error = float((value - expected[key]).norm() / max(1e-300, float(expected[key].norm())))
        if error > allowed:
            result[key] = error
    return result


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_every_answer_is_that_of_one_process(runs, alone, size, name):
    for rank in range(size):
        found = runs[1][size][rank][name]
        assert differences(name, found["answers"], alone[name]) == {}
        if rank:
            first = runs[1][size][0][name]["answers"]
            assert all(torch.equal(value, first[k]) for k, value in found["answers"].items())


@pytest.mark.parametrize("name", NAMES[3])
def test_own_rows_are_rows_of_the_whole(runs, alone, name):
    values, _, _ = CASES[name]
    nonzero = (values.diagonal() != 0).double()[:, None]
    for found in runs[1][3]:
        expected = {key: alone[name][key] * nonzero for key in found[name]["own"]}
        assert differences(name, found[name]["own"], expected) == {}


def test_memory_of_a_rank_falls_with_their_number(runs):
    for name, most in (("tree", (0.6, 0.45)), ("both", (0.6, 0.45))):
        for size, share in zip((2, 4), most, strict=True):
            stored = [runs[1][size][rank][name]["stored"] for rank in range(size)]
            assert all(own <= share * total for own, total in stored)
            assert sum(own for own, _ in stored) >= stored[0][1]
        factors = {size: [rank[name]["factors"] for rank in runs[1][size]] for size in (2, 4)}
        # All ranks have the factors of the root, which are a large part in matrices so small.
        largest = {size: max(own for own, _, _ in found) for size, found in factors.items()}
        assert largest[4] < largest[2] < 0.65 * factors[2][0][1]
        # Batches of nodes are padded, on each rank in its own way.
        found = factors[2] + factors[4]
        assert all(abs(total - whole) <= 0.05 * whole for _, total, whole in found)


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_products_and_solves_send_what_the_cost_model_says(runs, size, name):
    found = runs[1][size][0][name]
    cut, rows, rank, itemsize = found["shape"]
    if name == "alone":  # There is no tree.
        cut = 0
    for number, traffic in enumerate(found["traffic"]):
        # The skeleton rows of the cut level: once, or in both halves of a solve with a global part.
        times = (1 + bool(number and rank)) * bool(cut)
        gathers = [times + 1, 3 * (times * cut + rows) * itemsize]  # and the rows of the result
        expected = {"gather": gathers}
        if rank:
            expected["sum"] = [1, 3 * rank * itemsize]  # Vᵀ X
        assert traffic == expected


@pytest.mark.parametrize("name", CASES)
def test_shards_are_read_by_any_number_of_ranks(runs, alone, name):
    folder, found = runs
    assert len(list((folder / name).iterdir())) == SIZES[0] + 1
    whole = _few_answers(hcurv.load(folder / name))
    loaded = [rank[name]["loaded"] for rank in found[3]] if name in NAMES[3] else []
    for answers in (whole, *loaded):
        assert differences(name, answers, alone[name]) == {}


def test_shards_that_are_damaged_or_mixed_are_refused(runs, tmp_path):
    folder, _ = runs
    copy = tmp_path / "A"
    copy.mkdir()
    for path in (folder / "tree").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "shard-00001-of-00004.safetensors"
    foreign = folder / "both" / shard.name
    shard.write_bytes(foreign.read_bytes())
    with pytest.raises(hcurv.FileFormatError, match="belongs to another matrix"):
        hcurv.load(copy)
    shard.unlink()
    with pytest.raises(hcurv.FileFormatError, match="is missing"):
        hcurv.load(copy)
    content = bytearray((folder / "tree" / shard.name).read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(hcurv.FileFormatError, match="checksums do not match"):
        hcurv.load(copy)
    index = copy / "index.json"
    index.write_text(index.read_text().replace("natural", "natura1").replace("angle", "angl3"))
    with pytest.raises(hcurv.FileFormatError, match="damaged"):
        hcurv.load(copy)
    index.unlink()
    with pytest.raises(hcurv.FileFormatError, match="no matrix of hcurv"):
        hcurv.load(copy)


def test_a_build_on_ranks_is_resumed_after_each_level(runs, alone):
    for rank in runs[1][2]:
        number, answers = rank["resumed"]
        assert number == 5  # levels of the tree
        assert all(torch.equal(v, rank["both"]["answers"][k]) for k, v in answers.items())


def test_bad_calls_fail_on_all_ranks_alike(runs):
    expected = [
        (RanksError.__name__, "seed"),
        (RanksError.__name__, "diagonal"),
        ("ValueError", "NaN or infinite"),
        ("ValueError", "near_budget"),
        ("ValueError", 'method="sketch"'),
        ("FileExistsError", "other files"),
        ("NotPositiveDefiniteError", "is not positive definite"),
        ("NotFactorizableError", "A.save"),
    ]
    for rank, found in enumerate(runs[1][2]):
        for (kind, text), (wanted, part) in zip(found["refusals"], expected, strict=True):
            # A rank that learns of an error from another one raises the closest kind it knows.
            assert kind == wanted or (rank > 0 and kind == "OSError")
            assert part in text


def test_one_process_needs_no_group():
    A = _compressed("uncut")
    assert type(A) is hcurv.HMatrix
    assert A.gather() is A
