"""The routed half of a MoE layer on one device: rows to their experts' FFN and back."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from moe_flax.activations import Activation, resolve_activation
from moe_flax.experts_float8 import check_float8, float8_ffn
from moe_flax.kernels.backend import resolve_backend
from moe_flax.kernels.grouped_matmul.api import grouped_matmul, load_backend
from moe_flax.permute import combine_rows, gather_rows, gather_slots, sort_by_expert
from moe_flax.quantize import dequantize
from moe_flax.routing import Routing
from moe_flax.varying import align_varying

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_AXES, _TRANSPOSED_AXES = ("[E, J, D, F]", "[E, F, D]"), ("[E, J, F, D]", "[E, D, F]")


def expert_ffn(
    tokens: Float[Array, "T D"],
    wi: Shaped[Array, "E J D F"],
    wo: Shaped[Array, "E F D"],
    routing: Routing,
    *,
    activation: str | Activation = "silu",
    wi_bias: Float[Array, "E J F"] | None = None,
    wo_bias: Float[Array, "E D"] | None = None,
    wi_scale: Float[Array, "..."] | None = None,
    wo_scale: Float[Array, "..."] | None = None,
    transpose_weights: bool = False,
    act_qtype: DTypeLike | None = None,
    scale_ub: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
) -> Float[Array, "T D"]:
    """Sends each token through its K experts and sums what they return.

    Expert e computes ``activation(x @ wi[e] + wi_bias[e]) @ wo[e] + wo_bias[e]``. Slots whose id
    is outside [0, E) add nothing, whatever the token and the weight hold; a NaN token spoils its
    own output only. Products, activation and combine are float32 inside; what passes between them
    has the promoted dtype of tokens and weights. Differentiable in tokens, weights of the routing,
    wi, wo, biases and scales.

    With ``act_qtype=float8_e4m3fn`` token rows and hidden rows are quantised too, one scale a row
    (`moe_flax.quantize.quantize_rows`), and multiplied as float8 with weights that are; forward
    only. NVIDIA GPUs from compute capability 8.9 have such products; the rest gives the same
    numbers by bfloat16 products.

    Args:
      tokens: [T, D].
      wi: [E, J, D, F]; J is 2 (gate 0, up 1), or 1 without a gate.
      wo: [E, F, D].
      routing: expert_ids [T, K], weights [T, K], and whether these multiply output or input.
      activation: a name or an Activation; "gpt_oss", and any with an up_offset, needs J = 2.
      wi_bias: [E, J, F] or None.
      wo_bias: [E, D] or None; the routing weight multiplies it as it does the product.
      wi_scale: where wi is quantised, scales that `moe_flax.quantize.dequantize` takes.
      wo_scale: the same for wo.
      transpose_weights: wi is [E, J, F, D] and wo [E, D, F], scales alike. MXFP4, two values in a
        uint8 along the last axis, needs it.
      act_qtype: None leaves activations as they are. float8_e4m3fn quantises them, and needs
        transposed float8_e4m3fn weights with wi_scale [E, J, F, 1] and wo_scale [E, D, 1].
      scale_ub: with ``act_qtype``, the largest magnitude that a row's scale allows for.
      precision: of the products, as in ``jax.numpy.matmul``.
      backend: as for `moe_flax.grouped_matmul`.

    Returns:
      [T, D] in the dtype of tokens.

    Raises:
      ValueError: shapes that do not fit, or a backend that is unknown or cannot run.
      TypeError: dtypes that are not allowed, or a gradient with ``act_qtype``.
    """
    activation = resolve_activation(activation)
    check_float8(wi, wo, wi_scale, wo_scale, transpose_weights, act_qtype, scale_ub)
    _check(
        tokens, wi, wo, routing, activation, wi_bias, wo_bias, wi_scale, wo_scale, transpose_weights
    )
    name = resolve_backend(backend)
    tokens, wi, wo, ids, weights, wi_bias, wo_bias, wi_scale, wo_scale = align_varying(
        tokens, wi, wo, routing.expert_ids, routing.weights, wi_bias, wo_bias, wi_scale, wo_scale
    )
    routing = Routing(ids, weights, apply_to=routing.apply_to)
    if act_qtype is not None:
        return float8_ffn(
            tokens, wi, wo, routing, activation=activation, wi_bias=wi_bias, wo_bias=wo_bias,
            wi_scale=wi_scale, wo_scale=wo_scale, scale_ub=scale_ub, precision=precision,
            backend=name,
        )  # fmt: skip
    whole = getattr(load_backend(name), "expert_ffn", None) or functools.partial(
        sorted_ffn, backend=name
    )
    return whole(
        tokens,
        wi,
        wo,
        routing,
        activation=activation,
        wi_bias=wi_bias,
        wo_bias=wo_bias,
        wi_scale=wi_scale,
        wo_scale=wo_scale,
        transpose_weights=transpose_weights,
        precision=precision,
    )


def sorted_ffn(
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
    backend,
) -> jax.Array:
    """Sort, two grouped products, combine: for backends that have only the products."""
    wi = wi if wi_scale is None else dequantize(wi, wi_scale).astype(tokens.dtype)
    wo = wo if wo_scale is None else dequantize(wo, wo_scale).astype(tokens.dtype)
    dtype = jnp.result_type(tokens, wi, wo)
    permutation = sort_by_expert(routing.expert_ids, wi.shape[0])
    product = functools.partial(
        grouped_matmul, group_sizes=permutation.group_sizes, precision=precision, backend=backend
    )

    rows = gather_rows(tokens, permutation)
    if routing.apply_to == "input":
        scale = gather_slots(routing.weights, permutation)[:, None]
        rows = rows.astype(jnp.promote_types(dtype, jnp.float32)) * scale
    hidden = product(rows.astype(dtype), wi.astype(dtype), transpose_rhs=transpose_weights)
    if wi_bias is not None:
        hidden = _add_bias(hidden, wi_bias, product, permutation)
    hidden = _activate(activation, hidden)
    rows = product(hidden, wo.astype(dtype), transpose_rhs=transpose_weights)
    if wo_bias is not None:
        rows = _add_bias(rows, wo_bias, product, permutation)
    weights = None if routing.apply_to == "input" else routing.weights
    return combine_rows(rows, weights, permutation).astype(tokens.dtype)


@functools.partial(jax.checkpoint, static_argnums=(0,))  # keeps one array, not each step's
def _activate(activation: Activation, hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    return activation(wide).astype(hidden.dtype)


def _add_bias(rows: jax.Array, bias: jax.Array, product, permutation) -> jax.Array:
    """Adds each row's expert's bias: the bias' gradient is a grouped product, not a scatter."""
    ones = jnp.ones_like(rows, shape=(rows.shape[0], 1))
    return rows + product(ones, jnp.expand_dims(bias, -2).astype(rows.dtype))


