"""The fused FFN on one device of a mesh, inside ``shard_map``, with its gradient."""

import dataclasses
import functools
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from moe_flax.activations import Activation, resolve_activation
from moe_flax.experts import expert_ffn
from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.blocks import BlockSizes, choose_blocks, vmem_bytes
from moe_flax.kernels.fused_ep.cost import Layer, choose_method
from moe_flax.kernels.fused_ep.kernel import FFN, STATS, Weights, fused_ffn
from moe_flax.kernels.fused_ep.plan import exchange_plan, most_received
from moe_flax.kernels.fused_ep.rows import LANES, pack_rows, round_up, unpack_rows
from moe_flax.kernels.grouped_matmul.api import grouped_matmul
from moe_flax.permute import combine_rows, gather_rows, gather_slots, sort_by_expert
from moe_flax.quantize import dequantize
from moe_flax.routing import Routing
from moe_flax.varying import align_varying

MAX_ROW_BYTES = 2**30  # of a device's own rows in one exchange: semaphores count bytes in int32


@dataclasses.dataclass(frozen=True)
class Call:
    """What is fixed when a call is traced.

    Args:
      axes: mesh axes that experts are split over.
      activation: the Activation.
      k: slots of a token.
      blocks: BlockSizes or None.
      chip: a name of ``blocks.CHIPS``.
      backend: of the grouped products in the backward pass.
      interpret: as for ``pallas_call``.
      traffic: return the counts of copies in place of the result.
    """

    axes: tuple[str, ...]
    activation: Activation
    k: int
    blocks: BlockSizes | None = None
    chip: str = "v6e"
    backend: str = "auto"
    interpret: tp.Any = False
    traffic: bool = False


class Parameters(tp.NamedTuple):
    """The device's experts, as given."""

    wi: jax.Array
    wo: jax.Array
    wi_scale: jax.Array | None
    wo_scale: jax.Array | None
    wi_bias: jax.Array | None
    wo_bias: jax.Array | None


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
        results = _exchanged(call, rows, parameters, counts)
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


def scale_window(size: int, scales: int) -> int:
    """How many of ``size`` weights share each of ``scales`` scales along the contraction."""
    if scales == 1:
        return size
    if -(-size // LANES) == scales:
        return LANES
    if scales and size % scales == 0:
        return size // scales
    raise ValueError(
        f"{scales} scales do not cover {size} weights: allowed are 1, windows of {LANES}"
        f" ({-(-size // LANES)}), or a number that divides {size}"
    )


def prepare(
    call: Call, dtype: jnp.dtype, features: int, parameters: Parameters
) -> tuple[FFN, Parameters]:
    """The static sizes of a call, and its parameters with scales along the contraction only.

    Windows that no tile of stored weights holds whole are dequantised here, ahead of the kernel.
    """
    wi, wo, wi_scale, wo_scale, wi_bias, wo_bias = parameters
    experts, branches, _, hidden = wi.shape

    def windowed(weight, scale):
        if scale is None:
            return weight, None, 0
        depth, width = weight.shape[-2:]
        window = scale_window(depth, scale.shape[-2])
        if scale.shape[-2] > 1 and window % 32:
            return dequantize(weight, scale).astype(dtype), None, 0
        scale = scale.astype(jnp.float32)
        if scale.shape[-1] != width:
            repeats = scale_window(width, scale.shape[-1])
            scale = jnp.repeat(scale, repeats, axis=-1)[..., :width]
        scale = jnp.broadcast_to(scale, (*weight.shape[:-2], *scale.shape[-2:]))
        return weight, scale, window

    wi, wi_scale, wi_window = windowed(wi, wi_scale)
    wo, wo_scale, wo_window = windowed(wo, wo_scale)
    if wi.dtype != wo.dtype:  # one buffer type: the rarer case gives way
        wi, wo = wi.astype(dtype), wo.astype(dtype)
    ffn = FFN(
        features=features,
        hidden=hidden,
        branches=branches,
        experts=experts,
        dtype=dtype,
        weight_dtype=jnp.dtype(wi.dtype),
        activation=call.activation,
        rows=16,
        hidden_block=LANES,
        feature_block=LANES,
        wi_window=wi_window,
        wo_window=wo_window,
        wi_bias=wi_bias is not None,
        wo_bias=wo_bias is not None,
    )
    return ffn, Parameters(wi, wo, wi_scale, wo_scale, wi_bias, wo_bias)


def _operands(ffn: FFN, parameters: Parameters) -> tuple[Weights, Weights]:
    """The kernel's operands: scales and biases filled up to whole blocks, weights untouched."""

    def fill(x, columns):
        if x is None:
            return None
        x = x.astype(jnp.float32)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns - x.shape[-1])])

    wi, wo, wi_scale, wo_scale, wi_bias, wo_bias = parameters
    hidden, out = ffn.hidden_blocks * ffn.hidden_block, ffn.halves * ffn.words
    wi_bias = None if wi_bias is None else wi_bias[:, :, None, :]
    wo_bias = None if wo_bias is None else wo_bias[:, None, :]
    return (
        Weights(wi, fill(wi_scale, hidden), fill(wi_bias, hidden)),
        Weights(wo, fill(wo_scale, out), fill(wo_bias, out)),
    )


