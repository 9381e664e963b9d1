"""What `hcurv.compress` costs, in the products that it needs.

    make bench BENCH=build DATA=folder-with-mnist-and-cifar10
    make bench BENCH=build PARTS="global trees" DATA=...

Times are compared within one run: a global part alone with `LowRank(H, rank, power_iterations=1)`
of the same rank, a tree with the product H·X of 128 columns, a damped build with an undamped one of
the same storage, a refresh with products. Errors are ‖HX − AX‖_F/‖HX‖_F with 128 Gaussian columns.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hcurv
from arguments import parse_data_argument
from compress import gauss_newton
from hcurv.experiments.datasets import cifar10, mnist
from hcurv.experiments.measure import best_time, describe_machine, peak_extra_bytes
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.linalg import lanczos

GB = 1e9
# The errors of large matrices are measured with this many columns.
_FEW_PROBES = 16
TOLERANCES = (1e-1, 1e-2, 1e-3)


def timed(run: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The best time of some repeats, and the last result."""
    best, found = float("inf"), None
    for _ in range(repeats):
        found = None
        gc.collect()
        start = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - start)
    return best, found


def quiet(matrix: Any, **options: Any) -> hcurv.HMatrix:
    """Compress without warnings about the error, which is printed anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hcurv.CompressionWarning)
        return hcurv.compress(matrix, **options)


def planning_share(matrix: hcurv.HMatrix) -> float:
    """Share of the build that was spent on the plan alone, without products."""
    seconds = matrix.record.seconds
    return seconds["planning"] / sum(seconds.values())


def largest_eigenvalue(matrix: hcurv.GaussNewton, steps: int) -> float:
    """λ₁, by some steps of Lanczos."""
    values, _, _ = lanczos(matrix.__matmul__, matrix.shape[0], steps, matrix.dtype, matrix.device)
    return float(values[-1])


def describe(matrix: hcurv.HMatrix) -> str:
    """The form that was chosen."""
    leaves = f"leaves {matrix.record.leaf_size}" if matrix.tree.num_kept else "no tree"
    return f"global rank {matrix.global_rank}, {leaves}"


def trained(
    sizes: tuple[int, ...], inputs: torch.Tensor, targets: torch.Tensor, steps: int = 300
) -> nn.Module:
    """A classifier after some steps of gradient descent, as the reference networks are."""
    model = seeded_mlp(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(inputs), (128,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return model


def classifier_64(data: str | None) -> hcurv.GaussNewton:
    """784-64-64-10 over 2,000 images."""
    images, labels = mnist(data)
    model = trained((784, 64, 64, 10), images, labels)
    return hcurv.GaussNewton(model, nn.CrossEntropyLoss(), images[:2000].clone())


def global_part(data: str | None) -> None:
    """Where the answer is a global part alone."""
    print(
        "\nGlobal part alone, over LowRank of the same rank with one power iteration (at most 1.5)"
    )
    print(
        f"{'':28}{'tolerance':>10}{'error':>9}{'rank':>6}{'seconds':>9}{'LowRank':>9}{'ratio':>7}"
    )
    makers: dict[str, Callable[[], hcurv.GaussNewton]] = {
        "classifier (a), n = 1,000": lambda: gauss_newton("classifier (a)", data, 1000),
        "classifier (a), n = 10,000": lambda: gauss_newton("classifier (a)", data, 10_000),
        "784-64-64-10, n = 2,000": lambda: classifier_64(data),
    }
    for name, make in makers.items():
        matrix = make()
        for tolerance in TOLERANCES:
            seconds, found = timed(lambda: quiet(matrix, tolerance=tolerance), 2)  # noqa: B023
            rank = max(1, found.global_rank)
            rival, _ = timed(
                lambda: hcurv.baselines.LowRank(matrix, rank, power_iterations=1),  # noqa: B023
                2,
            )
            print(
                f"{name:28}{tolerance:>10.0e}{found.relative_error(matrix):>9.1e}{rank:>6}"
                f"{seconds:>9.2f}{rival:>10.2f}{seconds / rival:>7.2f}  {describe(found)},"
                f" planning {planning_share(found):.0%}",
                flush=True,
            )


def trees(data: str | None) -> None:
    """Where the answer is a tree; and builds for a damping."""
    matrix = gauss_newton("AE (a)", data, 1000)
    columns = torch.randn(matrix.shape[0], 128)
    unit = best_time(lambda: matrix @ columns, 5)
    print(f"\nAE (a), n = 1,000, in products H·X₁₂₈ of {unit:.2f} s (at most 4, 6, 12)")
    for tolerance in TOLERANCES:
        seconds, found = timed(lambda: quiet(matrix, tolerance=tolerance), 3)  # noqa: B023
        phases = ", ".join(
            f"{name} {s:.2f}" for name, s in found.record.seconds.items() if s > 5e-3
        )
        print(
            f"{tolerance:>8.0e}: {seconds / unit:.1f} products ({seconds:.2f} s), error"
            f" {found.relative_error(matrix):.1e}, {100 * found.compression_rate:.3f} % of N²;"
            f" {describe(found)}; {phases}",
            flush=True,
        )


def damped(data: str | None) -> None:
    """Builds for a damping, over undamped ones of the same storage."""
    print("\nBuilds for a damping λ, over undamped builds of the same storage (at most 1.5)")
    for name in ("classifier (a)", "AE (a)"):
        matrix = gauss_newton(name, data, 1000)
        largest = lanczos(matrix.__matmul__, matrix.shape[0], 20, matrix.dtype, matrix.device)[0][
            -1
        ]
        for ratio in (1e-1, 1e-2, 1e-3):
            damping = ratio * largest
            seconds, found = timed(lambda: quiet(matrix, damping=damping), 2)  # noqa: B023
            plain, other = timed(
                lambda: quiet(matrix, tolerance=found.record.tolerance),  # noqa: B023
                2,
            )
            print(
                f"{name:16} λ = {ratio:.0e} λ₁: {seconds:.2f} s, {seconds / plain:.2f} times as"
                f" long; {found.num_stored / other.num_stored:.2f} times the floats, variances"
                f" wrong by {found.variance_error:.1e}; {describe(found)}",
                flush=True,
            )


def refreshed(data: str | None) -> None:
    """A matrix that has changed a little, in the form of the one before."""
    print("\nA.refresh(H) after five steps of training (at most 30 products for the first)")
    images, digits = mnist(data)
    small = nn.functional.avg_pool2d(images.view(-1, 1, 28, 28), 2).flatten(1)[:5000].clone()
    deep = seeded_mlp((196, 64, 16, 64, 196), activation=nn.Softplus)
    tasks: list[tuple[str, nn.Module, nn.Module, torch.Tensor, torch.Tensor]] = [
        ("196-64-16-64-196, n = 5,000", deep, nn.MSELoss(), small, small),
        (
            "784-64-10, n = 1,000",
            seeded_mlp((784, 64, 10)),
            nn.CrossEntropyLoss(),
            images[:1000].clone(),
            digits[:1000],
        ),
    ]
    for name, model, loss, inputs, labels in tasks:
        before = hcurv.GaussNewton(model, loss, (inputs, labels))
        old_seconds, old = timed(lambda: quiet(before, tolerance=1e-2))  # noqa: B023
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
        after = hcurv.GaussNewton(model, loss, (inputs, labels))
        columns = torch.randn(after.shape[0], 128)
        unit = best_time(lambda: after @ columns, 3)  # noqa: B023
        single = best_time(lambda: after @ columns[:, 0], 10)  # noqa: B023
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hcurv.CompressionWarning)
            seconds, new = timed(lambda: old.refresh(after), 2)  # noqa: B023
        print(
            f"{name}: {seconds:.2f} s, {seconds / unit:.1f} products of 128 columns,"
            f" {seconds / single:.0f} of one; compress took {old_seconds:.2f} s; error"
            f" {old.relative_error(before):.1e} before, {new.relative_error(after):.1e} after,"
            f" {old.relative_error(after):.1e} unless refreshed; {describe(old)}",
            flush=True,
        )


def large(data: str | None) -> None:
    """Networks with millions of parameters: time and memory."""
    print("\nLarge networks on CIFAR-10, n = 10,000, error at most 2e-2")
    matrix = gauss_newton("classifier (d)", data, 10_000)
    _report_large("classifier (d)", matrix, "within 120 s and 4 GB", 1.9e-2, workspace=2**31)


def ten_million(data: str | None) -> None:
    """3072-2560-1024-10, N = 10.5 million; a solve with it."""
    images, labels = cifar10(data)
    model = trained((3072, 2560, 1024, 10), images, labels)
    inputs = images[:10_000].clone()
    del images
    matrix = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    asked = "within 30 minutes and 12 GB"
    _report_large("3072-2560-1024-10", matrix, asked, 1.7e-2, workspace=10**10)
    vector = torch.randn(matrix.shape[0])
    damping = 1e-2 * largest_eigenvalue(matrix, 6)

    def solve() -> tuple[Any, torch.Tensor]:
        factorized = matrix.factorize(damping)
        return factorized, factorized.solve(vector)

    seconds, (factorized, solved) = timed(solve)
    residual = (matrix @ solved + damping * solved - vector).norm() / vector.norm()
    print(
        f"  solve at 1e-2 λ₁: {seconds:.0f} s, {factorized.plan.chosen.description}, residual"
        f" {float(residual):.1e}",
        flush=True,
    )


def _report_large(
    name: str, matrix: hcurv.GaussNewton, asked: str, tolerance: float, workspace: int
) -> None:
    found: list[hcurv.HMatrix] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(
        lambda: found.append(quiet(matrix, tolerance=tolerance, workspace=workspace))
    )
    seconds = time.perf_counter() - start
    result = found[0]
    print(
        f"{name}: N = {matrix.shape[0]}, {seconds:.0f} s, peak {peak / GB:.1f} GB beyond the"
        f" factors of {matrix.nbytes / GB:.1f} GB ({asked}); {describe(result)},"
        f" {result.nbytes / GB:.2f} GB",
        flush=True,
    )
    # As many columns as usual would take longer than the build.
    error = result.relative_error(matrix, num_probes=_FEW_PROBES)
    print(f"  error {error:.1e} on {_FEW_PROBES} Gaussian columns", flush=True)


PARTS = {
    "global": global_part,
    "trees": trees,
    "damped": damped,
    "refresh": refreshed,
    "large": large,
    "ten-million": ten_million,
}


if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
