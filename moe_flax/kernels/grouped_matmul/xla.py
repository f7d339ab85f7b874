"""XLA's own ragged product, for chips without a kernel of ours; on CPU it does G times the work."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def mask_rows(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Zeroes the rows past the end, which XLA's kernels may read or leave unwritten."""
    inside = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(inside.reshape((-1,) + (1,) * (x.ndim - 1)), x, 0)


def _ragged_dot(lhs, rhs, group_sizes, contracting, rhs_group_dimensions, dtype) -> jax.Array:
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=rhs_group_dimensions,
    )
    out = jax.lax.ragged_dot_general(lhs, rhs, group_sizes, dimensions, preferred_element_type=sums)
    return out.astype(dtype)


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    rhs_axis = rhs.ndim - 1 if transpose_rhs else rhs.ndim - 2
    contracting = ((1, 2), (1, rhs_axis)) if lhs.ndim == 3 else ((1,), (rhs_axis,))
    out = _ragged_dot(lhs, rhs, group_sizes, contracting, [0], preferred_element_type)
    return mask_rows(out, group_sizes)


def row_contraction(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    lhs, grad = mask_rows(lhs, group_sizes), mask_rows(grad, group_sizes)
    out = _ragged_dot(lhs, grad, group_sizes, ((0,), (0,)), [], preferred_element_type)
    return jnp.moveaxis(out, 2, 1) if grad.ndim == 3 else out
