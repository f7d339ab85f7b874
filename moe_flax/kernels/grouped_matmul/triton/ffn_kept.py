"""The routed half with quantised weights as they are stored: for batches that wait for weights."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.batching import one_by_one
from moe_flax.kernels.grouped_matmul.triton import calls, configs, ffn, kept, kept_hopper, launch
from moe_flax.kernels.grouped_matmul.triton.combine import combine, gather
from moe_flax.kernels.grouped_matmul.triton.pointwise import activation_parameters
from moe_flax.kernels.grouped_matmul.triton.sorting import Plan, sort_by_expert
from moe_flax.quantize import dequantize

_KINDS = ("int8", "float8_e4m3fn", "float8_e5m2")


def scales_kind(values: jax.Array, scales: jax.Array | None) -> str | None:
    """How the kernel applies the scales of matrices [.., N, K], or None where it has no way to.

    Returns:
      "channel" (one for each of N, or for each matrix), "block" (of 128 x 128) or "mxfp4" (32).
    """
    if scales is None or values.ndim != scales.ndim or values.shape[:-2] != scales.shape[:-2]:
        return None
    n, k = values.shape[-2:]
    given = scales.shape[-2:]
    if values.dtype == jnp.uint8:
        return "mxfp4" if k % 16 == 0 and given == (n, k // 16) else None
    if values.dtype.name not in _KINDS or not jnp.issubdtype(scales.dtype, jnp.floating):
        return None
    if given in ((n, 1), (1, 1)):
        return "channel"
    return "block" if given == (-(-n // 128), -(-k // 128)) else None


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed when the FFN is traced.

    Attributes:
      up, down: tiles of the two products, which share their rows.
      dense: of the gradients, which dequantise the weights ahead.
    """

    up: configs.Tiles
    down: configs.Tiles
    dense: ffn.Call


