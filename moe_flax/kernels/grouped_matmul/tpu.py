"""The backend for TPU: JAX's megablox kernels for bfloat16, XLA's ragged products for the rest.

Both go one branch after another, two at most. docs/performance_tpu.md has the schedules of both.
"""

import functools
import math
import operator
import typing as tp

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_flax.kernels.grouped_matmul import xla

_LANES = 128
_VMEM_BYTES = 13 * 2**20  # of the 16 MiB that a kernel has by default; the rest is the compiler's


def grouped_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
) -> jax.Array:
    """See `moe_flax.kernels.grouped_matmul.api.Backend`."""
    if rhs.ndim == 3:
        return _product(lhs, rhs, group_sizes, transpose_rhs, preferred_element_type)
    sums = jnp.promote_types(lhs.dtype, jnp.float32)
    shared = lhs.ndim == 2
    parts = [
        _product(
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
        _contraction, group_sizes=group_sizes, preferred_element_type=preferred_element_type
    )
    if lhs.ndim == 3:
        return jnp.stack([contract(lhs[:, j], grad) for j in range(lhs.shape[1])], axis=1)
    if grad.ndim == 3:
        return jnp.stack([contract(lhs, grad[:, j]) for j in range(grad.shape[1])], axis=1)
    return contract(lhs, grad)


def _product(lhs, rhs, group_sizes, transpose_rhs, preferred_element_type) -> jax.Array:
    """[M, K] x [G, K, N], or [G, N, K]."""

    def fallback(lhs, rhs, group_sizes):
        return xla.grouped_product(lhs, rhs, group_sizes, transpose_rhs, preferred_element_type)

    if not _has_kernels(lhs, rhs):
        return fallback(lhs, rhs, group_sizes)

    def kernel(lhs, rhs, group_sizes, interpret=False):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        n, k = rhs.shape[1:] if transpose_rhs else rhs.shape[:0:-1]
        tiling = product_tiling(lhs.shape[0], rhs.shape[0], k, n)
        out = gmm(
            _whole_tiles(lhs, tiling[0]),
            rhs,
            group_sizes,
            jnp.dtype(preferred_element_type),
            tiling,
            transpose_rhs=transpose_rhs,
            interpret=interpret,
        )  # rows past the end hold whatever memory held
        return xla.mask_rows(out[: lhs.shape[0]], group_sizes)

    return _by_platform(kernel, fallback, lhs, rhs, group_sizes)


def _contraction(lhs, grad, group_sizes, preferred_element_type) -> jax.Array:
    """[M, K] x [M, N] -> [G, K, N]."""

    def fallback(lhs, grad, group_sizes):
        return xla.row_contraction(lhs, grad, group_sizes, preferred_element_type)

    if not _has_kernels(lhs, grad):
        return fallback(lhs, grad, group_sizes)

    def kernel(lhs, grad, group_sizes, interpret=False):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        tiling = contraction_tiling(lhs.shape[0], group_sizes.shape[0], lhs.shape[1], grad.shape[1])
        return tgmm(  # it masks rows past the end, and writes zeros for groups without rows
            _whole_tiles(lhs, tiling[0]).swapaxes(0, 1),
            _whole_tiles(grad, tiling[0]),
            group_sizes,
            jnp.dtype(preferred_element_type),
            tiling,
            interpret=interpret,
        )

    return _by_platform(kernel, fallback, lhs, grad, group_sizes)


def _by_platform(kernel: tp.Callable, fallback: tp.Callable, *operands: jax.Array) -> jax.Array:
    """The kernel where the program is lowered for TPU, XLA elsewhere."""
    return jax.lax.platform_dependent(*operands, tpu=kernel, default=fallback)


def _has_kernels(lhs: jax.Array, other: jax.Array) -> bool:
    """Whether megablox takes the operands, where they are.

    It multiplies bfloat16 in one pass. XLA cannot split its kernels over devices, so they need
    one device or a `shard_map` over all axes, whose types say nothing of what varies.
    """
    if lhs.dtype != jnp.bfloat16 or other.dtype != jnp.bfloat16 or 0 in (*lhs.shape, *other.shape):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    alone = jax.device_count() == 1 if mesh.empty else mesh.size == 1
    inside = not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)
    varying = any(jax.typeof(x).manual_axis_type.varying for x in (lhs, other))
    return (alone or inside) and not varying


def _whole_tiles(x: jax.Array, rows: int) -> jax.Array:
    """Rows up to a multiple of ``rows``; what is added lies past the last group."""
    return jnp.pad(x, ((0, -x.shape[0] % rows), (0, 0)))


def _parts(size: int, most: int) -> list[int]:
    """Block widths for an axis, the widest first: whole lanes, as even as can be."""
    whole = -(-size // _LANES) * _LANES
    counts = range(-(-whole // most), whole // _LANES + 1)
    return list(dict.fromkeys(-(-whole // count // _LANES) * _LANES for count in counts))


def _height(rows: int, groups: int, most: int) -> int:
    """Rows of a tile: an average group in one, as far as it goes."""
    average = rows / groups
    return max(h for h in (128, 256, 512) if h == 128 or h <= min(most, 1.34 * average))


def product_tiling(rows: int, groups: int, k: int, n: int) -> tuple[int, int, int]:
    """megablox' (rows, k, n) for a product: all of k if it fits, so that sums stay in place."""
    height = _height(rows, groups, 256)
    for depth in _parts(k, 4096):
        for width in _parts(n, 1024):
            operands = 2 * (height * depth + depth * width + height * width) * 2
            if operands + 4 * height * width <= _VMEM_BYTES and (width >= 512 or width >= n):
                return height, depth, width
    return height, min(_parts(k, 512)[0], 512), min(_parts(n, 512)[0], 512)


def contraction_tiling(rows: int, groups: int, k: int, n: int) -> tuple[int, int, int]:
    """megablox' (rows, k, n) for a contraction over rows: as much of [k, n] as fits."""
    height = _height(rows, groups, 512)
    fitting = [
        (height, depth, width)
        for depth in _parts(k, 1024)
        for width in _parts(n, 1024)
        if 4 * height * (depth + width) + 12 * depth * width <= _VMEM_BYTES
    ]
    return max(fitting, key=lambda tiling: math.prod(tiling))
