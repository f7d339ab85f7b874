"""The backend for TPU: XLA's ragged products, one for each branch.

XLA has a kernel for a ragged product of two axes by three, and for a contraction over ragged rows;
with a branch axis in the matrices it falls back to one dense product a group, G times the work.
So the branches, two at most, go one by one.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_flax.kernels.grouped_matmul import xla


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    if rhs.ndim == 3:
        return xla.grouped_product(lhs, rhs, group_sizes, transpose_rhs, preferred_element_type)
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    shared = lhs.ndim == 2
    parts = [
        xla.grouped_product(
            lhs if shared else lhs[:, branch],
            rhs[:, branch],
            group_sizes,
            transpose_rhs,
            preferred_element_type if shared else sums,
        )
        for branch in range(rhs.shape[1])
    ]
    if shared:
        return jnp.stack(parts, axis=1)
    return functools.reduce(operator.add, parts).astype(preferred_element_type)


def row_contraction(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    contract = functools.partial(
        xla.row_contraction,
        group_sizes=group_sizes,
        preferred_element_type=preferred_element_type,
    )
    if lhs.ndim == 3:
        return jnp.stack([contract(lhs[:, j], grad) for j in range(lhs.shape[1])], axis=1)
    if grad.ndim == 3:
        return jnp.stack([contract(lhs, grad[:, j]) for j in range(grad.shape[1])], axis=1)
    return contract(lhs, grad)
