"""Sorting token slots by expert: a stable counting sort, and the plan of row tiles."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import typing as tp

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from moe_flax.kernels.grouped_matmul.triton import launch


class Plan(tp.NamedTuple):
    """Which group each tile of rows belongs to: the lookup of every persistent product.

    Attributes:
      table: int32: the number of tiles, then G + 1 row offsets, then each tile's group (G for rows
        past the last group), then each tile's first row.
      num_groups: G.
      capacity: the most tiles there can be; the stride between the two lists.
      block_rows: rows a tile.
    """

    table: jax.Array
    num_groups: int
    capacity: int
    block_rows: int


class Sorted(tp.NamedTuple):
    """Slots (token, choice) in the order of their experts.

    Attributes:
      row_token: [T*K] int32, the token whose row lies at each sorted position.
      row_weight: [T*K] float32, its combine weight.
      slot_row: [T*K] int32, the sorted position of slot t*K + k; -1 where it has no expert.
      plan: the tiles of the sorted rows.
    """

    row_token: jax.Array
    row_weight: jax.Array
    slot_row: jax.Array
    plan: Plan


def plan_capacity(rows: int, groups: int, block_rows: int) -> int:
    """The most row tiles: every group but the full ones can leave one tile partly filled."""
    return -(-rows // block_rows) + min(groups + 1, rows)


@triton.jit
def _write_plan(
    sizes, index, programs, table_ptr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Writes the plan; `sizes` [WIDTH] holds the groups' rows, zero from GROUPS on.

    Each program writes some of every group's tiles. Entries past the last tile stay unwritten.
    """
    e = tl.arange(0, WIDTH)
    ends = tl.minimum(tl.cumsum(sizes, 0), ROWS)
    starts = tl.minimum(tl.cumsum(sizes, 0) - sizes, ROWS)
    if TAIL:
        used = tl.max(ends, 0)
        starts = tl.where(e == GROUPS, used, starts)
        ends = tl.where(e >= GROUPS, ROWS, ends)
    tiles = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS
    tiles = tl.where(e > GROUPS, 0, tiles)
    tile_ends = tl.cumsum(tiles, 0)
    if index == 0:
        tl.store(table_ptr, tl.max(tile_ends, 0))
        tl.store(table_ptr + 1 + e, starts, mask=e <= GROUPS)
    out = table_ptr + 2 + GROUPS + tile_ends - tiles
    for tile in range(index, tl.max(tiles, 0), programs):
        tl.store(out + tile, e, mask=tile < tiles)
        tl.store(out + CAPACITY + tile, starts + tile * BLOCK_ROWS, mask=tile < tiles)


@triton.jit
def _plan_kernel(
    sizes_ptr, table_ptr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, WIDTH)
    sizes = tl.maximum(tl.load(sizes_ptr + e, mask=e < GROUPS, other=0).to(tl.int32), 0)
    _write_plan(
        sizes, tl.program_id(0), tl.num_programs(0), table_ptr,
        ROWS, GROUPS, WIDTH, CAPACITY, BLOCK_ROWS, TAIL,
    )  # fmt: skip


@triton.jit
def _load_ids(ids_ptr, slot, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    ids = tl.load(ids_ptr + slot, mask=slot < SLOTS, other=EXPERTS)
    return tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids)


