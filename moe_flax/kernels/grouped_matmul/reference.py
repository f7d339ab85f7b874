"""The plain reference, for tests and small sizes: every row beside its own matrix."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def _row_groups(group_sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each row; G for rows past the end."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows), side="right")


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`. Takes M * K * N memory."""
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    groups = _row_groups(group_sizes, lhs.shape[0])
    matrices = jnp.swapaxes(rhs, -1, -2) if transpose_rhs else rhs
    matrices = matrices.astype(sums)[jnp.minimum(groups, rhs.shape[0] - 1)]
    lhs_axes = "mjk" if lhs.ndim == 3 else "mk"
    rhs_axes = "mjkn" if rhs.ndim == 4 else "mkn"
    out_axes = "mjn" if rhs.ndim == 4 and lhs.ndim == 2 else "mn"
    out = jnp.einsum(f"{lhs_axes},{rhs_axes}->{out_axes}", lhs.astype(sums), matrices)
    inside = (groups < rhs.shape[0]).reshape((-1,) + (1,) * (out.ndim - 1))
    return jnp.where(inside, out, 0).astype(preferred_element_type)


def row_contraction(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`. Takes G * M * (K + N) memory."""
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    groups = _row_groups(group_sizes, lhs.shape[0])

    def spread(x):  # [M, ...] -> [G, M, ...], other groups' rows 0
        mine = groups == jnp.arange(group_sizes.shape[0])[:, None]
        return jnp.where(mine.reshape(mine.shape + (1,) * (x.ndim - 1)), x.astype(sums), 0)

    lhs_axes = "gmjk" if lhs.ndim == 3 else "gmk"
    grad_axes = "gmjn" if grad.ndim == 3 else "gmn"
    out_axes = "gkn" if lhs.ndim == grad.ndim == 2 else "gjkn"
    out = jnp.einsum(f"{lhs_axes},{grad_axes}->{out_axes}", spread(lhs), spread(grad))
    return out.astype(preferred_element_type)
