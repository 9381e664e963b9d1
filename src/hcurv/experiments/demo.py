"""The three-minute demonstration: a classifier of handwritten digits and its curvature.

    python -m hcurv.experiments.demo [FOLDER]

It trains a small network on scikit-learn's digits, compresses and factorizes the network's
Gauss-Newton Hessian, checks the result against dense linear algebra, compares all methods, and
writes a report with pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import hcurv
from hcurv.experiments.datasets import digits
from hcurv.experiments.measure import best_time
from hcurv.experiments.reference_networks import seeded_mlp
from hcurv.memory import format_bytes

__all__ = ["main"]

SIZES = (64, 64, 32, 10)
# The largest eigenvalue is 6.8 here.
DAMPING = 0.1
# Inverses are compared at these dampings over the largest eigenvalue. Each takes seconds.
RATIOS = (1e-2, 1e-3, 1e-4)
EXAMPLE = (
    "H = hcurv.GaussNewton(model, loss, inputs)",
    "A = hcurv.compress(H, damping=0.1, tolerance=1e-2)",
    "F = A.factorize(0.1)",
    "step = F.solve(H.gradient(labels))",
    "print(A.compression_rate, A.variance_error, float(F.logdet()), float(step.norm()))",
)


def main(folder: Path, sizes: tuple[int, ...] = SIZES, num_points: int | None = None) -> None:
    """Run the demonstration.

    Args:
        folder: where the report and the pictures go. It is created if necessary.
        sizes: the layer sizes of the classifier, from the 64 pixels to the 10 classes.
        num_points: use only the first images; by default all 1,797.
    """
    inputs, labels = (values[:num_points] for values in digits())
    model = train(inputs, labels, sizes)
    accuracy = (model(inputs).argmax(1) == labels).float().mean()
    print(
        f"A classifier with layers {'-'.join(map(str, sizes))}, trained on {len(inputs)} images of"
        f" digits, gets {accuracy:.1%} of them right.\n"
    )
    H, A, F = show_example(model, inputs, labels)
    show_truth(H, A, F)
    show_entries(H, model, inputs)
    print("All methods, each with about the same storage (hcurv.compare):\n")
    comparison = hcurv.compare(model, nn.CrossEntropyLoss(), inputs, damping_ratios=RATIOS)
    print(f"{comparison}\n")
    folder.mkdir(parents=True, exist_ok=True)
    comparison.save_report(folder / "report.html")
    print("Written; open the report in a browser:")
    for path in (folder / "report.html", *save_pictures(model, H, folder)):
        print(f"  {path}")


def train(inputs: Tensor, labels: Tensor, sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    """Train a classifier with plain SGD for 30 epochs. The result is reproducible."""
    model = seeded_mlp(sizes)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(30):
        for batch, answers in zip(inputs.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            loss(model(batch), answers).backward()
            optimizer.step()
    return model.eval()


def show_example(
    model: nn.Sequential, inputs: Tensor, labels: Tensor
) -> tuple[hcurv.GaussNewton, hcurv.HMatrix, hcurv.Factorization]:
    """Show the five lines that a user writes, and what they print.

    Returns:
        The matrix, the compressed matrix and its factorization.
    """
    loss = nn.CrossEntropyLoss()
    for line in EXAMPLE:
        print(f">>> {line}")
    H = hcurv.GaussNewton(model, loss, inputs)
    A = hcurv.compress(H, damping=DAMPING, tolerance=1e-2)
    F = A.factorize(DAMPING)
    step = F.solve(H.gradient(labels))
    print(A.compression_rate, A.variance_error, float(F.logdet()), float(step.norm()))
    print()
    return H, A, F


def show_truth(H: hcurv.GaussNewton, A: hcurv.HMatrix, F: hcurv.Factorization) -> None:
    """Compare the same quantities with dense linear algebra in double precision."""
    exact = H.to_dense().double()
    error = (A.to_dense() - exact).norm() / exact.norm()
    factor = torch.linalg.cholesky(exact + DAMPING * torch.eye(len(exact), dtype=torch.float64))
    logdet = 2 * factor.diagonal().log().sum()
    inverse = torch.cholesky_inverse(factor).diagonal()
    variances = (F.inverse_diagonal() - inverse).norm() / inverse.norm()
    print("Against the dense matrix, in double precision:")
    print(f"  relative error of A           {error:.1e}")
    print(f"  log-determinant of H + 0.1·I  {logdet:.2f} (by F: {F.logdet():.2f})")
    print(f"  variances, diag of inverse    relative error {variances:.1e}\n")


def show_entries(H: hcurv.GaussNewton, model: nn.Sequential, inputs: Tensor) -> None:
    """Show some entries of H and what they cost."""
    size = H.shape[0]
    dense = format_bytes(4 * size**2)
    print(
        f"H is {size} x {size}: it would take {dense} as a dense matrix, and takes"
        f" {format_bytes(H.nbytes)} as hcurv keeps it."
    )
    print(f"H[[100, 141], 74:78] =\n{H[[100, 141], 74:78]}")
    curvature = H.diagonal()
    print(
        f"The trace is {curvature.sum():.4f}. {(curvature == 0).float().mean():.1%} of the rows are"
        " zero: they belong to pixels that are always black and to units that are always off."
    )
    product = matrix_free_product(model, inputs)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = product(vector)
    error = (H @ vector - expected).norm() / expected.norm()
    print(f"H @ v agrees with automatic differentiation to {error:.0e}.")
    column = best_time(lambda: product(vector), 3)
    rows, cols = torch.randint(0, size, (2, 50_000), generator=torch.Generator().manual_seed(1))
    entry = best_time(lambda: H.pairs(rows, cols), 3) / rows.numel()
    whole = best_time(H.to_dense, 1)
    print(
        f"One entry takes {entry * 1e6:.2f} µs with hcurv. Without it, a product with H gives one"
        f" column in {column * 1e6:.0f} µs: {column / entry:,.0f} times as long."
    )
    print(
        f"All of H takes {whole:.3f} s with hcurv, and {size * column:.2f} s by {size} products:"
        f" {size * column / whole:,.0f} times as long.\n"
    )


def matrix_free_product(model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a function that multiplies H with a vector by automatic differentiation.

    This is what a column costs without hcurv. Each product JᵀQJv goes backwards through the network
    twice: Jᵀu is linear in u, so that its derivative with respect to u along v is Jv.
    """
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    logits = model(inputs)
    u = torch.zeros_like(logits, requires_grad=True)
    pulled_back = torch.autograd.grad(logits, parameters, u, create_graph=True)
    p = torch.softmax(logits.detach(), dim=1)

    def product(vector: Tensor) -> Tensor:
        pieces = zip(vector.split(sizes), parameters, strict=True)
        direction = [piece.view_as(parameter) for piece, parameter in pieces]
        (change,) = torch.autograd.grad(pulled_back, u, direction, retain_graph=True)
        weighted = p * (change - (p * change).sum(1, keepdim=True)) / len(inputs)
        columns = torch.autograd.grad(logits, parameters, weighted, retain_graph=True)
        return torch.cat([column.reshape(-1) for column in columns])

    return product


