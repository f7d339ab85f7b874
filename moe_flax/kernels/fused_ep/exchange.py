"""The exchange inside a kernel: barriers, sends, returns and their waits.

Every kind of transfer has a semaphore of its own, so that no wait can be met by another's bytes.
A wait names a number of rows: its descriptor covers that many rows of a buffer of the same width.
"""

import dataclasses
import math
import typing as tp

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep.plan import ExchangePlan

COLLECTIVE_ID = 7  # the barrier semaphore; all exchanges share it, entry and exit keep them apart
MAX_ARRIVAL_SEMAPHORES = 32


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What the copies of a kernel need to know of the mesh.

    Args:
      axes: the mesh axes that experts are split over, the slowest first.
      sizes: devices along each of them; P is their product.
      local_experts: experts a device holds, L.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    local_experts: int

    @property
    def sources(self) -> int:
        """Devices that send rows here, this one among them: P."""
        return math.prod(self.sizes)

    def device_id(self, index) -> dict[str | tuple[str, ...], tp.Any]:
        """The mesh coordinates of device ``index``; axes not named are the sender's own."""
        coordinates: dict[str | tuple[str, ...], tp.Any] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            coordinates[axis] = jax.lax.rem(index, size)
            index = jax.lax.div(index, size)
        return coordinates

    @property
    def arrival_group(self) -> int:
        """Consecutive experts that share an arrival semaphore."""
        return -(-self.local_experts // MAX_ARRIVAL_SEMAPHORES)

    @property
    def arrival_groups(self) -> int:
        return -(-self.local_experts // self.arrival_group)


class Semaphores(tp.NamedTuple):
    """The exchange's semaphores: sent, arrived (one a group of experts), returned, home, exit."""

    sent: tp.Any
    arrived: tp.Any
    returned: tp.Any
    home: tp.Any
    exit: tp.Any


def semaphores(exchange: Exchange) -> Semaphores:
    """The scratch that an exchange asks for."""
    dma = pltpu.SemaphoreType.DMA
    return Semaphores(dma, dma((exchange.arrival_groups,)), dma, dma, pltpu.SemaphoreType.REGULAR)


class Count(tp.Protocol):
    """Adds to one of the counts that a kernel reports."""

    def __call__(self, name: str, amount: tp.Any = 1, /) -> None: ...


def no_count(name: str, amount=1) -> None:
    """Counts nothing; kernels that report their traffic put a counter in its place."""
    del name, amount


def _signal_all(exchange: Exchange, semaphore) -> None:
    def signal(peer, carry):
        pl.semaphore_signal(semaphore, 1, device_id=exchange.device_id(peer))
        return carry

    jax.lax.fori_loop(0, exchange.sources, signal, 0)
    pl.semaphore_wait(semaphore, exchange.sources)


def enter(exchange: Exchange) -> None:
    """Waits until every device of the expert axis is in the kernel: its buffers exist."""
    if exchange.sources > 1:
        _signal_all(exchange, pltpu.get_barrier_semaphore())


def leave(exchange: Exchange, sems: Semaphores) -> None:
    """Waits until every device is done, so that no signal of a later kernel is taken for one."""
    if exchange.sources > 1:
        _signal_all(exchange, sems.exit)


def wait_rows(buffer, rows, semaphore) -> None:
    """Waits for ``rows`` rows as wide as those of ``buffer``, if there are any."""

    @pl.when(rows > 0)
    def _():
        window = buffer.at[pl.ds(0, rows)]
        pltpu.make_async_copy(window, window, semaphore).wait()


def send_all(
    exchange: Exchange, plan: ExchangePlan, rows, received, sems: Semaphores, count: Count
) -> None:
    """Starts every send: local expert index first, so that all devices' first experts fill first.

    Destinations are rotated by the device's own index, so that no device is everyone's first.
    """
    me = jax.lax.axis_index(exchange.axes)
    sources, local = exchange.sources, exchange.local_experts

    def send(step, carry):
        expert_index, turn = step // sources, step % sources
        peer = jax.lax.rem(me + turn, sources)
        expert = peer * local + expert_index
        number = plan.send_rows[expert]
        arrived = sems.arrived.at[expert_index // exchange.arrival_group]
        source = rows.at[pl.ds(plan.send_from[expert], number)]
        target = received.at[pl.ds(plan.send_to[expert], number)]

        @pl.when((number > 0) & (turn == 0))
        def _():
            pltpu.make_async_copy(source, target, arrived).start()

        @pl.when((number > 0) & (turn > 0))
        def _():
            pltpu.make_async_remote_copy(
                source, target, sems.sent, arrived, device_id=exchange.device_id(peer)
            ).start()
            count("remote_sends")
            count("remote_rows", number)

        return carry

    jax.lax.fori_loop(0, sources * local, send, 0)


def wait_arrivals(exchange: Exchange, plan: ExchangePlan, received, expert, sems: Semaphores):
    """Waits until all rows of the group of experts that ``expert`` belongs to are here."""
    size, local = exchange.arrival_group, exchange.local_experts
    group = expert // size
    number = plan.expert_rows[expert]
    if size > 1:
        number = jax.lax.fori_loop(
            group * size,
            jnp.minimum((group + 1) * size, local),
            lambda index, total: total + plan.expert_rows[index],
            jnp.int32(0),
        )
    wait_rows(received, number, sems.arrived.at[group])


def return_expert(
    exchange: Exchange, plan: ExchangePlan, expert, results, home, sems: Semaphores, count: Count
) -> None:
    """Starts the way back of one local expert's rows, one block a source."""
    me = jax.lax.axis_index(exchange.axes)
    sources = exchange.sources

    def give_back(turn, carry):
        peer = jax.lax.rem(me + turn, sources)
        block = expert * sources + peer
        number = plan.return_rows[block]
        source = results.at[pl.ds(plan.return_from[block], number)]
        target = home.at[pl.ds(plan.return_to[block], number)]

        @pl.when((number > 0) & (turn == 0))
        def _():
            pltpu.make_async_copy(source, target, sems.home).start()

        @pl.when((number > 0) & (turn > 0))
        def _():
            pltpu.make_async_remote_copy(
                source, target, sems.returned, sems.home, device_id=exchange.device_id(peer)
            ).start()
            count("remote_returns")
            count("returned_rows", number)

        return carry

    jax.lax.fori_loop(0, sources, give_back, 0)


def drain_sends(plan: ExchangePlan, rows, sems: Semaphores) -> None:
    """Waits until this device's rows have left it."""
    wait_rows(rows, plan.sent_rows, sems.sent)


def drain_returns(plan: ExchangePlan, results, home, sems: Semaphores) -> None:
    """Waits until results have left this device and its own rows are home."""
    wait_rows(results, plan.returned_rows, sems.returned)
    wait_rows(home, plan.home_rows, sems.home)


def like(array: jax.Array, shape: tuple[int, ...], dtype=None) -> jax.ShapeDtypeStruct:
    """An output of a kernel that varies over the mesh axes that ``array`` varies over."""
    kind = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype or array.dtype, manual_axis_type=kind)


def plan_specs() -> ExchangePlan:
    """Block specs that put a plan into scalar memory."""
    return ExchangePlan(*([pl.BlockSpec(memory_space=pltpu.SMEM)] * len(ExchangePlan._fields)))


def compiler_params(exchange: Exchange, vmem_limit_bytes: int | None = None):
    """Compiler parameters; the barrier's semaphore is asked for only where there are peers."""
    return pltpu.CompilerParams(
        collective_id=COLLECTIVE_ID if exchange.sources > 1 else None,
        has_side_effects=True,
        vmem_limit_bytes=vmem_limit_bytes,
    )
