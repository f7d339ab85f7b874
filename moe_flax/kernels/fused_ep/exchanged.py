"""Sorted rows through all experts of the axis and back, with the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_flax.kernels.fused_ep import transfer
from moe_flax.kernels.fused_ep.blocks import CHIPS
from moe_flax.kernels.fused_ep.call import (
    Call,
    Parameters,
    Sized,
    kernel_operands,
    prepare,
    products_backend,
    size_up,
)
from moe_flax.kernels.fused_ep.kernel import STATS, fused_ffn
from moe_flax.kernels.fused_ep.pack import EIGHT, pack_rows, unpack_rows
from moe_flax.kernels.fused_ep.plan import exchange_plan, most_received
from moe_flax.kernels.fused_ep.rows import LANES, round_up
from moe_flax.kernels.grouped_matmul.api import grouped_matmul
from moe_flax.quantize import dequantize
from moe_flax.varying import align_varying


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged(call: Call, rows, parameters: Parameters, counts):
    """[N, D] rows sorted by expert to the experts' outputs in the same order."""
    return _forward(call, rows, parameters, counts)


def _sized(call: Call, rows, parameters) -> tuple[Sized, Parameters]:
    ffn, parameters = prepare(call, jnp.dtype(rows.dtype), rows.shape[1], parameters)
    sizes = tuple(jax.lax.axis_size(axis) for axis in call.axes)
    return size_up(call, rows.shape[0], sizes, ffn), parameters


def _forward(call: Call, rows, parameters: Parameters, counts):
    sized, parameters = _sized(call, rows, parameters)
    wi, wo = kernel_operands(sized.ffn, parameters)
    packed = pack_rows(rows, interpret=call.interpret)

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
            vmem_limit_bytes=CHIPS[call.chip].vmem_bytes,
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

        last = _most_received(counts)
        start = packed, jnp.zeros(len(STATS), jnp.int32), jnp.int32(0)
        start = tuple(align_varying(*start, packed)[:3])
        home, stats, _ = jax.lax.while_loop(lambda state: state[2] < last, one, start)
    if call.traffic:
        return stats
    return unpack_rows(home, rows.shape, rows.dtype, interpret=call.interpret)


def _most_received(counts) -> jax.Array:
    """The rows of the busiest device of the whole mesh: all devices take as many passes.

    Devices that differ in an axis that splits no experts exchange nothing, but a loop that runs
    a collective as often everywhere is right whatever its group is.
    """
    most, axes = most_received(counts), jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmax(most, axes) if axes else most


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
    return exchanged(call, rows, parameters, counts), (rows, parameters, counts)


def _exchanged_backward(call: Call, residuals, grad):
    """Rows and gradients travel side by side, meet the grouped products, and come back as one."""
    rows, parameters, counts = residuals
    features, dtype, backend = rows.shape[1], rows.dtype, products_backend(call)
    sized, _ = _sized(call, rows, parameters)
    exchange, interpret = sized.exchange, call.interpret
    wide, capacity = round_up(features, LANES), round_up(sized.capacity, EIGHT)
    sides = [jnp.pad(x, ((0, 0), (0, wide - features))) for x in (rows, grad.astype(dtype))]
    both = pack_rows(jnp.concatenate(sides, axis=1), interpret=interpret)

    def one(home, window):
        plan = _plan(sized, call, counts, window)
        received = transfer.dispatch(exchange, plan, both, capacity, interpret=interpret)
        received = unpack_rows(received, (capacity, 2 * wide), dtype, interpret=interpret)
        # Past the last row they hold anything: grouped products do not look there.
        x, g = received[:, :features], received[:, wide : wide + features]
        ffn = functools.partial(_ffn, call, sizes=plan.expert_rows, backend=backend)
        _, pullback = jax.vjp(ffn, x, parameters)
        x_grad, grads = pullback(g)
        packed = pack_rows(x_grad, interpret=interpret)
        home = transfer.give_back(exchange, plan, packed, home, interpret=interpret)
        return home, grads

    home = pack_rows(jnp.zeros_like(rows), interpret=interpret)
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

        last = _most_received(counts)
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
    return unpack_rows(home, rows.shape, dtype, interpret=interpret), grads, None


def _no_gradient(parameter):
    return None if parameter is None else np.zeros(parameter.shape, jax.dtypes.float0)


exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _ffn(call: Call, x, parameters: Parameters, *, sizes, backend: str) -> jax.Array:
    """The FFN over received rows in grouped products: what the backward pass differentiates."""
    wi, wo, wi_scale, wo_scale, wi_bias, wo_bias = parameters
    precision = jax.lax.Precision.HIGHEST if x.dtype.itemsize == 4 else None
    product = functools.partial(
        grouped_matmul, group_sizes=sizes, backend=backend, precision=precision
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
