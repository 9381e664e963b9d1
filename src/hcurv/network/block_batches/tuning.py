"""Sizes and relative costs that steer how many blocks are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockTuning"]


@dataclass(frozen=True)
class BlockTuning:
    """What is evaluated at a time, and what each way is estimated to cost.

    None of this changes a result but for rounding. Costs are in flops of a large matrix product,
    per point; they were fitted to timings of one core of a desktop processor, and only their
    ratios matter. Sizes keep operands in its caches.

    Attributes:
        chunk_entries: most entries of blocks that are evaluated in one go.
        large_block: blocks with at least this many entries are evaluated one by one.
        gram_floats: floats that Gram values are computed from at a time.
        product_floats: floats of the operands of one batched product.
        large_sub_block: sub-blocks with at least this many entries are batched only with others
            of exactly their size; smaller ones are padded to similar sizes.
        table_tile: most pairs of units, and of inputs, in one matrix product for a table.
        table_points: fewest points in such a product.
        table_floats: floats of the operands of such a product.
        look_up_entries: entries that are looked up in a table at a time.
        elementwise_flops: cost of one elementwise pass, per number.
        write_flops: cost of writing one entry, for all points together.
        look_up_flops: cost of looking up one entry in a table, likewise.
        look_up_zero_flops: the same in a group of orthogonal units, where most entries are zero.
        small_product: rows and columns by which a small product costs more than its own flops.
        factored_weight: a factor on the cost of products with factored Gram values.
        gram_reuse: Gram values are computed beforehand and stored if each of them is used at
            least this many times.
    """

    chunk_entries: int = 2**21
    large_block: int = 2**18
    gram_floats: int = 2**19
    product_floats: int = 2**21
    large_sub_block: int = 2**15
    table_tile: int = 2048
    table_points: int = 128
    table_floats: int = 2**20
    look_up_entries: int = 2**17
    elementwise_flops: float = 20
    write_flops: float = 500
    look_up_flops: float = 500
    look_up_zero_flops: float = 150
    small_product: int = 8
    factored_weight: float = 1.0
    gram_reuse: float = 2.0
