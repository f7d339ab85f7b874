"""Bringing expert rows back to their tokens: a sum over K in a fixed order, in float32."""

# Checkers take `import triton` for this package.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

import jax
import triton
import triton.language as tl

from moe_flax.kernels.grouped_matmul.triton import launch


@triton.jit
def combine_kernel(
    values_ptr, weights_ptr, slot_row_ptr, out_ptr,
    TOP_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t] = sum_k weights[t, k] * values[slot_row[t, k]], k in order, no atomics."""
    token = tl.program_id(0).to(tl.int64)
    ds = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = ds < D
    acc = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(slot_row_ptr + token * TOP_K + k).to(tl.int64)
        x = tl.load(values_ptr + row * D + ds, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token * TOP_K + k)
            x = tl.where(row >= 0, x * weight, 0.0)
        acc += x
    tl.store(out_ptr + token * D + ds, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gather_kernel(
    values_ptr, rows_ptr, out_ptr,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[r] = values[rows[r]]."""
    rs = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    sources = tl.load(rows_ptr + rs, mask=rs < ROWS, other=0).to(tl.int64)
    for d in tl.range(0, D, BLOCK_D, num_stages=3):
        ds = d + tl.arange(0, BLOCK_D)
        mask = (rs < ROWS)[:, None] & (ds < D)[None, :]
        x = tl.load(values_ptr + sources[:, None] * D + ds[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + rs[:, None] * D + ds[None, :], x, mask=mask)


def combine(
    values: jax.Array, weights: jax.Array | None, slot_row: jax.Array, top_k: int
) -> jax.Array:
    """Sums each token's rows of values [R, D], weighted by [T, K] where given: [T, D]."""
    tokens, features = slot_row.size // top_k, values.shape[1]
    block = min(triton.next_power_of_2(features), 2048)
    return launch.call(
        combine_kernel, values, weights, slot_row,
        out_type=jax.ShapeDtypeStruct((tokens, features), values.dtype),
        grid=(tokens, -(-features // block)), num_warps=4 if block <= 1024 else 8,
        name="moe_combine", TOP_K=top_k, D=features, BLOCK_D=block,
    )  # fmt: skip


def gather(values: jax.Array, rows: jax.Array) -> jax.Array:
    """values [T, D] at rows [R]: [R, D]."""
    count, features = rows.shape[0], values.shape[1]
    block = min(triton.next_power_of_2(features), 512)
    height = min(2048 // block, 32)
    return launch.call(
        gather_kernel, values, rows,
        out_type=jax.ShapeDtypeStruct((count, features), values.dtype),
        grid=-(-count // height), num_warps=4, name="moe_gather",
        ROWS=count, D=features, BLOCK_R=height, BLOCK_D=block,
    )  # fmt: skip