def expert_ffn_reference(
    tokens: Float[Array, "T D"],
    wi: Shaped[Array, "E J D F"],
    wo: Shaped[Array, "E F D"],
    routing: Routing,
    *,
    activation: str | Activation = "silu",
    wi_bias: Float[Array, "E J F"] | None = None,
    wo_bias: Float[Array, "E D"] | None = None,
    wi_scale: Float[Array, "..."] | None = None,
    wo_scale: Float[Array, "..."] | None = None,
    transpose_weights: bool = False,
) -> Float[Array, "T D"]:
    """`expert_ffn` written plainly: every token through every expert, in float32.

    For tests and small sizes. float64 operands are computed in float64.
    """
    activation = resolve_activation(activation)
    wi = wi if wi_scale is None else dequantize(wi, wi_scale)
    wo = wo if wo_scale is None else dequantize(wo, wo_scale)
    if transpose_weights:
        wi, wo = wi.swapaxes(-1, -2), wo.swapaxes(-1, -2)
    dtype = jnp.promote_types(tokens.dtype, jnp.float32)
    x, wi, wo = (a.astype(dtype) for a in (tokens, wi, wo))
    chosen = routing.expert_ids[:, :, None] == jnp.arange(wi.shape[0])  # [T, K, E]
    weights = jnp.where(chosen, routing.weights[:, :, None].astype(dtype), 0).sum(axis=1)
    chosen = chosen.any(axis=1)[:, :, None]  # [T, E, 1]
    x = jnp.where(chosen, x[:, None, :], 0)  # [T, E, D]
    if routing.apply_to == "input":
        x = x * weights[:, :, None]
    with jax.default_matmul_precision("highest"):
        hidden = jnp.einsum("ted,ejdf->tejf", x, wi)
        hidden = hidden if wi_bias is None else hidden + wi_bias.astype(dtype)
        out = jnp.einsum("tef,efd->ted", activation(hidden), wo)
    out = out if wo_bias is None else out + wo_bias.astype(dtype)
    if routing.apply_to == "output":
        out = out * weights[:, :, None]
    return jnp.where(chosen, out, 0).sum(axis=1).astype(tokens.dtype)


