"""The three-minute demonstration: a classifier of handwritten digits and its curvature.

    python -m hcurv.experiments.demo [FOLDER]

trains a small network on scikit-learn's digits, builds its Gauss-Newton Hessian, prints entries,
compares the time per entry with one matrix-free product per column, compresses it, and saves
pictures.
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
from hcurv.experiments.reference_networks import build_mlp
from hcurv.memory import format_bytes

__all__ = ["main"]

SIZES = (64, 64, 32, 10)


def train(inputs: Tensor, labels: Tensor) -> nn.Sequential:
    """Plain SGD for 30 epochs; reproducible."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = build_mlp(SIZES, nn.ReLU)
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
    """The diagonal of each layer as images, and a part of the matrix itself."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    folder.mkdir(parents=True, exist_ok=True)
    curvature = matrix.diagonal()
    floor = float(curvature.max()) * 1e-8
    layers = [m for m in model if isinstance(m, nn.Linear)]
    figure, axes = plt.subplots(1, len(layers), figsize=(12, 4.2), layout="constrained")
    offset = 0
    for number, (layer, axis) in enumerate(zip(layers, axes, strict=True), start=1):
        values = curvature[offset : offset + layer.weight.numel()].view_as(layer.weight)
        offset += layer.weight.numel() + layer.out_features
        picture = axis.imshow(
            values.clamp(min=floor).numpy(), norm=LogNorm(floor), aspect="auto", cmap="viridis"
        )
        axis.set(title=f"layer {number}: {layer.in_features} to {layer.out_features}")
        axis.set(xlabel="input", ylabel="unit")
        figure.colorbar(picture, ax=axis)
    figure.suptitle("Curvature of every weight: the diagonal of H, layer by layer")
    diagonal_path = folder / "diagonal.png"
    figure.savefig(diagonal_path, dpi=120)

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
    return [diagonal_path, pixels_path, block_path]


def show_compression(H: hcurv.GaussNewton) -> hcurv.HMatrix:
    """Compress to a few tolerances; the last result is returned."""
    print("Compressed hierarchically (hcurv.compress):")
    print(f"{'tolerance':>11}{'true error':>12}{'estimated':>11}{'of N² stored':>14}{'time':>9}")
    for tolerance in (1e-1, 3e-2, 1e-2):
        start = time.perf_counter()
        A = hcurv.compress(H, tolerance=tolerance, leaf_size=64)
        seconds = time.perf_counter() - start
        print(
            f"{tolerance:>11.0e}{A.relative_error(H):>12.1e}{A.estimated_error:>11.1e}"
            f"{A.compression_rate:>14.2%}{seconds:>7.2f} s"
        )
    print()
    return A


def show_solves(H: hcurv.GaussNewton) -> None:
    """Factorize, solve, precondition; compare with dense linear algebra."""
    largest = float(hcurv.eigsh(H, 1, tolerance=1e-3).values[0])
    damping = 1e-3 * largest
    size = H.shape[0]
    print(f"Solved with damping 1e-3 of the largest eigenvalue {largest:.3g}:")
    A = hcurv.compress(H, tolerance=1e-2, leaf_size=64, positive_definite=True, damping=damping)
    start = time.perf_counter()
    F = A.factorize(damping)
    seconds = time.perf_counter() - start
    right = torch.randn(size, 16, generator=torch.Generator().manual_seed(2))
    solve = timed(lambda: F.solve(right))
    dense = H.to_dense().double() + damping * torch.eye(size, dtype=torch.float64)
    start = time.perf_counter()
    factor = torch.linalg.cholesky(dense)
    dense_seconds = time.perf_counter() - start
    logdet = 2 * factor.diagonal().log().sum()
    print(f"factorize {seconds:.2f} s (dense, float64: {dense_seconds:.2f} s), 16 solves", end=" ")
    print(f"{solve * 1e3:.1f} ms, log-determinant {F.logdet():.2f} (exact: {logdet:.2f})")
    inverse = torch.cholesky_inverse(factor).diagonal()
    error = (F.inverse_diagonal() - inverse).norm() / inverse.norm()
    print(f"variances, the diagonal of the inverse, to {error:.1e} of the exact ones")
    plain = hcurv.cg(H, right, damping=damping, tolerance=1e-5)
    better = hcurv.cg(H, right, damping=damping, tolerance=1e-5, preconditioner=F)
    print(
        f"conjugate gradients on the exact H to 1e-5: {int(plain.num_iterations.max())} iterations,"
        f" with the factorization {int(better.num_iterations.max())}\n"
    )


def main(folder: Path) -> None:
    """Run the demonstration and save its pictures in ``folder``."""
    inputs, labels = digits()
    model = train(inputs, labels)
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
    sizes = "-".join(map(str, SIZES))
    print(f"A classifier {sizes} on {len(inputs)} digits: {accuracy:.1%} of them right.\n")

    start = time.perf_counter()
    H = hcurv.GaussNewton(model, nn.CrossEntropyLoss(), inputs)
    seconds = time.perf_counter() - start
    size = H.shape[0]
    dense = format_bytes(4 * size**2)
    print(f"H is {size} x {size} ({dense} if it were dense); the precomputation took", end=" ")
    print(f"{seconds:.2f} s and {format_bytes(H.nbytes)}.\n")

    print(f"H[100, 76]       = {H[100, 76]:+.4e}")
    print(f"H[[100, 141], 74:78] =\n{H[[100, 141], 74:78]}")
    curvature = H.diagonal()
    print(f"trace(H)         = {curvature.sum():.4f}")
    print(f"rows that are zero (black pixels, dead units): {(curvature == 0).float().mean():.1%}\n")

    product = matrix_free_product(model, inputs)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = product(vector)
    error = (H @ vector - expected).norm() / expected.norm()
    print(f"H @ v agrees with automatic differentiation to {error:.0e}.")
    column = timed(lambda: product(vector))
    rows, cols = torch.randint(0, size, (2, 50_000), generator=torch.Generator().manual_seed(1))
    entry = timed(lambda: H.pairs(rows, cols)) / rows.numel()
    whole = timed(H.to_dense, 1)
    print(
        f"one entry:    {entry * 1e6:9.2f} µs, by a product per column {column * 1e6:9.0f} µs:",
        end="",
    )
    print(f" {column / entry:,.0f} times faster")
    print(f"all of H:     {whole:9.3f} s,  by {size} products {size * column:12.2f} s:", end="")
    print(f"  {size * column / whole:,.0f} times faster\n")

    A = show_compression(H)
    show_solves(H)
    paths = save_pictures(model, H, folder)
    paths.append(folder / "compressed.png")
    A.plot().savefig(paths[-1], dpi=120)
    for path in paths:
        print(f"wrote {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
