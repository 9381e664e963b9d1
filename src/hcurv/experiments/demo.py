"""The three-minute demonstration: a classifier of handwritten digits and its curvature.

    python -m hcurv.experiments.demo [FOLDER]

trains a small network on scikit-learn's digits, compresses and factorizes its Gauss-Newton Hessian,
checks that against dense linear algebra, compares all methods and writes a report with pictures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.datasets import digits
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.memory import format_bytes

__all__ = ["main"]

SIZES = (64, 64, 32, 10)


def train(inputs: Tensor, labels: Tensor) -> nn.Sequential:
    """Plain SGD for 30 epochs; reproducible."""
    model = seeded_mlp(SIZES)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(30):
        for batch, answers in zip(inputs.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            loss(model(batch), answers).backward()
            optimizer.step()
    return model.eval()


def matrix_free_product(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """One product with H by automatic differentiation: what a column costs without hcurv."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    pieces = [p.numel() for p in parameters.values()]

    def outputs(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(model, values, (inputs,))
        return result

    def product(vector: Tensor) -> Tensor:
        parts = zip(parameters.items(), vector.split(pieces), strict=True)
        tangent = {name: part.view_as(p) for (name, p), part in parts}
        logits, change = torch.func.jvp(outputs, (parameters,), (tangent,))[:2]
        p = torch.softmax(logits, dim=1)
        weighted = p * (change - (p * change).sum(1, keepdim=True)) / len(inputs)
        (columns,) = torch.func.vjp(outputs, parameters)[1](weighted)
        return torch.cat([columns[name].reshape(-1) for name in parameters])

    return product


def timed(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def save_pictures(model: nn.Sequential, matrix: hcurv.GaussNewton, folder: Path) -> list[Path]:
    """The curvature per pixel of some units, and a part of the matrix itself."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    curvature = matrix.diagonal()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    first = curvature[: layers[0].weight.numel()].view(-1, 8, 8)
    strongest = first.sum((1, 2)).argsort(descending=True)[:16]
    figure, tiles = plt.subplots(2, 8, figsize=(12, 3.6), layout="constrained")
    for unit, axis in zip(strongest.tolist(), tiles.flat, strict=True):
        axis.imshow(first[unit].numpy(), cmap="magma")
        axis.set_title(f"unit {unit}", fontsize=9)
        axis.axis("off")
    figure.suptitle("Curvature per pixel of the 16 first-layer units with the most of it")
    pixels_path = folder / "pixels.png"
    figure.savefig(pixels_path, dpi=120)

    block = matrix[:1024, :1024]
    limit = float(block.abs().quantile(0.995))
    figure, axis = plt.subplots(figsize=(6.4, 5.6), layout="constrained")
    picture = axis.imshow(block.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
    axis.set(title="H[:1024, :1024]: 16 units of the first layer, 64 inputs each")
    figure.colorbar(picture, ax=axis)
    block_path = folder / "block.png"
    figure.savefig(block_path, dpi=120)
    plt.close("all")
    return [pixels_path, block_path]


def show_example(model: nn.Sequential, inputs: Tensor, labels: Tensor) -> hcurv.GaussNewton:
    """The five lines that a user writes, and what they print."""
    loss = nn.CrossEntropyLoss()
    for line in EXAMPLE:
        print(f">>> {line}")
    H = hcurv.GaussNewton(model, loss, inputs)
    A = hcurv.compress(H, tolerance=1e-2, positive_definite=True, damping=1e-3)
    F = A.factorize(1e-3)
    step = F.solve(H.gradient(labels))
    print(A.compression_rate, A.estimated_error, float(F.logdet()), float(step.norm()))
    print()
    return H


EXAMPLE = (
    "H = hcurv.GaussNewton(model, loss, inputs)",
    "A = hcurv.compress(H, tolerance=1e-2, positive_definite=True, damping=1e-3)",
    "F = A.factorize(1e-3)",
    "step = F.solve(H.gradient(labels))",
    "print(A.compression_rate, A.estimated_error, float(F.logdet()), float(step.norm()))",
)


def show_truth(H: hcurv.GaussNewton) -> None:
    """The same against dense linear algebra in double precision."""
    damping = 1e-3
    A = hcurv.compress(H, tolerance=1e-2, positive_definite=True, damping=damping)
    F = A.factorize(damping)
    exact = H.to_dense().double()
    error = (A.to_dense() - exact).norm() / exact.norm()
    factor = torch.linalg.cholesky(exact + damping * torch.eye(len(exact), dtype=torch.float64))
    logdet = 2 * factor.diagonal().log().sum()
    inverse = torch.cholesky_inverse(factor).diagonal()
    variances = (F.inverse_diagonal() - inverse).norm() / inverse.norm()
    print(
        f"Checked with the dense matrix: relative error {error:.1e}, log-determinant {logdet:.2f}"
        f" ({F.logdet():.2f} by F),\nvariances, the diagonal of the inverse, to {variances:.1e}."
    )
    print()


def main(folder: Path) -> None:
    """Run the demonstration; report and pictures go to ``folder``."""
    inputs, labels = digits()
    model = train(inputs, labels)
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
    sizes = "-".join(map(str, SIZES))
    print(f"A classifier {sizes} on {len(inputs)} digits: {accuracy:.1%} of them right.\n")
    H = show_example(model, inputs, labels)
    show_truth(H)
    show_entries(H, model, inputs)

    print("All methods with the same storage (hcurv.compare):")
    comparison = hcurv.compare(model, nn.CrossEntropyLoss(), inputs)
    print(f"{comparison}\n")
    folder.mkdir(parents=True, exist_ok=True)
    comparison.save_report(folder / "report.html")
    for path in (folder / "report.html", *save_pictures(model, H, folder)):
        print(f"wrote {path}")


def show_entries(H: hcurv.GaussNewton, model: nn.Sequential, inputs: Tensor) -> None:
    """Some of H, and what an entry costs."""
    size = H.shape[0]
    dense = format_bytes(4 * size**2)
    print(f"H is {size} x {size} ({dense} if it were dense), kept in {format_bytes(H.nbytes)}.")
    print(f"H[[100, 141], 74:78] =\n{H[[100, 141], 74:78]}")
    curvature = H.diagonal()
    print(f"trace(H) = {curvature.sum():.4f}, rows that are zero (black pixels, dead", end=" ")
    print(f"units): {(curvature == 0).float().mean():.1%}")
    product = matrix_free_product(model, inputs)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = product(vector)
    error = (H @ vector - expected).norm() / expected.norm()
    print(f"H @ v agrees with automatic differentiation to {error:.0e}.")
    column = timed(lambda: product(vector))
    rows, cols = torch.randint(0, size, (2, 50_000), generator=torch.Generator().manual_seed(1))
    entry = timed(lambda: H.pairs(rows, cols)) / rows.numel()
    whole = timed(H.to_dense, 1)
    print(f"One entry: {entry * 1e6:.2f} µs; a product per column {column * 1e6:.0f} µs:", end=" ")
    print(f"{column / entry:,.0f} times faster.")
    print(f"All of H: {whole:.3f} s; by {size} products {size * column:.2f} s:", end=" ")
    print(f"{size * column / whole:,.0f} times faster.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