def make_call(
    activation: Activation, tokens, wi, wo, wi_scale, wo_scale, ids, tiles=None
) -> Call | None:
    """Chooses the tiles; None where to dequantise ahead is quicker or the only way.

    Args:
      activation: between the products.
      tokens: [T, D].
      wi, wo: [E, J, F, D] and [E, D, F] as they are stored; MXFP4 has two values in a byte.
      wi_scale, wo_scale: as `scales_kind` reads them.
      ids: [T, K].
      tiles: of both products, instead of the table's.
    """
    chip, rows = launch.chip(), ids.size
    experts, branches, hidden = wi.shape[:3]
    features = wo.shape[1]
    first, second = scales_kind(wi, wi_scale), scales_kind(wo, wo_scale)
    if first is None or second is None or not configs.keeps(rows, experts):
        return None
    allowed = (jnp.bfloat16,) if "mxfp4" in (first, second) else (jnp.bfloat16, jnp.float16)
    if tokens.dtype not in allowed:
        return None
    hopper = (
        chip.wgmma
        and tokens.dtype == jnp.bfloat16
        and all(weight.shape[-1] % 16 == 0 for weight in (wi, wo))
    )
    if tiles is None:
        tiles = configs.kept_tiles(chip, rows, experts, (first, second), branches, hopper)
    up, down = tiles
    wide = jax.ShapeDtypeStruct((experts, branches, hidden, features), tokens.dtype)
    return Call(up, down, ffn.make_call(activation, tokens, wide, ids, transposed=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def routed_ffn(call: Call, tokens, wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights):
    """As `ffn.routed_ffn`, with the operands of `make_call`; no gradient by integer values."""
    run = one_by_one(functools.partial(_infer, call))
    return run(tokens, wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights)


def _infer(call, tokens, wi, wo, wi_scale, wo_scale, wi_bias, wo_bias, ids, weights):
    order = sort_by_expert(ids, weights, wi.shape[0], call.up.rows)
    rows, index, then = tokens, order.row_token, None
    if call.up.specialised:
        rows, index = _gather(tokens, order.row_token, wi.dtype == jnp.uint8), None
        then = wo.dtype == jnp.uint8
    hidden = product(
        rows, wi, wi_scale, order.plan, ids.size, tiles=call.up, gather=index, bias=wi_bias,
        activation=call.dense.activation, then=then,
    )  # fmt: skip
    bias = None if wo_bias is None else wo_bias[:, None]
    values = product(
        hidden, wo[:, None], wo_scale[:, None], order.plan, ids.size, tiles=call.down, bias=bias
    )
    return combine(values.reshape(ids.size, -1), weights, order.slot_row, ids.shape[1])


def _gather(tokens: jax.Array, row_token: jax.Array, mxfp4: bool) -> jax.Array:
    """The tokens' rows in their sorted places, as `kept_hopper.reorder` has them."""
    slices = kept_hopper.reorder(tokens, mxfp4)
    count, size = slices.shape[:2]
    index = jnp.arange(count, dtype=jnp.int32)[:, None] * size + row_token
    return gather(slices.reshape(-1, 64), index.ravel()).reshape(count, -1, 64)


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    scales: jax.Array,
    plan: Plan,
    rows: int,
    *,
    tiles: configs.Tiles,
    gather: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
    then: bool | None = None,
) -> jax.Array:
    """One grouped product over sorted rows with kept matrices.

    Args:
      lhs: [rows or T, K]; with `tiles.specialised` [K / 64, rows, 64] by `kept_hopper.reorder`.
      rhs: [G, J, N, K] or, of MXFP4, [G, J, N, K / 2].
      scales: as `scales_kind` reads them.
      plan: of the rows, with tiles of `tiles.rows` rows.
      rows: rows of the result.
      tiles: the configuration.
      gather: [rows] int32, the row of lhs that each row reads.
      bias: [G, J, N].
      activation: fused behind the product.
      then: with `tiles.specialised`, the next product's matrices are MXFP4 or not: the result is
        as `kept_hopper.reorder` would make it for these.

    Returns:
      [rows, J, N]; [rows, N], or as `then` says, with an activation. Rows past the last group
      stay unwritten.
    """
    groups, branches, n = rhs.shape[:3]
    kind = scales_kind(rhs, scales)
    k = rhs.shape[3] * (2 if kind == "mxfp4" else 1)
    if kind == "channel":
        scales = jnp.broadcast_to(scales, (groups, branches, n, 1))
    if kind != "mxfp4":
        scales = scales.astype(jnp.float32)
    elif scales.dtype == jnp.float8_e8m0fnu:
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    fused = activation is not None
    width = n if then is None else -(-n // kept_hopper.depth(then)) * kept_hopper.depth(then)
    out = jax.ShapeDtypeStruct((rows, n) if fused else (rows, branches, n), lhs.dtype)
    if then is not None:
        out = jax.ShapeDtypeStruct((width // 64, rows, 64), lhs.dtype)
    column_tiles = -(-width // tiles.columns) * (1 if fused else branches)
    programs = min(launch.chip().multiprocessors * tiles.programs, plan.capacity * column_tiles)
    common: dict[str, tp.Any] = dict(
        out_type=out, grid=programs, num_warps=tiles.warps, name=f"moe_kept_{kind}",
        ROWS=rows, K=k, N=n, GROUPS=groups, CAPACITY=plan.capacity, BRANCHES=branches,
        EPILOGUE="activate" if fused else "plain", SCALES=kind, SPAN=tiles.span,
        PROGRAMS=programs, BLOCK_M=tiles.rows, BLOCK_N=tiles.columns,
        **activation_parameters(activation or Activation()),
    )  # fmt: skip
    if tiles.specialised:
        return launch.call(
            kept_hopper.kept_hopper_kernel,
            *_hopper_operands(
                lhs, rhs, tiles, branches if fused else 1, kept_hopper.depth(kind == "mxfp4") // 64
            ),
            scales, bias, plan.table, WIDTH=width, STAGES=tiles.stages,
            REORDERED="" if then is None else "4" if then else "8", **common,
        )  # fmt: skip
    flat = rhs.reshape(groups * branches, *rhs.shape[2:])
    if flat.dtype == jnp.float8_e4m3fn and launch.chip().capability < 89:
        flat = jax.lax.bitcast_convert_type(flat, jnp.uint8)
    depth = tiles.depth // 2 if kind == "mxfp4" else tiles.depth
    descriptor = calls._descriptor(flat, (1, tiles.columns, depth))
    return launch.call(
        kept.kept_product_kernel, lhs, descriptor or flat, scales, bias, gather, plan.table,
        num_stages=tiles.stages, DESCRIPTOR=descriptor is not None, BLOCK_K=tiles.depth,
        **common,
    )  # fmt: skip


def _hopper_operands(lhs, rhs, tiles, matrices, slices):
    import jax_triton
    from triton.experimental.gluon import language as gl

    flat = rhs.reshape(-1, *rhs.shape[2:])
    return (
        jax_triton.TensorDescriptor.from_array(
            lhs, (slices, tiles.rows, 64), gl.NVMMASharedLayout(128, 16, 3)
        ),
        jax_triton.TensorDescriptor.from_array(
            flat, (matrices, tiles.columns, 128), gl.NVMMASharedLayout(128, 8, 3)
        ),
    )


def _forward(call, *operands):
    return routed_ffn(call, *operands), operands


def _backward(call, operands, grad):
    names = ("tokens", "wi", "wo", "wi_scale", "wo_scale", "wi_bias", "wo_bias", "ids", "weights")
    given = dict(zip(names, operands, strict=True))
    floats = {
        n: x
        for n, x in given.items()
        if x is not None and n != "ids" and x.dtype not in (jnp.uint8, jnp.int8)
    }
    floats = {n: x for n, x in floats.items() if x.dtype != jnp.float8_e8m0fnu}

    def dense(floats):
        all_of = given | floats
        dtype = given["tokens"].dtype
        wi = dequantize(all_of["wi"], all_of["wi_scale"]).astype(dtype)
        wo = dequantize(all_of["wo"], all_of["wo_scale"]).astype(dtype)
        return ffn.routed_ffn(
            call.dense, all_of["tokens"], wi, wo, all_of["wi_bias"], all_of["wo_bias"],
            given["ids"], all_of["weights"],
        )  # fmt: skip

    _, pull = jax.vjp(dense, floats)
    found = pull(grad)[0]
    return tuple(found.get(n) for n in names)


routed_ffn.defvjp(_forward, _backward)
