"""The fused FFN on one device of a mesh, inside ``shard_map``."""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from moe_flax.activations import Activation, resolve_activation
from moe_flax.experts import expert_ffn
from moe_flax.kernels.fused_ep.blocks import BlockSizes
from moe_flax.kernels.fused_ep.call import Call, Parameters
from moe_flax.kernels.fused_ep.cost import Layer, choose_method
from moe_flax.kernels.fused_ep.exchanged import exchanged
from moe_flax.kernels.fused_ep.rows import LANES, round_up
from moe_flax.permute import combine_rows, gather_rows, gather_slots, sort_by_expert
from moe_flax.routing import Routing
from moe_flax.varying import align_varying

MAX_ROW_BYTES = 2**30  # of a device's own rows in one exchange: semaphores count bytes in int32


def fused_ep_local(
    tokens: Float[Array, "t D"],
    wi: Shaped[Array, "L J D F"],
    wo: Shaped[Array, "L F D"],
    routing: Routing,
    *,
    axes: tuple[str, ...],
    activation: str | Activation = "silu",
    wi_scale: Float[Array, "..."] | None = None,
    wo_scale: Float[Array, "..."] | None = None,
    wi_bias: Float[Array, "L J F"] | None = None,
    wo_bias: Float[Array, "L D"] | None = None,
    block_sizes: BlockSizes | None = None,
    chip: str = "v6e",
    method: str = "auto",
    backend: str = "auto",
    interpret: tp.Any = False,
    traffic: bool = False,
) -> Float[Array, "t D"]:
    """One device's tokens through all experts of the axis; call it inside ``shard_map``.

    Args:
      tokens: the device's own tokens, [t, D], float32 or bfloat16; t is the same on all devices.
      wi: the device's own experts, [L, J, D, F].
      wo: [L, F, D].
      routing: of the device's tokens; ids count the experts of all P devices of ``axes``.
      axes: manual mesh axes that experts are split over.
      activation: a name or an Activation.
      wi_scale: scales of wi, as `moe_flax.quantize.dequantize` takes them.
      wo_scale: the same for wo.
      wi_bias: [L, J, F].
      wo_bias: [L, D].
      block_sizes: BlockSizes, or None for those that the VMEM model chooses.
      chip: a name of ``blocks.CHIPS``.
      method: "fused"; "replicated": all tokens everywhere and one reduce-scatter, for short
        batches; "auto": what the cost model predicts to be faster ("fused" in the interpreter).
      backend: of the grouped products of the backward pass and of "replicated".
      interpret: as for ``pallas_call``; True is Pallas' TPU interpreter.
      traffic: return int32 counts in the order of ``kernel.STATS`` instead.

    Returns:
      [t, D].
    """
    num_tokens, k = routing.expert_ids.shape
    activation = resolve_activation(activation)
    if method not in ("auto", "fused", "replicated"):
        raise ValueError(f"method must be 'auto', 'fused' or 'replicated', got {method!r}")
    if method == "auto" and not interpret and not traffic:
        method = choose_method(_layer(tokens, wi, k, jax.lax.axis_size(axes)), chip)
    if interpret is True:
        interpret = pltpu.InterpretParams()
    if method == "replicated":
        return _replicated(
            tokens,
            routing,
            axes,
            wi=wi,
            wo=wo,
            wi_scale=wi_scale,
            wo_scale=wo_scale,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            activation=activation,
            backend=backend,
        )
    call = Call(axes, activation, k, block_sizes, chip, backend, interpret, traffic)
    experts = wi.shape[0] * jax.lax.axis_size(axes)
    parameters = Parameters(wi, wo, wi_scale, wo_scale, wi_bias, wo_bias)
    tokens, ids, weights, *parameters = align_varying(
        tokens, routing.expert_ids, routing.weights, *parameters
    )
    parameters = Parameters(*parameters)
    row_bytes = 4 * round_up(tokens.shape[1], 2 * LANES)
    chunk = max(1, MAX_ROW_BYTES // (k * row_bytes))
    parts = []
    for start in range(0, num_tokens, chunk) or (0,):
        part = slice(start, start + chunk)
        permutation = sort_by_expert(ids[part], experts)
        rows = gather_rows(tokens[part], permutation)
        if routing.apply_to == "input":
            scale = gather_slots(weights[part], permutation)[:, None]
            rows = (rows.astype(jnp.float32) * scale).astype(tokens.dtype)
        counts = jax.lax.all_gather(permutation.group_sizes, axes)
        results = exchanged(call, rows, parameters, counts)
        if traffic:
            parts.append(results)
            continue
        slot_weights = None if routing.apply_to == "input" else weights[part]
        combined = combine_rows(results, slot_weights, permutation)
        parts.append(combined.astype(tokens.dtype))
    if traffic:
        return functools.reduce(jnp.add, parts)
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _layer(tokens: jax.Array, wi: jax.Array, k: int, devices: int) -> Layer:
    experts, branches, features, hidden = wi.shape
    return Layer(
        experts=experts * devices,
        k=k,
        features=features,
        hidden=hidden,
        devices=devices,
        tokens=tokens.shape[0],
        weight_bytes=wi.dtype.itemsize,
        branches=branches,
        row_bytes=tokens.dtype.itemsize,
    )


def _replicated(tokens, routing: Routing, axes, *, wi, **operands) -> jax.Array:
    """Every device sees all tokens and serves its own experts; the parts are summed home."""
    whole, ids, weights = (
        jax.lax.all_gather(x, axes, axis=0, tiled=True)
        for x in (tokens, routing.expert_ids, routing.weights)
    )
    local = wi.shape[0]
    ids = ids - jax.lax.axis_index(axes) * local
    ids = jnp.where((ids >= 0) & (ids < local), ids, local)
    here = Routing(ids, weights, apply_to=routing.apply_to)
    parts = expert_ffn(whole, wi, routing=here, **operands).astype(jnp.float32)
    return jax.lax.psum_scatter(parts, axes, scatter_dimension=0, tiled=True).astype(tokens.dtype)
