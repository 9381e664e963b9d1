"""Exact entries, blocks and products, side by side with curvlinops in one run.

    make bench BENCH=entries DATA=folder-with-mnist-and-cifar10
    make bench BENCH=entries PARTS=deep

Three parts need no data: entries and products for an MLP 784-256-256-10 ("entries"), products for
autoencoders 3072-10-3072 ("wide"), n = 1000, and for 196-64-16-64-196, n = 5000, also beside
`torch.func` ("deep"), all in float32. The fourth is the precomputation for the reference
classifiers (c) and (d) at n = 10,000 ("precomputation").
"""

from __future__ import annotations

from functools import partial
from operator import matmul

import torch
from torch import Tensor, nn

import hcurv
from arguments import parse_data_argument
from hcurv.experiments.measure import (
    best_time,
    best_times,
    describe_machine,
    peak_extra_bytes,
    sgemm_rate,
)
from hcurv.experiments.reference_networks import REFERENCE_NETWORKS, build_mlp, seeded_mlp, train

MB = 1e6


def entries_and_products(data: str | None) -> None:
    """Compare with curvlinops' GGNLinearOperator."""
    from curvlinops import GGNLinearOperator

    generator = torch.Generator().manual_seed(0)
    model = build_mlp((784, 256, 256, 10), nn.ReLU)
    num_points = 1000
    inputs = torch.rand(num_points, 784, generator=generator)
    labels = torch.randint(0, 10, (num_points,), generator=generator)
    loss = nn.CrossEntropyLoss()
    theirs = GGNLinearOperator(
        model, loss, list(model.parameters()), [(inputs, labels)], check_deterministic=False
    )
    ours = hcurv.GaussNewton(model, loss, inputs)
    size = ours.shape[0]
    vector, matrix = torch.randn(size), torch.randn(size, 128)

    rate = sgemm_rate()
    print(f"sgemm: {rate / 1e9:.0f} GFlop/s; N = {size}, n = {num_points}")
    difference = (ours @ vector - theirs @ vector).norm() / (theirs @ vector).norm()
    print(f"relative difference of the two products: {difference:.1e}\n")

    their_product, our_product = best_times([lambda: theirs @ vector, lambda: ours @ vector], 10)
    ideal = 4 * size * num_points / rate
    print(f"{'':34}{'hcurv':>12}{'curvlinops':>12}{'ratio':>9}{'wanted':>9}")

    def row(name: str, mine: float, other: float, wanted: str) -> None:
        print(f"{name:34}{mine * 1e3:9.4g} ms{other * 1e3:9.4g} ms{other / mine:8.1f}x{wanted:>9}")

    row("H @ v", our_product, their_product, "1.5x")
    their_block, our_block = best_times([lambda: theirs @ matrix, lambda: ours @ matrix], 3)
    row("H @ V, 128 columns", our_block, their_block, "2x")
    rows, cols = torch.randint(0, size, (2, 100_000), generator=generator)
    our_entry = best_time(lambda: ours.pairs(rows, cols)) / rows.numel()
    row("one entry of 100,000 pairs", our_entry, their_product, "3000x")
    few_rows, few_cols = torch.randint(0, size, (2, 64), generator=generator)
    our_small = best_time(lambda: ours[few_rows, few_cols], 20)
    row("64 x 64 block, 64 products", our_small, 64 * their_product, "200x")
    print(f"\nH @ v reaches {ideal / our_product:.0%} of the limit of 4Nn flops at sgemm speed,")
    print(f"H @ V (128 columns) {128 * ideal / our_block:.0%}")

    first_layer = 785 * 256
    layer = torch.randint(0, first_layer, (2, 4096), generator=generator)
    run = torch.arange(10_000, 14_096)
    useful = 2 * num_points * 4096**2
    for name, left, right in (
        ("4096 x 4096 diagonal block, contiguous", run, run),
        ("4096 x 4096 block, contiguous", run, run + 50_000),
        ("4096 x 4096 block, random in one layer", layer[0], layer[1]),
    ):
        seconds = best_time(lambda left=left, right=right: ours[left, right], 3)  # type: ignore[misc]
        print(f"{name}: {seconds:.3f} s, useful flops at {useful / seconds / rate:.0%} of sgemm")
    print(
        f"\nextra memory: H @ V {peak_extra_bytes(lambda: ours @ matrix) / MB:.0f} MB, of which",
        end="",
    )
    print(f" the result {matrix.numel() * 4 / MB:.0f} MB;", end="")
    print(f" pairs {peak_extra_bytes(lambda: ours.pairs(rows, cols)) / MB:.0f} MB;", end="")
    print(f" 4096² block {peak_extra_bytes(lambda: ours[run, run]) / MB:.0f} MB (result 67 MB)")


