"""Grouped products and the whole expert FFN in Triton, for NVIDIA GPUs from compute capability 8.0.

The functions are those of `moe_flax.kernels.grouped_matmul.api.Backend`, and `expert_ffn`, which
`moe_flax.expert_ffn` calls instead of putting products together. Triton itself is imported by the
modules that hold kernels, at the first call.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_flax.kernels.grouped_matmul import xla
from moe_flax.kernels.grouped_matmul.scaled import scale_product
from moe_flax.quantize import dequantize

_KERNEL_DTYPES = ("bfloat16", "float16", "float32")


def _matrices(rhs: jax.Array) -> jax.Array:
    return rhs if rhs.ndim == 4 else rhs[:, None]


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`; float64 goes by XLA."""
    if jnp.dtype(lhs.dtype).name not in _KERNEL_DTYPES:
        return xla.grouped_product(lhs, rhs, group_sizes, transpose_rhs, preferred_element_type)
    from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch, sorting

    rows, groups = lhs.shape[0], rhs.shape[0]
    n, k = rhs.shape[-2:] if transpose_rhs else rhs.shape[:-3:-1]
    branched = rhs.ndim == 4 and lhs.ndim == 2
    if rows == 0 or groups == 0:
        shape = (rows, rhs.shape[1], n) if branched else (rows, n)
        return jnp.zeros(shape, preferred_element_type)
    kind = "summed" if lhs.ndim == 3 else "transposed" if transpose_rhs else "product"
    branches = rhs.shape[1] if rhs.ndim == 4 else 1
    shape = configs.Shape(kind, rows, groups, k, n, lhs.dtype.itemsize, branches)
    tiles, _ = configs.choose(launch.chip(), shape)
    if lhs.ndim == 3 and not transpose_rhs and tiles.specialised:
        tiles = configs.Tiles(128, 256, 64, 8, 4)
    plan = sorting.make_plan(group_sizes, rows, tiles.rows, tail=True)
    out = calls.product(
        lhs, _matrices(rhs), plan, rows, tiles=tiles, transposed=transpose_rhs,
        out_dtype=preferred_element_type,
    )  # fmt: skip
    return out if branched else out.reshape(rows, n)


def scaled_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.scaled.scale_product`."""
    from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch, sorting

    rows, groups = lhs.shape[0], rhs.shape[0]
    if not (transpose_rhs and launch.chip().float8) or 0 in (rows, *rhs.shape):
        return scale_product(
            grouped_product, lhs, rhs, group_sizes, lhs_scale, rhs_scale, transpose_rhs,
            preferred_element_type,
        )  # fmt: skip
    n, k = rhs.shape[-2:]
    tiles = configs.float8_tiles(launch.chip(), rows, groups, k, n)
    plan = sorting.make_plan(group_sizes, rows, tiles.rows, tail=True)
    out = calls.product(
        lhs, _matrices(rhs), plan, rows, tiles=tiles, transposed=True,
        out_dtype=preferred_element_type, scales=(lhs_scale, rhs_scale),
    )  # fmt: skip
    return out if rhs.ndim == 4 else out.reshape(rows, n)


def row_contraction(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`; float64 goes by XLA."""
    if jnp.dtype(lhs.dtype).name not in _KERNEL_DTYPES:
        return xla.row_contraction(lhs, grad, group_sizes, preferred_element_type)
    from moe_flax.kernels.grouped_matmul.triton import calls, configs, launch, sorting

    plan = sorting.make_plan(group_sizes, max(lhs.shape[0], 1), 128, tail=False)
    k, n = lhs.shape[-1], grad.shape[-1]
    branches = max(lhs.shape[1] if lhs.ndim == 3 else 1, grad.shape[1] if grad.ndim == 3 else 1)
    shape = configs.Shape(
        "contraction", lhs.shape[0], group_sizes.shape[0], k, n, lhs.dtype.itemsize, branches
    )
    tiles, _ = configs.choose(launch.chip(), shape)
    return calls.contraction(lhs, grad, plan, tiles=tiles, out_dtype=preferred_element_type)


def expert_ffn(
    tokens,
    wi,
    wo,
    routing,
    *,
    activation,
    wi_bias,
    wo_bias,
    wi_scale,
    wo_scale,
    transpose_weights,
    precision,
) -> jax.Array:
    """The routed half in one call with its own gradient; see `moe_flax.expert_ffn`.

    Transposed quantised weights are read as they are stored where batches are small; the rest is
    dequantised ahead of the products.
    """
    from moe_flax.kernels.grouped_matmul.triton import calls, ffn, ffn_kept

    kept = (wi, wo, wi_scale, wo_scale)
    wi = wi if wi_scale is None else dequantize(wi, wi_scale).astype(tokens.dtype)
    wo = wo if wo_scale is None else dequantize(wo, wo_scale).astype(tokens.dtype)
    dtype = jnp.result_type(tokens, wi, wo)
    if dtype.name not in _KERNEL_DTYPES:
        from moe_flax.experts import sorted_ffn

        return sorted_ffn(
            tokens, wi, wo, routing, activation=activation, wi_bias=wi_bias, wo_bias=wo_bias,
            wi_scale=None, wo_scale=None, transpose_weights=transpose_weights,
            precision=precision, backend="xla",
        )  # fmt: skip
    if 0 in (tokens.size, wi.size):
        return jnp.zeros_like(tokens)
    rows, ids = tokens.astype(dtype), routing.expert_ids.astype(jnp.int32)
    weights = routing.weights.astype(jnp.float32)
    top_k = ids.shape[1]
    if routing.apply_to == "input":
        placed = (ids >= 0) & (ids < wi.shape[0])
        scaled = tokens[:, None].astype(jnp.float32) * weights[:, :, None]
        rows = jnp.where(placed[:, :, None], scaled, 0).reshape(-1, tokens.shape[1]).astype(dtype)
        ids, weights = ids.reshape(-1, 1), jnp.ones((ids.size, 1), jnp.float32)
    with jax.default_matmul_precision(precision):
        call = ffn.make_call(activation, rows, wi, ids, calls.dot_precision(), transpose_weights)
    kept_call = ffn_kept.make_call(activation, rows, *kept, ids) if transpose_weights else None
    biases = [None if b is None else b.astype(jnp.float32) for b in (wi_bias, wo_bias)]
    if kept_call is not None:
        y = ffn_kept.routed_ffn(kept_call, rows, *kept, *biases, ids, weights)
    else:
        matrices = (wi.astype(dtype), wo.astype(dtype))
        y = ffn.routed_ffn(call, rows, *matrices, *biases, ids, weights)
    y = jnp.asarray(y)
    if routing.apply_to == "input":
        y = y.reshape(-1, top_k, tokens.shape[1]).astype(jnp.float32).sum(1)
    return y.astype(tokens.dtype)


def expert_ffn_float8(tokens, wi, wo, routing, **options) -> jax.Array:
    """The routed half with float8 activations; see `moe_flax.experts_float8.float8_ffn`.

    GPUs that have no float8 products multiply the values as bfloat16.
    """
    from moe_flax.kernels.grouped_matmul.triton import ffn_float8, launch

    if not launch.chip().float8:
        from moe_flax.experts_float8 import sorted_float8_ffn

        return sorted_float8_ffn(
            tokens, wi, wo, routing, **options, precision=None, backend="triton"
        )
    return ffn_float8.expert_ffn(tokens, wi, wo, routing, **options)