def save_pictures(model: nn.Sequential, matrix: hcurv.GaussNewton, folder: Path) -> list[Path]:
    """Draw the curvature per pixel of some units, and a part of the matrix itself."""
    from matplotlib.figure import Figure

    first_layer = next(module for module in model if isinstance(module, nn.Linear))
    curvature = matrix.diagonal()[: first_layer.weight.numel()].view(-1, 8, 8)
    strongest = curvature.sum((1, 2)).argsort(descending=True)[:16]
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    tiles = figure.subplots(2, 8)
    limit = float(curvature[strongest].max())
    for unit, axis in zip(strongest.tolist(), tiles.flat, strict=True):
        picture = axis.imshow(curvature[unit].numpy(), cmap="magma", vmin=0, vmax=limit)
        axis.set_title(f"unit {unit}", fontsize=9)
        axis.axis("off")
    figure.colorbar(picture, ax=tiles, label="curvature, H[i, i]")
    figure.suptitle("Curvature of each pixel's weight, for the 16 units of layer 1 with the most")
    pixels_path = folder / "pixels.png"
    figure.savefig(pixels_path, dpi=120)

    block = matrix[:1024, :1024]
    limit = float(block.abs().quantile(0.995))
    figure = Figure(figsize=(6.8, 5.6), layout="constrained")
    axis = figure.subplots()
    picture = axis.imshow(block.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
    axis.set(
        title="A corner of H: 16 units of layer 1 with 64 inputs each",
        xlabel="parameter",
        ylabel="parameter",
        xticks=range(0, 1025, 256),
        yticks=range(0, 1025, 256),
    )
    figure.colorbar(picture, ax=axis, label="H[i, j]", extend="both")
    block_path = folder / "block.png"
    figure.savefig(block_path, dpi=120)
    return [pixels_path, block_path]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
