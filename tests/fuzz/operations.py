"""What is asked of a matrix, and compared with the dense truth.

Tolerances: what is exact in the package may be off by the rounding of its precision
(`problems.Made.tolerance`), times the condition number where something is inverted. What is
approximate may be off by what its own documentation promises, or else must have warned.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hcurv
from fuzz.outcomes import WrongError, check_close, refusals, size_of, told
from fuzz.problems import Made
from fuzz.randomness import generator, often
from fuzz.truth import Truth

Operation = Callable[[Made, random.Random], None]
METHODS = ["auto", "parameters", "samples", "iterations", "kronecker", "subset"]
SLOW_METHODS = ["compressed", "compressed-samples"]


def _vectors(made: Made, rng: random.Random, rows: int | None = None) -> Tensor:
    rows = made.H.shape[0] if rows is None else rows
    k = rng.choice([0, 1, 1, 2, 5])
    shape = (rows,) if k == 0 else (rows, k)
    return torch.randn(shape, dtype=made.problem.dtype, generator=generator(rng))


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _index(made: Made, rng: random.Random) -> tuple[Any, Tensor]:
    """An index in some form, and what it means."""
    size = made.H.shape[0]
    numbers = torch.randint(0, size, (rng.randint(0, 6),), generator=generator(rng))
    kind = rng.choice(["list", "tensor", "numpy", "slice", "mask", "one", "range", "negative"])
    if kind == "list":
        return numbers.tolist(), numbers
    if kind == "numpy":
        return numbers.numpy(), numbers
    if kind == "negative":
        return (numbers - size).tolist(), numbers
    if kind == "slice":
        some = slice(*sorted((rng.randint(0, size), rng.randint(0, size))), rng.choice([1, 2]))
        return some, torch.arange(size)[some]
    if kind == "mask":
        mask = torch.rand(size, generator=generator(rng)) < 0.4
        return mask, mask.nonzero().view(-1)
    if kind == "one":
        one = rng.randrange(size)
        return one, torch.tensor([one])
    if kind == "range":
        some_range = range(*sorted((rng.randint(0, size), rng.randint(0, size))))
        return some_range, torch.tensor(list(some_range), dtype=torch.long)
    return numbers, numbers


def block(made: Made, rng: random.Random) -> None:
    rows, row_numbers = _index(made, rng)
    cols, col_numbers = _index(made, rng)
    with refusals():
        found = made.H.block(rows, cols)
    expected = made.matrix[row_numbers][:, col_numbers]
    check_close(found, expected, 10 * made.tolerance, "block", float(size_of(made.matrix)))


def blocks(made: Made, rng: random.Random) -> None:
    size, count = made.H.shape[0], rng.randint(0, 3)
    rows = torch.randint(0, size, (count, rng.randint(1, 3)), generator=generator(rng))
    cols = torch.randint(0, size, (count, rng.randint(1, 3)), generator=generator(rng))
    with refusals():
        found = made.H.blocks(rows, cols)
    expected = made.matrix[rows[:, :, None], cols[:, None, :]]
    check_close(found, expected, 10 * made.tolerance, "blocks", float(size_of(made.matrix)))


def pairs(made: Made, rng: random.Random) -> None:
    size, count = made.H.shape[0], rng.randint(0, 9)
    rows = torch.randint(0, size, (count,), generator=generator(rng))
    cols = torch.randint(0, size, (count,), generator=generator(rng))
    with refusals():
        found = made.H.pairs(rows, cols)
    check_close(
        found, made.matrix[rows, cols], 10 * made.tolerance, "pairs", float(size_of(made.matrix))
    )


def product(made: Made, rng: random.Random) -> None:
    vectors = _vectors(made, rng)
    with refusals():
        found = made.H @ vectors
    scale = float(size_of(made.matrix) * size_of(vectors.double()))
    check_close(found, made.matrix @ vectors.double(), 10 * made.tolerance, "product", scale)


def diagonal(made: Made, rng: random.Random) -> None:
    with refusals():
        found, trace = made.H.diagonal(), made.H.trace()
    expected = made.matrix.diagonal()
    check_close(found, expected, 10 * made.tolerance, "diagonal")
    check_close(_number(trace), expected.sum(), 10 * made.tolerance, "trace")


def root(made: Made, rng: random.Random) -> None:
    vectors = _vectors(made, rng)
    with refusals():
        S = made.H.root_columns(slice(None)).double()
        applied = made.H.root_product(vectors)
        back = made.H.root_transposed(applied)
    check_close(S.T @ S, made.matrix, 10 * made.tolerance, "SᵀS")
    scale = float(size_of(S) * size_of(vectors.double()))
    check_close(applied, S @ vectors.double(), 10 * made.tolerance, "S v", scale)
    expected = made.matrix @ vectors.double()
    check_close(back, expected, 20 * made.tolerance, "Sᵀ S v", scale * float(size_of(S)))


def _own_rounding(made: Made, read: Callable[[Truth], Tensor]) -> float:
    """What to add to a scale, so that a result may be three times as wrong as autograd is.

    In single precision automatic differentiation can be wrong in all digits, for example where a
    layer norm of one feature has the derivative zero.
    """
    if made.problem.dtype != torch.float32:
        return 0.0
    rough = read(made.problem.truth(torch.float32))
    return 3 / (10 * made.tolerance) * float(size_of(rough - read(made.truth)))


def _noise(made: Made) -> float:
    """A gradient that is nothing but rounding.

    Where outputs do not depend on a parameter, as behind a layer norm of one feature, derivatives
    cancel, and what is left of them is rounding.
    """
    truth = made.truth
    entry = 100 * torch.finfo(made.problem.dtype).eps * float(size_of(truth.outputs))
    return entry * float(truth.output_gradient.abs().sum())


def gradient(made: Made, rng: random.Random) -> None:
    problem, truth = made.problem, made.truth
    with refusals():
        if problem.has_targets:
            found = made.H.gradient()
        else:
            targets = problem.targets
            found = made.H.gradient(
                targets.to(problem.dtype) if targets.is_floating_point() else targets
            )
    # Rounding is relative to the size of what is summed, over points and outputs.
    weights = truth.output_gradient.reshape(-1).abs()
    scale = float(size_of(weights @ truth.jacobian.abs()))
    scale += _own_rounding(made, lambda oracle: oracle.gradient)
    scale += float(size_of(truth.gradient_rounding.sum(0))) / (10 * made.tolerance)
    scale += _noise(made) / (10 * made.tolerance)
    check_close(found, truth.gradient, 10 * made.tolerance, "gradient", scale)


def kernel(made: Made, rng: random.Random) -> None:
    D, values = _damping(made, rng)
    with refusals():
        K = made.H.kernel(D)
        dense, diagonal = K.to_dense(), K.diagonal()
        S = made.H.root_columns(slice(None)).double()
        vectors = _vectors(made, rng, K.shape[0])
        applied = K @ vectors
        some = K.block(slice(None), [0, K.shape[0] - 1])
    expected = S / values @ S.T
    check_close(dense, expected, 10 * made.tolerance, "kernel")
    check_close(diagonal, expected.diagonal(), 10 * made.tolerance, "diagonal of the kernel")
    check_close(
        some, expected[:, [0, -1]], 10 * made.tolerance, "kernel block", float(size_of(expected))
    )
    scale = float(size_of(expected) * size_of(vectors.double()))
    check_close(applied, expected @ vectors.double(), 20 * made.tolerance, "kernel product", scale)
    values_of_h = torch.linalg.eigvalsh(S @ S.T).flip(0)
    rank = min(made.matrix.shape[0], S.shape[0])
    of_truth = torch.linalg.eigvalsh(made.matrix).flip(0)[:rank]
    check_close(
        values_of_h[:rank],
        of_truth,
        20 * made.tolerance,
        "eigenvalues",
        float(size_of(made.matrix)),
    )


def jacobian(made: Made, rng: random.Random) -> None:
    problem, truth = made.problem, made.truth
    data = problem.data
    with refusals():
        J = made.H.jacobian(data)
        dense = J.to_dense()
        vectors = _vectors(made, rng)
        applied, outputs = J @ vectors, J.outputs()
        back = J.T @ applied
    scale = float(size_of(truth.jacobian)) + _own_rounding(made, lambda oracle: oracle.jacobian)
    check_close(dense, truth.jacobian, 10 * made.tolerance, "Jacobian", scale)
    check_close(outputs, truth.outputs, 10 * made.tolerance, "outputs")
    own = dense.double()
    size = float(size_of(own))
    scale = size * float(size_of(vectors.double()))
    expected = own @ vectors.double()
    check_close(applied, expected, 10 * made.tolerance, "J v", scale)
    check_close(back, own.T @ expected, 20 * made.tolerance, "Jᵀ J v", scale * size)


def point_gradients(made: Made, rng: random.Random) -> None:
    problem, truth = made.problem, made.truth
    if not problem.has_targets:
        return
    with refusals():
        found = made.H.point_gradients(problem.data).to_dense()
    expected = truth.point_gradients / made.H.loss_scale
    rounding = _own_rounding(made, lambda oracle: oracle.point_gradients) / abs(made.H.loss_scale)
    lost = float(size_of(truth.gradient_rounding)) / abs(made.H.loss_scale)
    lost += _noise(made) / abs(made.H.loss_scale)
    scale = float(size_of(expected)) + rounding + lost / (10 * made.tolerance)
    check_close(found, expected, 10 * made.tolerance, "point gradients", scale)


def _damping(made: Made, rng: random.Random) -> tuple[Any, Tensor]:
    """A damping in some form, and its values for all rows."""
    size = made.H.shape[0]
    mean = float(made.matrix.diagonal().mean())
    base = mean * 10 ** rng.uniform(-3, 1) if mean > 0 else 1.0
    kind = rng.choice(["number", "number", "number", "tensor", "vector", "names"])
    if kind == "vector":
        values = base * (0.5 + torch.rand(size, generator=generator(rng)).double())
        return values, values
    if kind == "tensor":
        return _number(base), _number(base).expand(size)
    if kind == "names":
        names = made.H.layout.names
        chosen = {name: base * (1 + number) for number, name in enumerate(names)}
        counts = [made.H.layout.shapes[name].numel() for name in names]
        values = torch.cat(
            [_number(chosen[n]).expand(c) for n, c in zip(names, counts, strict=True)]
        )
        return chosen, values
    return base, torch.full((size,), base, dtype=torch.float64)


def bad_damping(made: Made, rng: random.Random) -> None:
    size = made.H.shape[0]
    bad: list[Any] = [0, -1.0, float("nan"), float("inf"), "much", None, torch.ones(size + 1)]
    bad += [{"nobody": 1.0}, {}, 1j, torch.zeros(size), [1.0] * (size + 2), torch.ones(2, size)]
    chosen = bad[rng.randrange(len(bad))]
    with refusals():
        made.H.factorize(chosen)
    raise WrongError(f"a damping of {chosen!r} was not refused")


def check_inverse(
    made: Made, F: Any, values: Tensor, rng: random.Random, tolerance: float, warned: list[str]
) -> None:
    """Compare a factorization of H + D with the dense inverse."""
    matrix = made.matrix + torch.diag(values)
    inverse = torch.linalg.inv(matrix)
    condition = float(size_of(matrix) * size_of(inverse))
    # Solves lose the condition number; what is exact is also limited by how exact H is.
    allowed = tolerance + min(1.0, 10 * made.tolerance * condition)
    rhs = _vectors(made, rng)
    with refusals(), told() as names:
        solved = F.solve(rhs)
    silent = not (warned or names)
    if silent:
        check_close(solved, inverse @ rhs.double(), allowed, "solve")
    action = rng.choice(["logdet", "variances", "sample", "quadratic", "operator"])
    with refusals(), told() as names:
        if action == "logdet":
            found = F.logdet()
        elif action == "variances":
            found = F.inverse_diagonal()
        elif action == "quadratic":
            rows = made.truth.jacobian[:3].to(made.problem.dtype)
            found = F.quadratic(rows)
        elif action == "sample":
            first = F.sample(2, generator=torch.Generator().manual_seed(5))
            found = F.sample(2, generator=torch.Generator().manual_seed(5))
        else:
            found = F @ rhs
    if warned or names:
        return
    if action == "logdet":
        expected = torch.logdet(matrix)
        scale = len(matrix) + float(expected.abs())
        check_close(found, expected, max(allowed, 1e-9), "log-determinant", scale)
    elif action == "variances":
        check_close(found, inverse.diagonal(), allowed, "variances")
    elif action == "quadratic":
        rows = rows.double()
        check_close(found, rows @ inverse @ rows.T, allowed, "quadratic")
    elif action == "sample":
        if not torch.equal(found, first):
            raise WrongError("samples with the same generator differ")
        if not bool(torch.isfinite(found).all()):
            raise WrongError("samples are not finite")
    else:
        check_close(found, inverse @ rhs.double(), allowed, "F @ b")


def factorize(made: Made, rng: random.Random) -> None:
    D, values = _damping(made, rng)
    method = often(rng, rng.choice(METHODS), SLOW_METHODS, 0.06)
    tolerance = rng.choice([1e-2, 1e-2, 1e-4])
    with refusals(), told() as warned:
        F = made.H.factorize(D, tolerance, method=method, seed=rng.choice([0, 7]))  # type: ignore[arg-type]
    exact = F.plan.chosen.name in ("parameters", "samples")
    check_inverse(made, F, values, rng, 0.0 if exact else 3 * tolerance, warned)


def square_root(made: Made, rng: random.Random) -> None:
    """G Gᵀ = (H + D)⁻¹, which is what samples are made of."""
    D, values = _damping(made, rng)
    with refusals(), told() as warned:
        F = made.H.factorize(D, method="parameters")
        G = F.sqrt_solve(torch.eye(made.H.shape[0], dtype=made.problem.dtype)).double()
    inverse = torch.linalg.inv(made.matrix + torch.diag(values))
    condition = float(size_of(made.matrix + torch.diag(values)) * size_of(inverse))
    if not warned:
        check_close(G @ G.T, inverse, min(1.0, 20 * made.tolerance * condition), "G Gᵀ")


def subsample(made: Made, rng: random.Random) -> None:
    H = made.H
    count = rng.randint(1, H.num_points)
    damping = None
    if rng.random() < 0.4:
        damping, _ = _damping(made, rng)
    with refusals():
        W = H.subsample(count, seed=rng.randint(0, 9), damping=damping)
        dense, trace = W.to_dense().double(), W.trace()
        applied = W @ torch.ones(H.shape[0], dtype=made.problem.dtype)
    if damping is None:
        check_close(
            _number(trace), made.matrix.trace(), 20 * made.tolerance, "trace of a subsample"
        )
    lowest = float(torch.linalg.eigvalsh((dense + dense.T) / 2)[0])
    if lowest < -100 * made.tolerance * float(size_of(dense)):
        raise WrongError(f"a subsample has the eigenvalue {lowest:.3g}")
    scale = float(size_of(dense)) * H.shape[0] ** 0.5
    check_close(applied, dense.sum(1), 20 * made.tolerance, "product of a subsample", scale)


def sampled_entries(made: Made, rng: random.Random) -> None:
    scheme = rng.choice(["importance", "stratified", "uniform"])
    with refusals():
        E = made.H.sample_entries(400, scheme, seed=rng.randint(0, 9))  # type: ignore[arg-type]
        found = E.block(slice(None), slice(None)).double()
        again = E.block(slice(None), slice(None)).double()
        diagonal = E.diagonal().double()
    if not torch.equal(found, again):
        raise WrongError("sampled entries differ from call to call")
    check_close(diagonal, made.matrix.diagonal(), 20 * made.tolerance, "diagonal of samples")
    # Entries are unbiased; with importance sampling their deviation is bounded by that of the
    # diagonal. Ten deviations are never seen; an entry of another matrix is off by more.
    roots = made.matrix.diagonal().clamp(min=0).sqrt()
    if scheme == "importance":
        bound = 10 * torch.outer(roots, roots) / 400**0.5 + 1e-5 * float(size_of(made.matrix))
        if bool(((found - made.matrix).abs() > bound).any()):
            raise WrongError("sampled entries are too far from the exact ones")


def compress(made: Made, rng: random.Random) -> None:
    H, options = made.H, _compress_options(made, rng)
    with refusals(), told() as warned:
        A = hcurv.compress(H, **options)
    tolerance = options.get("tolerance")
    damping = options.get("damping")
    if damping is None and tolerance is None:
        tolerance = 5e-2
    check_compressed(made, A, tolerance if damping is None else None, warned, rng)
    if damping is not None and not warned:
        with refusals(), told() as later:
            F = A.factorize(damping)
        values = torch.full((H.shape[0],), damping, dtype=torch.float64)
        wanted = options.get("tolerance") or 1e-2
        # The tolerance is one of variances of rows of S; the solve of any vector may be worse.
        matrix = made.matrix + torch.diag(values)
        S = H.root_columns(slice(None)).double()
        with refusals():
            found = F.quadratic(S.to(H.dtype), diagonal=True).double()
        expected = (S @ torch.linalg.inv(matrix) * S).sum(1)
        condition = float(size_of(matrix) / damping)
        allowed = 5 * wanted + min(1.0, 100 * made.tolerance * condition)
        if not later:
            check_close(found, expected, allowed, "variances at the damping")


def check_compressed(
    made: Made, A: Any, tolerance: float | None, warned: list[str], rng: random.Random
) -> None:
    """Compare a compressed matrix with the truth, and its parts with each other."""
    with refusals():
        dense, diagonal = A.to_dense().double(), A.diagonal().double()
        vectors = _vectors(made, rng)
        applied = A @ vectors
        rows, numbers = _index(made, rng)
        some = A.block(rows, slice(None))
    norm = float(size_of(made.matrix))
    slack = 100 * made.tolerance
    check_close(dense, dense.T, slack, "symmetry", norm)
    check_close(diagonal, dense.diagonal(), slack, "diagonal of A", norm)
    check_close(some, dense[numbers], slack, "block of A", norm)
    scale = norm * float(size_of(vectors.double()))
    check_close(applied, dense @ vectors.double(), slack, "product of A", scale)
    error = float(size_of(dense - made.matrix)) / norm if norm else float(size_of(dense))
    if tolerance is not None and not warned and error > 3 * tolerance + slack:
        raise WrongError(f"compress: error {error:.3g} at tolerance {tolerance:.3g}, no warning")
    if error > 5 * A.estimated_error + slack:
        raise WrongError(f"compress: error {error:.3g}, estimated {A.estimated_error:.3g}")


def _compress_options(made: Made, rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"seed": rng.randint(0, 5)}
    if rng.random() < 0.7:
        options["tolerance"] = rng.choice([0.3, 1e-1, 1e-2, 1e-3, 0.0])
    if rng.random() < 0.3:
        options["leaf_size"] = rng.choice([1, 2, 4, 10, 1000])
    if rng.random() < 0.2:
        options["global_rank"] = rng.choice([0, 1, 3])
    if rng.random() < 0.1:
        options["method"] = rng.choice(["sketch", "neighbors"])
    if rng.random() < 0.2:
        options["ordering"] = rng.choice(["natural", "angle", "gram"])
    if rng.random() < 0.15:
        options["damping"] = float(made.matrix.diagonal().mean()) * rng.choice([1, 1e-2]) or 1.0
    elif rng.random() < 0.1:
        options["near_budget"] = rng.choice([0.1, 0.5])
    return options


def lowrank(made: Made, rng: random.Random) -> None:
    H = made.H
    rank = rng.randint(0, H.shape[0])
    with refusals():
        A = hcurv.baselines.LowRank(H, rank, seed=rng.randint(0, 5))
        dense = A.to_dense().double()
    values = torch.linalg.eigvalsh(made.matrix).flip(0)
    best = float(size_of(values[rank:]))
    error = float(size_of(dense - made.matrix))
    norm = float(size_of(made.matrix))
    if error > 10 * best + 1000 * made.tolerance**0.5 * norm:
        raise WrongError(f"low rank {rank}: error {error / norm:.3g}, best {best / norm:.3g}")
    with refusals():
        applied = A @ torch.ones(H.shape[0], dtype=H.dtype)
    check_close(applied, dense.sum(1), 100 * made.tolerance, "product of low rank", norm + 1e-300)
    D, values = _damping(made, rng)
    with refusals(), told() as warned:
        F = A.factorize(D)
    own = Made(made.problem, H, made.truth, (dense + dense.T) / 2, made.tolerance)
    check_inverse(own, F, values, rng, 0.0, warned)


def block_diagonal(made: Made, rng: random.Random) -> None:
    grouping = rng.choice(["layer", "unit", "parameter"])
    with refusals():
        A = hcurv.baselines.BlockDiagonal(made.H, grouping)  # type: ignore[arg-type]
        dense = A.to_dense().double()
    expected = torch.where(dense != 0, made.matrix, torch.zeros_like(made.matrix))
    norm = float(size_of(made.matrix))
    check_close(dense, expected, 20 * made.tolerance, "blocks of the diagonal", norm)
    if grouping == "parameter":
        sizes = [p.numel() for p in made.truth.parameters]
        mask = torch.block_diag(*[torch.ones(s, s) for s in sizes]) > 0
        wanted = torch.where(mask, made.matrix, torch.zeros_like(made.matrix))
        check_close(dense, wanted, 20 * made.tolerance, "blocks of parameters", norm)
    D, values = _damping(made, rng)
    with refusals(), told() as warned:
        F = A.factorize(D)
    own = Made(made.problem, made.H, made.truth, (dense + dense.T) / 2, made.tolerance)
    check_inverse(own, F, values, rng, 0.0, warned)


def plain_diagonal(made: Made, rng: random.Random) -> None:
    with refusals():
        A = hcurv.baselines.Diagonal(made.H)
        dense = A.to_dense()
    check_close(dense, torch.diag(made.matrix.diagonal()), 20 * made.tolerance, "Diagonal")


def eigenvalues(made: Made, rng: random.Random) -> None:
    H = made.H
    k = rng.randint(1, max(1, H.shape[0] - 2))
    with refusals(), told() as warned:
        found = hcurv.eigsh(H, k, seed=rng.randint(0, 5))
    if warned:
        return
    expected = torch.linalg.eigvalsh(made.matrix).flip(0)[:k]
    tolerance = max(100 * made.tolerance, 1e-6)
    check_close(found.values.sort(descending=True).values, expected, tolerance, "eigenvalues")


def conjugate_gradients(made: Made, rng: random.Random) -> None:
    H = made.H
    damping = float(made.matrix.diagonal().mean()) * rng.choice([1.0, 0.1]) or 1.0
    b = torch.randn(H.shape[0], dtype=H.dtype, generator=generator(rng))
    with refusals(), told() as warned:
        found = hcurv.cg(H + hcurv.Diagonal(torch.full_like(b, damping)), b, tolerance=1e-4)
    matrix = made.matrix + damping * torch.eye(H.shape[0]).double()
    if not warned:
        residual = matrix @ found.solution.double() - b.double()
        if size_of(residual) > (2e-4 + 100 * made.tolerance) * size_of(b.double()):
            raise WrongError(f"cg: residual {float(size_of(residual) / size_of(b.double())):.3g}")


def algebra(made: Made, rng: random.Random) -> None:
    H = made.H
    b = torch.randn(H.shape[0], dtype=H.dtype, generator=generator(rng))
    factor = rng.choice([2, -0.5, 1e-3])
    with refusals():
        found = (factor * H - H / 3 + hcurv.Diagonal(torch.ones_like(b))) @ b
    expected = (factor - 1 / 3) * made.matrix @ b.double() + b.double()
    scale = float(size_of(b.double())) * (1 + 3 * float(size_of(made.matrix)))
    check_close(found, expected, 10 * made.tolerance, "sum of operators", scale)


def bad_index(made: Made, rng: random.Random) -> None:
    size = made.H.shape[0]
    bad = [size, -size - 1, [0, size], 1.5, "0", None, [[0]], [0.5], torch.tensor([1.0])]
    chosen = bad[rng.randrange(len(bad))]
    with refusals():
        made.H.block(chosen, [0])  # type: ignore[arg-type]
    raise WrongError(f"the index {chosen!r} was not refused")


def bad_vector(made: Made, rng: random.Random) -> None:
    size, dtype = made.H.shape[0], made.problem.dtype
    other = torch.float64 if dtype == torch.float32 else torch.float32
    bad = [torch.ones(size + 1, dtype=dtype), torch.ones(size, dtype=other), [1.0] * size, 3.0]
    bad += [torch.ones(1, 1, size, dtype=dtype), torch.ones(size, dtype=torch.complex64), None]
    chosen = bad[rng.randrange(len(bad))]
    with refusals():
        made.H @ chosen  # type: ignore[operator]
    raise WrongError(f"the vector {chosen!r} was not refused")


QUICK: dict[str, Operation] = {
    function.__name__: function
    for function in (
        block,
        blocks,
        pairs,
        product,
        diagonal,
        root,
        gradient,
        kernel,
        factorize,
        square_root,
        algebra,
        bad_damping,
        bad_index,
        bad_vector,
        plain_diagonal,
    )
}
LONGER: dict[str, Operation] = {
    function.__name__: function
    for function in (
        jacobian,
        point_gradients,
        subsample,
        sampled_entries,
        compress,
        lowrank,
        block_diagonal,
        eigenvalues,
        conjugate_gradients,
    )
}
