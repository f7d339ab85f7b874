"""The kernel: rows to their experts, the gated FFN over streamed weights, rows back.

Row tiles of one expert after another run through two phases. Phase 1 takes the first product
block of hidden columns by block and leaves the activated hidden rows in VMEM; phase 2 takes the
second product block of feature columns by block. Each product is blocked by output columns only,
so that a whole contraction stays in the MXU's accumulators and rounding happens once. The blocks
of both phases of all tiles make one sequence, of which the next is always under way.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.plan import ExchangePlan
from moe_flax.kernels.fused_ep.scratch import Scratch, Weights, clear_padding, ffn_scratch
from moe_flax.kernels.fused_ep.streams import Streams
from moe_flax.kernels.fused_ep.tiles import TileLoop

STATS = (
    "wi_blocks",
    "wo_blocks",
    "tiles",
    "remote_sends",
    "remote_rows",
    "remote_returns",
    "returned_rows",
)


def _kernel(
    ffn: FFN,
    exchange: ex.Exchange,
    count_for,
    plan: ExchangePlan,
    rows,
    wi: Weights,
    wo: Weights,
    home_before,
    home,
    received,
    stats,
    scratch: Scratch,
):
    del home_before  # the same memory as home, where it is given
    count = count_for(stats)
    sems = scratch.exchange
    streams = Streams(ffn, wi, wo, scratch, count)
    loop = TileLoop(ffn, exchange, plan, streams, received, home, scratch, count)
    pl.when(loop.tiles > 0)(loop.prefetch)
    clear_padding(ffn, scratch)
    ex.enter(exchange)
    ex.send_all(exchange, plan, rows, received, sems, count)
    pl.when(loop.tiles > 0)(loop.run)
    ex.drain_sends(plan, rows, sems)
    ex.drain_returns(plan, received, home, sems)
    ex.leave(exchange, sems)


def _counter(stats):
    for index in range(len(STATS)):
        stats[index] = 0

    def count(name, amount=1):
        stats[STATS.index(name)] += amount

    return count


def fused_ffn(
    ffn: FFN,
    exchange: ex.Exchange,
    plan: ExchangePlan,
    rows: jax.Array,
    wi: Weights,
    wo: Weights,
    *,
    capacity: int,
    home: jax.Array | None = None,
    vmem_limit_bytes: int | None = None,
    interpret: tp.Any = False,
    traffic: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """One pass of the fused FFN on one device, inside ``shard_map`` over the expert axis.

    Args:
      ffn: sizes and blocks.
      exchange: the expert axis.
      plan: the pass's copies.
      rows: [N, 1, words], packed rows sorted by expert.
      wi: [L, branches, D, F] with scale [L, branches, windows, columns] and bias
        [L, branches, 1, columns], columns being F filled up to whole blocks.
      wo: [L, F, D] with scale [L, windows, columns] and bias [L, 1, columns], columns being the
        features that a packed row has room for.
      capacity: rows of the receive buffer.
      home: [N, 1, words] results of earlier passes, written over; None in a single pass, which
        leaves rows without an expert as memory was.
      vmem_limit_bytes: given to the compiler.
      interpret: as for ``pallas_call``.
      traffic: count the copies started.

    Returns:
      [N, 1, words], the experts' outputs in the order of ``rows``; and the counts, int32 in the
      order of ``STATS``, or None.
    """
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    arrays = (plan, rows, wi, wo, home)
    specs = (
        ex.plan_specs(),
        hbm,
        *(jax.tree.map(lambda _: hbm, operands) for operands in (wi, wo, home)),
    )
    row = rows.shape[1:]
    out = [
        ex.like(rows, rows.shape),
        ex.like(rows, (capacity, *row)),
        ex.like(rows, (len(STATS),), jnp.int32) if traffic else None,
    ]
    results = pl.pallas_call(
        functools.partial(_kernel, ffn, exchange, _counter if traffic else lambda _: ex.no_count),
        out_shape=out,
        in_specs=specs,
        out_specs=[hbm, hbm, smem if traffic else None],
        scratch_shapes=[ffn_scratch(ffn, exchange)],
        input_output_aliases={} if home is None else {len(jax.tree.leaves(arrays)) - 1: 0},
        compiler_params=ex.compiler_params(exchange, vmem_limit_bytes),
        interpret=interpret,
        name="moe_fused_ffn",
    )(*arrays)
    return results[0], results[2]
