"""The CPU's path: groups one after another, each in tiles of rows, so nothing grows with G.

An outer loop visits the groups that have rows and copies the group's matrix once, in the layout
and dtype that the product wants; an inner loop multiplies its rows tile by tile. A tile that
reaches past its group's rows computes them for nothing and leaves the output there as it was.
Measured by benchmarks/grouped_matmul_cpu.py.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

_MIN_TILE, _MAX_TILE = 8, 128  # smaller tiles starve the product, larger ones waste short groups


def _tile_rows(rows: int, num_groups: int) -> int:
    """The power of two at or below the mean group, within bounds and within the rows."""
    mean = max(rows // num_groups, 1)
    return min(max(_MIN_TILE, min(_MAX_TILE, 2 ** (mean.bit_length() - 1))), rows)


def _for_each_group(group_sizes: jax.Array, body, carry):
    """Folds ``body(group, start, end, carry)`` over the groups that have rows, in order."""
    ends = jnp.cumsum(group_sizes)
    occupied = jnp.argsort(group_sizes == 0, stable=True)

    def visit(i, carry):
        group = occupied[i]
        return body(group, ends[group] - group_sizes[group], ends[group], carry)

    return lax.fori_loop(0, jnp.sum(group_sizes > 0, dtype=jnp.int32), visit, carry)


def _for_each_tile(start: jax.Array, end: jax.Array, rows: int, tile: int, body, carry):
    """Folds ``body(offset, inside, carry)`` over the tiles of rows [start, end).

    The last tile of all may not reach past the array, so it starts earlier; ``inside`` [tile, 1]
    says which of a tile's rows are the group's and have not been seen.
    """

    def visit(i, carry):
        first = start + i * tile
        offset = jnp.minimum(first, rows - tile)
        index = offset + jnp.arange(tile, dtype=jnp.int32)
        inside = (index >= first) & (index < end)
        return body(offset, inside[:, None], carry)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, visit, carry)


def _flat(x: jax.Array) -> jax.Array:
    """[M, J, K] as [M, J * K]."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    rows = lhs.shape[0]
    width = rhs.shape[-2] if transpose_rhs else rhs.shape[-1]
    shared = rhs.ndim == 4 and lhs.ndim == 2
    shape = (rows, rhs.shape[1], width) if shared else (rows, width)
    lhs = _flat(lhs)
    out = jnp.zeros_like(
        lhs, shape=(rows, shape[-1] * (shape[1] if shared else 1)), dtype=preferred_element_type
    )
    if out.size == 0 or lhs.size == 0:
        return out.reshape(shape)
    tile = _tile_rows(rows, rhs.shape[0])

    def matrix(group):  # [K, J * N] or [J * K, N]
        one = lax.dynamic_index_in_dim(rhs, group, keepdims=False).astype(sums)
        one = jnp.swapaxes(one, -1, -2) if transpose_rhs else one
        one = jnp.moveaxis(one, 0, 1) if shared else one
        return one.reshape(lhs.shape[1], out.shape[1])

    def multiply(group, start, end, out):
        weights = matrix(group)

        def step(offset, inside, out):
            part = lax.dynamic_slice_in_dim(lhs, offset, tile).astype(sums)
            new = jnp.dot(part, weights, preferred_element_type=sums)
            old = lax.dynamic_slice_in_dim(out, offset, tile)
            new = jnp.where(inside, new.astype(out.dtype), old)
            return lax.dynamic_update_slice_in_dim(out, new, offset, 0)

        return _for_each_tile(start, end, rows, tile, step, out)

    return _for_each_group(group_sizes, multiply, out).reshape(shape)


def row_contraction(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    rows = lhs.shape[0]
    branches = lhs.shape[1:-1] + grad.shape[1:-1]
    shape = (*branches, lhs.shape[-1], grad.shape[-1])
    shared = grad.ndim == 3
    lhs, grad = _flat(lhs), _flat(grad)
    out = jnp.zeros_like(lhs, shape=(group_sizes.shape[0], *shape), dtype=preferred_element_type)
    if out.size == 0 or rows == 0:
        return out
    tile = _tile_rows(rows, group_sizes.shape[0])
    nothing = jnp.zeros_like(lhs, shape=(lhs.shape[1], grad.shape[1]), dtype=sums)

    def contract(group, start, end, out):
        def step(offset, inside, total):
            left = jnp.where(inside, lax.dynamic_slice_in_dim(lhs, offset, tile), 0)
            right = jnp.where(inside, lax.dynamic_slice_in_dim(grad, offset, tile), 0)
            return total + jnp.dot(left.astype(sums).T, right.astype(sums))

        total = _for_each_tile(start, end, rows, tile, step, nothing)
        if shared:  # [K, J * N]
            total = jnp.moveaxis(total.reshape(shape[1], shape[0], shape[2]), 1, 0)
        total = total.reshape(shape).astype(out.dtype)
        return lax.dynamic_update_index_in_dim(out, total, group, 0)

    return _for_each_group(group_sizes, contract, out)