@dataclasses.dataclass(frozen=True)
class Sized:
    """A call and everything that its operands' shapes settle."""

    ffn: FFN
    exchange: ex.Exchange
    capacity: int
    most: int  # rows that a device can receive at all

    @property
    def single_pass(self) -> bool:
        return self.most <= self.capacity


def size_up(call: Call, rows: int, sizes: tuple[int, ...], ffn: FFN) -> Sized:
    """Block sizes and buffers for ``rows`` rows a device on an axis (or axes) of ``sizes``."""
    exchange = ex.Exchange(call.axes, sizes, ffn.experts)
    most = exchange.sources * (rows // call.k) * min(call.k, ffn.experts)
    ffn, capacity = choose_blocks(
        ffn,
        call.blocks,
        rows_per_expert=rows / ffn.experts,
        chip=call.chip,
        max_received=most,
    )
    return Sized(ffn, exchange, capacity, most)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(call: Call, rows, parameters: Parameters, counts):
    """[N, D] rows sorted by expert to the experts' outputs in the same order."""
    return _forward(call, rows, parameters, counts)


def _sized(call: Call, rows, parameters) -> tuple[Sized, Parameters]:
    ffn, parameters = prepare(call, jnp.dtype(rows.dtype), rows.shape[1], parameters)
    sizes = tuple(jax.lax.axis_size(axis) for axis in call.axes)
    return size_up(call, rows.shape[0], sizes, ffn), parameters


def _forward(call: Call, rows, parameters: Parameters, counts):
    sized, parameters = _sized(call, rows, parameters)
    wi, wo = _operands(sized.ffn, parameters)
    packed = pack_rows(rows)

    def run(home, window):
        return fused_ffn(
            sized.ffn,
            sized.exchange,
            _plan(sized, call, counts, window),
            packed,
            wi,
            wo,
            capacity=sized.capacity,
            home=home,
            vmem_limit_bytes=vmem_bytes(sized.ffn),
            interpret=call.interpret,
            traffic=call.traffic,
        )

    if sized.single_pass:
        home, stats = run(None, 0)
    else:

        def one(state):
            home, stats, window = state
            home, more = run(home, window)
            stats = stats if more is None else stats + more
            return home, stats, window + sized.capacity

        last = most_received(counts)
        start = jnp.zeros_like(packed), jnp.zeros(len(STATS), jnp.int32), jnp.int32(0)
        start = tuple(align_varying(*start, packed)[:3])
        home, stats, _ = jax.lax.while_loop(lambda state: state[2] < last, one, start)
    if call.traffic:
        return stats
    return unpack_rows(home, rows.shape[1], rows.dtype)


def _plan(sized: Sized, call: Call, counts, window):
    device = jax.lax.axis_index(call.axes)
    return exchange_plan(
        counts,
        device,
        tile_rows=sized.ffn.rows,
        window_start=window,
        capacity=sized.capacity,
    )


def _exchanged_forward(call, rows, parameters, counts):
    return _exchanged(call, rows, parameters, counts), (rows, parameters, counts)


def _exchanged_backward(call: Call, residuals, grad):
    """Rows and gradients travel side by side, meet the grouped products, and come back as one."""
    rows, parameters, counts = residuals
    features, dtype = rows.shape[1], rows.dtype
    sized, _ = _sized(call, rows, parameters)
    both = jnp.concatenate([pack_rows(rows), pack_rows(grad.astype(dtype))], axis=2)
    words = both.shape[2] // 2

    def one(home, window):
        plan = _plan(sized, call, counts, window)
        received = ex.dispatch(sized.exchange, plan, both, sized.capacity, interpret=call.interpret)
        number = jnp.sum(plan.expert_rows)
        here = jnp.arange(sized.capacity)[:, None] < number
        x, g = (
            jnp.where(here, unpack_rows(half, features, dtype), 0)
            for half in (received[:, :, :words], received[:, :, words:])
        )
        ffn = functools.partial(_ffn, call, sizes=plan.expert_rows)
        _, pullback = jax.vjp(ffn, x, parameters)
        x_grad, grads = pullback(g)
        packed = pack_rows(x_grad)
        return ex.give_back(sized.exchange, plan, packed, home, interpret=call.interpret), grads

    home = jnp.zeros_like(pack_rows(rows))
    if sized.single_pass:
        home, grads = one(home, 0)
    else:
        trained = [
            None if p is None or not jnp.issubdtype(p.dtype, jnp.floating) else p
            for p in parameters
        ]
        sums = [None if p is None else jnp.zeros_like(p, jnp.float32) for p in trained]

        def step(state):
            home, sums, window = state
            home, grads = one(home, window)
            sums = [
                None if s is None else s + g.astype(jnp.float32)
                for s, g in zip(sums, grads, strict=True)
            ]
            return home, sums, window + sized.capacity

        last = most_received(counts)
        window, *_ = align_varying(jnp.int32(0), rows)
        home, sums, _ = jax.lax.while_loop(
            lambda state: state[2] < last, step, (home, sums, window)
        )
        grads = Parameters(
            *(
                _no_gradient(p) if s is None else s.astype(p.dtype)
                for s, p in zip(sums, parameters, strict=True)
            )
        )
    return unpack_rows(home, features, dtype), grads, None


def _no_gradient(parameter):
    return None if parameter is None else np.zeros(parameter.shape, jax.dtypes.float0)


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _ffn(call: Call, x, parameters: Parameters, *, sizes) -> jax.Array:
    """The FFN over received rows in grouped products: what the backward pass differentiates."""
    wi, wo, wi_scale, wo_scale, wi_bias, wo_bias = parameters
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize == 4 else None
    product = functools.partial(
        grouped_matmul, group_sizes=sizes, backend=call.backend, precision=precision
    )

    def weight(values, scale):
        if scale is None:
            return values.astype(x.dtype)
        return dequantize(jax.lax.stop_gradient(values), scale).astype(x.dtype)

    def add(rows, bias):
        ones = jnp.ones_like(rows, shape=(rows.shape[0], 1))
        return rows + product(ones, jnp.expand_dims(bias, -2).astype(rows.dtype))

    hidden = product(x, weight(wi, wi_scale), preferred_element_type=jnp.float32)
    hidden = hidden if wi_bias is None else add(hidden, wi_bias)
    hidden = call.activation(hidden).astype(x.dtype)
    out = product(hidden, weight(wo, wo_scale))
    return out if wo_bias is None else add(out, wo_bias)