@triton.jit
def _count_kernel(
    ids_ptr, counts_ptr,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    ids = _load_ids(ids_ptr, pid * BLOCK + tl.arange(0, BLOCK), SLOTS, EXPERTS)
    tl.store(counts_ptr + pid * WIDTH + tl.arange(0, WIDTH), tl.histogram(ids, WIDTH))


@triton.jit
def _place_kernel(
    ids_ptr, weights_ptr, counts_ptr,
    row_token_ptr, row_weight_ptr, slot_row_ptr, table_ptr,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ALL: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Counts everything (or adds up the blocks' counts), then places this block's slots."""
    pid = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    if counts_ptr is None:
        every = tl.arange(0, ALL)
        all_ids = _load_ids(ids_ptr, every, SLOTS, EXPERTS)
        total = tl.histogram(all_ids, WIDTH)
        before = tl.histogram(tl.where(every < pid * BLOCK, all_ids, EXPERTS), WIDTH)
        placed = tl.sum(tl.where(e < EXPERTS, before, 0), 0)
        before = tl.where(e == EXPERTS, pid * BLOCK - placed, before)
    else:
        total = tl.zeros([WIDTH], tl.int32)
        before = tl.zeros([WIDTH], tl.int32)
        b = tl.arange(0, COUNTED)
        for first in range(0, BLOCKS, COUNTED):
            counts = tl.load(
                counts_ptr + (first + b)[:, None] * WIDTH + e[None, :],
                mask=(first + b)[:, None] < BLOCKS, other=0,
            )  # fmt: skip
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((first + b)[:, None] < pid, counts, 0), 0)
    position = tl.cumsum(total, 0) - total + before
    i = tl.arange(0, SUB)
    for first in range(0, BLOCK, SUB):
        slot = pid * BLOCK + first + i
        valid = slot < SLOTS
        ids = _load_ids(ids_ptr, slot, SLOTS, EXPERTS)
        earlier = (ids[:, None] == ids[None, :]) & (i[None, :] < i[:, None])
        row = tl.gather(position, ids, 0) + tl.sum(earlier.to(tl.int32), 1)
        position += tl.histogram(ids, WIDTH)
        tl.store(slot_row_ptr + slot, tl.where(ids < EXPERTS, row, -1), mask=valid)
        tl.store(row_token_ptr + row, slot // TOP_K, mask=valid)
        weight = tl.load(weights_ptr + slot, mask=valid & (ids < EXPERTS), other=0.0)
        tl.store(row_weight_ptr + row, weight, mask=valid)
    _write_plan(
        tl.where(e < EXPERTS, total, 0), pid, BLOCKS, table_ptr,
        SLOTS, EXPERTS, WIDTH, CAPACITY, BLOCK_ROWS, False,
    )  # fmt: skip


def make_plan(group_sizes: jax.Array, rows: int, block_rows: int, *, tail: bool) -> Plan:
    """Plans the tiles of `rows` sorted rows; with `tail`, also of the rows past the last group."""
    groups = group_sizes.shape[0]
    width = triton.next_power_of_2(groups + 1)
    capacity = plan_capacity(rows, groups, block_rows)
    table = launch.call(
        _plan_kernel, group_sizes,
        out_type=jax.ShapeDtypeStruct((2 + groups + 2 * capacity,), jnp.int32),
        grid=min(-(-rows // (8 * block_rows)), 64), num_warps=4, name="moe_plan",
        ROWS=rows, GROUPS=groups, WIDTH=width, CAPACITY=capacity, BLOCK_ROWS=block_rows,
        TAIL=tail,
    )  # fmt: skip
    return Plan(table, groups, capacity, block_rows)


def sort_by_expert(
    expert_ids: jax.Array, weights: jax.Array, experts: int, block_rows: int
) -> Sorted:
    """Sorts the slots of [T, K] `expert_ids` stably by expert; ids outside [0, E) come last."""
    tokens, top_k = expert_ids.shape
    slots = tokens * top_k
    width = triton.next_power_of_2(experts + 1)
    small = slots <= 4096
    block = 128 if small else max(256, triton.next_power_of_2(-(-slots // 128)))
    blocks = -(-slots // block)
    capacity = plan_capacity(slots, experts, block_rows)
    counts = None
    if not small:
        counts = launch.call(
            _count_kernel, expert_ids,
            out_type=jax.ShapeDtypeStruct((blocks, width), jnp.int32),
            grid=blocks, num_warps=4, name="moe_count",
            SLOTS=slots, EXPERTS=experts, WIDTH=width, BLOCK=block,
        )  # fmt: skip
    out = (
        jax.ShapeDtypeStruct((slots,), jnp.int32),
        jax.ShapeDtypeStruct((slots,), jnp.float32),
        jax.ShapeDtypeStruct((slots,), jnp.int32),
        jax.ShapeDtypeStruct((2 + experts + 2 * capacity,), jnp.int32),
    )
    row_token, row_weight, slot_row, table = launch.call(
        _place_kernel, expert_ids, weights, counts,
        out_type=out, grid=blocks, num_warps=8, name="moe_sort",
        SLOTS=slots, EXPERTS=experts, TOP_K=top_k, WIDTH=width, BLOCK=block,
        SUB=128, BLOCKS=blocks, CAPACITY=capacity, BLOCK_ROWS=block_rows,
        ALL=triton.next_power_of_2(slots), COUNTED=max(1, 8192 // width),
    )  # fmt: skip
    return Sorted(row_token, row_weight, slot_row, Plan(table, experts, capacity, block_rows))
