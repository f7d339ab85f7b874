"""What the kernel copies, counted where it starts its copies."""

import jax.numpy as jnp
import numpy as np
import pytest
from fused_ep_case import SMALL, Case, compiled, make_mesh

from moe_flax.kernels.fused_ep.kernel import STATS


@pytest.mark.interpret
def test_weights_once_a_tile_and_one_copy_a_block():
    case = Case(tokens=64, experts=16, k=2, features=256, hidden=384)
    devices, local, tile = 4, 4, SMALL.rows
    run = compiled(make_mesh(expert=devices), "on_wait", SMALL, "silu", True)
    inputs = case.inputs()
    for name, ids in case.routings(devices).items():
        stats = np.asarray(
            run(
                inputs["tokens"],
                inputs["wi"],
                inputs["wo"],
                jnp.asarray(ids, jnp.int32),
                inputs["weights"],
                {},
            )
        )
        counts = np.zeros((devices, 16), int)
        for token, experts in enumerate(ids):
            for expert in experts[experts < 16]:
                counts[token // 16, expert] += 1
        for device in range(devices):
            own = slice(device * local, (device + 1) * local)
            mine = counts[:, own]
            tiles = np.ceil(mine.sum(0) / tile).sum()
            away = np.delete(counts[device], np.r_[own])
            back = np.delete(mine, device, axis=0)
            expected = {
                "wi_blocks": tiles * 3,  # 384 hidden columns in blocks of 128
                "wo_blocks": tiles * 1,  # 128 words of a row
                "tiles": tiles,
                "remote_sends": (away > 0).sum(),
                "remote_rows": away.sum(),
                "remote_returns": (back > 0).sum(),
                "returned_rows": back.sum(),
            }
            assert dict(zip(STATS, stats[device], strict=True)) == expected, (name, device)
