"""What a call of the kernel settles when it is traced: sizes, blocks, buffers, operands."""

import dataclasses
import typing as tp

import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.blocks import BlockSizes, choose_blocks
from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.rows import LANES
from moe_flax.kernels.fused_ep.scratch import Weights
from moe_flax.quantize import dequantize


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
    """The device's experts as given, or their gradients; None for what they do not have."""

    wi: tp.Any
    wo: tp.Any
    wi_scale: tp.Any
    wo_scale: tp.Any
    wi_bias: tp.Any
    wo_bias: tp.Any


def products_backend(call: Call) -> str:
    """The backend of the grouped products beside the kernel, which runs on TPUs.

    Raises:
      ValueError: "xla" on a TPU, whose compiler crashes on ragged products over several branches.
    """
    if call.interpret:
        return call.backend
    if call.backend == "xla":
        raise ValueError(
            "backend 'xla' cannot run the fused kernel's gradient on a TPU (XLA's compiler fails on"
            " its products over gate and up at once); take backend='auto' or 'tpu'"
        )
    return "tpu" if call.backend == "auto" else call.backend


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


def kernel_operands(ffn: FFN, parameters: Parameters) -> tuple[Weights, Weights]:
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