def _check(
    tokens, wi, wo, routing, activation, wi_bias, wo_bias, wi_scale, wo_scale, transposed
) -> None:
    """Raises where the operands do not fit one another."""
    ids, weights = routing.expert_ids, routing.weights
    wi_axes, wo_axes = _TRANSPOSED_AXES if transposed else _AXES
    ranks = {"tokens [T, D]": (tokens, 2), f"wi {wi_axes}": (wi, 4), f"wo {wo_axes}": (wo, 3)}
    for name, (operand, rank) in ranks.items():
        if operand.ndim != rank:
            raise ValueError(f"expert_ffn takes {name}, got shape {operand.shape}")
    num_tokens, features = tokens.shape
    experts, branches = wi.shape[:2]
    hidden = wi.shape[2 if transposed else 3]
    packed = [
        scale is not None and weight.dtype == jnp.uint8
        for weight, scale in ((wi, wi_scale), (wo, wo_scale))
    ]
    if any(packed) and not transposed:
        raise ValueError(
            "MXFP4 (uint8) has two values in a byte along the contraction's axis, which must be the"
            " last one: pass transpose_weights=True with wi [E, J, F, D / 2] and wo [E, D, F / 2],"
            f" got wi {wi.shape}, wo {wo.shape}"
        )
    for pairs, name, size in zip(packed, ("tokens' D", "F"), (features, hidden), strict=True):
        if pairs and size % 2:
            raise ValueError(
                f"{name} must be even with weights of two values in a byte, got {size}"
            )
    wi_shape, wo_shape = (features, hidden), (hidden, features)
    if transposed:
        wi_shape = (hidden, features // 2 if packed[0] else features)
        wo_shape = (features, hidden // 2 if packed[1] else hidden)
    wanted = {
        "wi": (wi, (experts, branches, *wi_shape)),
        "wo": (wo, (experts, *wo_shape)),
        "wi_bias": (wi_bias, (experts, branches, hidden)),
        "wo_bias": (wo_bias, (experts, features)),
        "routing.expert_ids": (ids, (num_tokens, *ids.shape[1:2])),
        "routing.weights": (weights, ids.shape),
    }
    for name, (operand, shape) in wanted.items():
        if operand is not None and operand.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape}, got {operand.shape} (tokens {tokens.shape},"
                f" wi {wi.shape}, wo {wo.shape}, expert_ids {ids.shape})"
            )
    if ids.ndim != 2 or ids.shape[1] < 1:
        raise ValueError(f"routing.expert_ids must be [T, K] with K >= 1, got shape {ids.shape}")
    if branches not in (1, 2):
        raise ValueError(f"axis 1 of wi must be 2 (gate, up) or 1 (no gate), got {wi.shape}")
    if branches == 1 and activation.up_offset:
        raise ValueError(
            f"activation {activation} offsets the up branch of a gated FFN: wi must be"
            f" {wi_axes.replace('J', '2')}, got {wi.shape}"
        )
    if routing.apply_to not in ("output", "input"):
        raise ValueError(f"apply_to must be 'output' or 'input', got {routing.apply_to!r}")
    floats = {"tokens": tokens, "routing.weights": weights, "wi_bias": wi_bias, "wo_bias": wo_bias}
    floats |= {} if wi_scale is not None else {"wi": wi}
    floats |= {} if wo_scale is not None else {"wo": wo}
    for name, operand in floats.items():
        if operand is not None and jnp.dtype(operand.dtype).name not in _DTYPES:
            raise TypeError(
                f"{name} must have a dtype of {_DTYPES}, got {operand.dtype}; quantised weights"
                " need wi_scale and wo_scale"
            )
