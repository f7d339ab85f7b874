"""Kernels of the exchange alone: rows to their experts, and rows back to their owners."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep import exchange as ex
from moe_flax.kernels.fused_ep.plan import ExchangePlan


def dispatch(exchange: ex.Exchange, plan: ExchangePlan, rows, capacity: int, *, interpret):
    """Rows to their experts and nothing else: [N, 1, words] to [capacity, 1, words].

    Rows of the result past the plan's ``sum(expert_rows)`` hold whatever memory held.
    """

    def kernel(plan, rows, received, sems):
        ex.enter(exchange)
        ex.send_all(exchange, plan, rows, received, sems, ex.no_count)

        def wait(group, carry):
            ex.wait_arrivals(exchange, plan, received, group * exchange.arrival_group, sems)
            return carry

        jax.lax.fori_loop(0, exchange.arrival_groups, wait, 0)
        ex.drain_sends(plan, rows, sems)
        ex.leave(exchange, sems)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=ex.like(rows, (capacity, *rows.shape[1:])),
        in_specs=[ex.plan_specs(), hbm],
        out_specs=hbm,
        scratch_shapes=[ex.semaphores(exchange)],
        compiler_params=ex.compiler_params(exchange),
        interpret=interpret,
        name="moe_dispatch",
    )(plan, rows)


def give_back(exchange: ex.Exchange, plan: ExchangePlan, results, home, *, interpret):
    """Rows back to their owners: the inverse of ``dispatch``, over ``home`` [N, 1, words].

    Rows of ``home`` that no expert of this pass holds keep their values.
    """

    def kernel(plan, results, _, home, sems):
        ex.enter(exchange)

        def start(expert, carry):
            ex.return_expert(exchange, plan, expert, results, home, sems, ex.no_count)
            return carry

        jax.lax.fori_loop(0, exchange.local_experts, start, 0)
        ex.drain_returns(plan, results, home, sems)
        ex.leave(exchange, sems)

    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=ex.like(home, home.shape),
        in_specs=[ex.plan_specs(), hbm, hbm],
        out_specs=hbm,
        scratch_shapes=[ex.semaphores(exchange)],
        input_output_aliases={len(ExchangePlan._fields) + 1: 0},
        compiler_params=ex.compiler_params(exchange),
        interpret=interpret,
        name="moe_give_back",
    )(plan, results, home)
