"""Offsets of the exchange against moving rows one by one."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_flax.kernels.fused_ep.plan import exchange_plan, most_received


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(0, 2**31),
)
def test_every_row_goes_and_returns_once(sources, local, capacity, tile, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 6, (sources, sources * local)) * rng.integers(
        0, 2, (sources, sources * local)
    )
    rows = [np.repeat(np.arange(sources * local), c) for c in counts]
    home = [np.full(len(r), -1) for r in rows]
    passes = -(-int(most_received(jnp.asarray(counts))) // capacity)
    for turn in range(passes):
        plans = [
            exchange_plan(
                jnp.asarray(counts),
                jnp.int32(device),
                tile_rows=tile,
                window_start=turn * capacity,
                capacity=capacity,
            )
            for device in range(sources)
        ]
        plans = [type(p)(*(np.asarray(x) for x in p)) for p in plans]
        received = np.full((sources, capacity, 2), -1)
        for s, plan in enumerate(plans):
            for e, number in enumerate(plan.send_rows):
                for i in range(number):
                    device, place = e // local, plan.send_to[e] + i
                    assert received[device, place, 0] == -1
                    assert rows[s][plan.send_from[e] + i] == e
                    received[device, place] = (s, e)
        for device, plan in enumerate(plans):
            start = 0
            for index in range(local):
                expert = device * local + index
                number = plan.expert_rows[index]
                assert plan.expert_start[index] == start
                assert (received[device, start : start + number, 1] == expert).all()
                start += number
                after = [i for i in range(index + 1, local) if plan.expert_rows[i]]
                assert plan.next_expert[index] == (after[0] if after else local)
                for s in range(sources):
                    block = index * sources + s
                    for i in range(plan.return_rows[block]):
                        source, _ = received[device, plan.return_from[block] + i]
                        assert source == s
                        place = plan.return_to[block] + i
                        assert home[s][place] == -1
                        home[s][place] = expert
            assert (received[device, start:, 0] == -1).all()
            busy = [i for i in range(local) if plan.expert_rows[i]]
            assert plan.first_expert == (busy[0] if busy else local)
            own = slice(device * local, (device + 1) * local)
            assert plan.sent_rows == plan.send_rows.sum() - plan.send_rows[own].sum()
            to_self = plan.return_rows.reshape(local, sources)[:, device].sum()
            assert plan.returned_rows == plan.expert_rows.sum() - to_self
            assert plan.home_rows == plan.send_rows.sum()
            assert plan.tiles == sum(-(-n // tile) for n in plan.expert_rows)
    for mine, expected in zip(home, rows, strict=True):
        np.testing.assert_array_equal(mine, expected)