def products_of_autoencoders(data: str | None) -> None:
    """Measure networks with as many outputs as inputs, with equal loss weights or not."""
    from curvlinops import GGNLinearOperator

    inputs = torch.rand(1000, 3072, generator=torch.Generator().manual_seed(0))
    loss = nn.MSELoss()
    print(f"\n{'3072-10-3072, MSELoss':34}{'hcurv':>12}{'curvlinops':>12}{'ratio':>9}")
    for name, output in (("sigmoid outputs", nn.Sigmoid()), ("linear outputs", None)):
        model = seeded_mlp((3072, 10, 3072), 0, nn.Softplus, output)
        theirs = GGNLinearOperator(
            model, loss, list(model.parameters()), [(inputs, inputs)], check_deterministic=False
        )
        ours = hcurv.GaussNewton(model, loss, inputs)
        for count in (1, 16, 64):
            columns = torch.randn(ours.shape[0], count)
            products = [partial(matmul, matrix, columns) for matrix in (ours, theirs)]
            mine, other = best_times(products, 5)
            expected = theirs @ columns
            difference = float((ours @ columns - expected).norm() / expected.norm())
            print(
                f"{f'{name}, {count} columns':34}{mine * 1e3:9.4g} ms{other * 1e3:9.4g} ms"
                f"{other / mine:8.1f}x   difference {difference:.1e}"
            )


def products_of_deep_networks(data: str | None) -> None:
    """Measure a deep network with many outputs, whose products are linearised passes."""
    from curvlinops import GGNLinearOperator

    num_points, widths = 5000, (196, 64, 16, 64, 196)
    inputs = torch.rand(num_points, widths[0], generator=torch.Generator().manual_seed(0))
    loss = nn.MSELoss()
    title = f"{'-'.join(map(str, widths))}, n = {num_points}, MSELoss"
    print(f"\n{title:34}{'hcurv':>14}{'torch.func':>14}{'curvlinops':>14}{'hcurv / each':>18}")
    for name, output in (("sigmoid outputs", nn.Sigmoid()), ("linear outputs", None)):
        model = seeded_mlp(widths, 0, nn.Softplus, output)
        theirs = GGNLinearOperator(
            model, loss, list(model.parameters()), [(inputs, inputs)], check_deterministic=False
        )
        ours = hcurv.GaussNewton(model, loss, inputs)
        for count in (1, 16, 128):
            columns = torch.randn(ours.shape[0], count)
            functions = [
                partial(matmul, ours, columns),
                partial(_torch_func_product, model, inputs, columns),
                partial(matmul, theirs, columns),
            ]
            results = [function() for function in functions]
            mine, func, other = best_times(functions, 7, budget=60.0)
            difference = max(
                float((results[0] - result).norm() / result.norm()) for result in results[1:]
            )
            print(
                f"{f'{name}, {count} columns':34}{mine * 1e3:11.4g} ms{func * 1e3:11.4g} ms"
                f"{other * 1e3:11.4g} ms{mine / func:9.2f}{mine / other:9.2f}"
                f"   difference {difference:.1e}"
            )


def _torch_func_product(model: nn.Module, inputs: Tensor, columns: Tensor) -> Tensor:
    """The same product for MSELoss, by jvp and vjp, at most 16 columns at a time."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    sizes = [value.numel() for value in parameters.values()]

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (inputs,))  # type: ignore[no-any-return]

    def one(column: Tensor) -> Tensor:
        pieces = zip(parameters, column.split(sizes), strict=True)
        tangents = {name: piece.view_as(parameters[name]) for name, piece in pieces}
        reached, forward = torch.func.jvp(outputs, (parameters,), (tangents,))  # type: ignore[misc]
        _, transposed = torch.func.vjp(outputs, parameters)  # type: ignore[misc]
        (found,) = transposed(forward * (2 / reached.numel()))
        return torch.cat([found[name].reshape(-1) for name in parameters])

    if columns.shape[1] == 1:
        return one(columns[:, 0])[:, None]
    several = torch.func.vmap(one, in_dims=1, out_dims=1)
    return torch.cat([several(some) for some in columns.split(16, dim=1)], dim=1)


def precomputation(data: str | None) -> None:
    """Measure the memory and the time of the precomputation."""
    header = f"{'nbytes':>10}{'paper':>9}{'peak':>10}{'time':>9}{'in forward passes':>20}"
    print(f"\n{'precomputation, n = 10,000':28}{header}")
    for name, paper in (("classifier (c)", 191), ("classifier (d)", 423)):
        trained = train(REFERENCE_NETWORKS[name], data)
        _precompute(name, paper, trained.model, trained.loss, trained.inputs[:10_000].clone())


def _precompute(
    name: str, paper: int, model: nn.Module, loss: nn.Module | hcurv.losses.Loss, inputs: Tensor
) -> None:
    def build() -> hcurv.GaussNewton:
        return hcurv.GaussNewton(model, loss, inputs)

    with torch.no_grad():
        forward = best_time(lambda: model(inputs))
    peak = peak_extra_bytes(build)
    seconds = best_time(build, 3)
    print(
        f"{name:28}{build().nbytes / MB:7.1f} MB{paper:6d} MB{peak / MB:7.0f} MB{seconds:7.2f} s"
        f"{seconds / forward:19.1f}x"
    )


PARTS = {
    "entries": entries_and_products,
    "wide": products_of_autoencoders,
    "deep": products_of_deep_networks,
    "precomputation": precomputation,
}

if __name__ == "__main__":
    arguments = parse_data_argument(__doc__, PARTS)
    print(describe_machine())
    for part in arguments.parts or PARTS:
        PARTS[part](arguments.data)
