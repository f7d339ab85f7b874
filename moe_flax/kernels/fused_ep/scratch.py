"""What the kernel keeps in VMEM."""

import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.rows import LANES, Ref, word_dtype


class Weights(tp.NamedTuple):
    """One product's operands; scale and bias are None where the FFN has none."""

    weight: tp.Any
    scale: tp.Any = None
    bias: tp.Any = None


class Scratch(tp.NamedTuple):
    """What the kernel keeps in VMEM, and the semaphores of what comes and goes there."""

    packed: Ref  # [2, rows, 1, words]: tiles as they arrive
    features: Ref  # [rows, wi_depth]: the tile at work
    gate: Ref  # [rows, hidden_block] float32: the activated gate; None where there is none
    hidden: Ref  # [rows, hidden_width]
    outputs: Ref  # [rows, halves * words] float32: the second product
    results: Ref  # [rows, 1, words]: the tile before, on its way out
    wi: Weights  # two blocks each
    wo: Weights
    wi_tail: Ref  # columns that fill no whole lanes, [branches, D, rest]; None where none
    wo_tail: Ref  # [F, rest]
    packed_sem: Ref = None
    wi_sem: Ref = None
    wo_sem: Ref = None
    results_sem: Ref = None
    exchange: Ref = None


def vmem_shapes(ffn: FFN) -> Scratch:
    """(shape, dtype) of everything the kernel keeps in VMEM; None where it needs none."""
    f32, out = jnp.dtype(jnp.float32), ffn.halves * ffn.feature_block
    words, weights = word_dtype(ffn.dtype), ffn.weight_dtype
    wi_block = (2, ffn.branches, ffn.wi_depth, ffn.hidden_block)
    wi_rest, wo_rest = ffn.hidden % LANES, ffn.features % LANES

    def operands(block: tuple[int, ...], scales: int, bias: bool):
        *batch, _, columns = block
        return Weights(
            (block, weights),
            ((*batch, scales, columns), f32) if scales else None,
            ((*batch, 1, columns), f32) if bias else None,
        )

    return Scratch(
        packed=((2, ffn.rows, 1, ffn.words), words),
        features=((ffn.rows, ffn.wi_depth), ffn.dtype),
        gate=((ffn.rows, ffn.hidden_block), f32) if ffn.branches == 2 else None,
        hidden=((ffn.rows, ffn.hidden_width), ffn.dtype),
        outputs=((ffn.rows, ffn.halves * ffn.words), f32),
        results=((ffn.rows, 1, ffn.words), words),
        wi=operands(wi_block, ffn.wi_scales, ffn.wi_bias),
        wo=operands((2, ffn.wo_depth, out), ffn.wo_scales, ffn.wo_bias),
        wi_tail=((ffn.branches, ffn.features, wi_rest), weights) if wi_rest else None,
        wo_tail=((ffn.hidden, wo_rest), weights) if wo_rest else None,
    )


def ffn_scratch(ffn: FFN, exchange: ex.Exchange) -> Scratch:
    dma = pltpu.SemaphoreType.DMA
    buffers = jax.tree.map(
        lambda buffer: pltpu.VMEM(*buffer),
        vmem_shapes(ffn),
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], jnp.dtype),
    )
    return buffers._replace(
        packed_sem=dma((2,)),
        wi_sem=dma((2,)),
        wo_sem=dma((2,)),
        results_sem=dma,
        exchange=ex.semaphores(exchange),
    )


def clear_padding(ffn: FFN, scratch: Scratch) -> None:
    """Zeros what no copy ever writes and a product reads: rows of weights past D and past F."""
    for buffer, used, depth in (
        (scratch.wi.weight, ffn.features, ffn.wi_depth),
        (scratch.wo.weight, ffn.hidden, ffn.wo_depth),
    ):
        if used < depth:
            shape = (*buffer.shape[:-2], depth - used, buffer.shape[-1])
            buffer[..., used:, :] = jnp.zeros(shape, buffer.dtype)
    filled = min(ffn.halves * ffn.words, ffn.wi_depth)
    if filled < ffn.wi_depth:
        width = ffn.wi_depth - filled
        scratch.features[:, filled:] = jnp.zeros((ffn.rows, width), ffn.dtype)
    if ffn.hidden_blocks * ffn.hidden_block < ffn.wo_depth:
        start = ffn.hidden_blocks * ffn.hidden_block
        scratch.hidden[:, start:] = jnp.zeros((ffn.rows, ffn.hidden_width - start), ffn.dtype)
