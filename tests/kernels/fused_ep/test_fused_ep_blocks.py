"""The VMEM model, its choices and refusals, and the predictions."""

import jax
import jax.numpy as jnp
import pytest

from moe_flax.activations import resolve_activation
from moe_flax.compile_report import layer_sizes
from moe_flax.config import MoEConfig
from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe
from moe_flax.kernels.fused_ep.blocks import (
    CHIPS,
    chip_of,
    choose_blocks,
    padded_bytes,
    vmem_bytes,
    vmem_table,
)
from moe_flax.kernels.fused_ep.cost import Layer, choose_method, predict_fused
from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.routing import Routing

MODELS = {  # E, K, D, F
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "deepseek-v3": (256, 8, 7168, 2048),
    "kimi-k2": (384, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "llama4-maverick": (128, 1, 5120, 8192),
    "glm-4.5-air": (128, 8, 4096, 1408),
}


def config(name):
    experts, k, features, hidden = MODELS[name]
    return MoEConfig(
        features=features,
        hidden_features=hidden,
        num_experts=experts,
        num_experts_per_token=k,
        activation="gpt_oss" if name.startswith("gpt") else "silu",
        use_bias=name.startswith("gpt"),
    )


def ffn(features=2048, hidden=768, **changes):
    values = {
        "features": features,
        "hidden": hidden,
        "branches": 2,
        "experts": 32,
        "dtype": jnp.dtype(jnp.bfloat16),
        "weight_dtype": jnp.dtype(jnp.bfloat16),
        "activation": resolve_activation("silu"),
        "rows": 16,
        "hidden_block": 128,
        "feature_block": 128,
    }
    return FFN(**values | changes)


def test_padded_bytes_fill_whole_tiles():
    assert padded_bytes((8, 128), jnp.float32) == 4096
    assert padded_bytes((9, 129), jnp.float32) == 16 * 256 * 4
    assert padded_bytes((3, 17, 1), jnp.bfloat16) == 3 * 32 * 128 * 2
    assert padded_bytes((5, 1, 256), jnp.uint32) == 5 * 256 * 4


@pytest.mark.parametrize("chip", sorted(CHIPS))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_fits_every_chip(name, chip):
    for tokens in (8, 64, 256, 1024):
        for dtype in ("bfloat16", "float8_e4m3fn"):
            sized, _ = layer_sizes(
                config(name), {"expert": 8}, tokens, weight_dtype=dtype, chip=chip
            )
            assert vmem_bytes(sized.ffn) <= CHIPS[chip].vmem_bytes
            assert sized.capacity * sized.ffn.words * 4 <= 2**30


def test_vmem_does_not_grow_with_devices():
    sizes = {
        devices: vmem_table(
            layer_sizes(config("deepseek-v3"), {"expert": devices}, 8192 // devices, chip="v5p")[
                0
            ].ffn
        )
        for devices in (8, 64, 256)
    }
    assert max(sum(t.values()) for t in sizes.values()) <= 64 * 2**20
    one, _ = layer_sizes(config("deepseek-v3"), {"expert": 256}, 1024, chip="tpu7x")
    assert vmem_bytes(one.ffn) <= 64 * 2**20


def test_a_tile_is_as_high_as_an_experts_rows():
    for tokens, rows in ((1024, 384), (512, 192), (8, 32)):
        sized, _ = layer_sizes(config("qwen3-30b-a3b"), {"expert": 4}, tokens)
        assert sized.ffn.rows == rows


def test_nothing_fits_says_why():
    with pytest.raises(ValueError, match=r"does not fit VMEM of v5p: .* MiB .*D=200000"):
        choose_blocks(
            ffn(features=200000, hidden=90000),
            None,
            rows_per_expert=8,
            chip="v5p",
            max_received=64,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (BlockSizes(rows=24), "rows must be a positive multiple of 16, got 24"),
        (BlockSizes(hidden=100), "hidden must be a positive multiple of 128, got 100"),
        (BlockSizes(features=384), "features=384 must divide the 1024 words"),
        (BlockSizes(receive_rows=2**20), "2\\*\\*31"),
    ],
)
def test_wrong_block_sizes(given, message):
    with pytest.raises(ValueError, match=message):
        choose_blocks(ffn(), given, rows_per_expert=8, chip="v6e", max_received=64)


def test_chips_by_device_kind():
    assert chip_of("TPU v6 lite") == "v6e"
    assert chip_of("TPU v5 lite") == "v5e"
    assert chip_of("cpu") == "v5p"  # the smallest VMEM


def test_short_batches_are_replicated_and_long_ones_fused():
    def layer(tokens):
        return Layer(experts=128, k=8, features=2048, hidden=768, devices=8, tokens=tokens)

    assert choose_method(layer(1), "v6e") == "replicated"
    assert choose_method(layer(1024), "v6e") == "fused"
    times = [predict_fused(layer(t), "v6e").seconds for t in (8, 64, 1024, 4096)]
    assert times == sorted(times)


def test_wrong_operands():
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
    x, wi, wo = jnp.ones((4, 8)), jnp.ones((4, 2, 8, 16)), jnp.ones((4, 16, 8))
    routing = Routing(jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="expert_axis 'ep' is no axis of the mesh"):
        fused_ep_moe(x, wi, wo, routing, mesh=mesh, expert_axis="ep")
    with pytest.raises(ValueError, match="wo must have shape"):
        fused_ep_moe(x, wi, wo[:, :3], routing, mesh=mesh)
    with pytest.raises(TypeError, match="tokens must have a dtype"):
        fused_ep_moe(x.astype(jnp.float16), wi, wo, routing, mesh=mesh)
    with pytest.raises(ValueError, match=r"needs wi_scale"):
        fused_ep_moe(x, wi.astype(jnp.int8), wo, routing, mesh=mesh)
    with pytest.raises(ValueError, match=r"routing\.weights must have shape"):
        fused_ep_moe(x, wi, wo, Routing(routing.expert_ids, jnp.ones((4, 3))), mesh=mesh)
    with pytest.raises(ValueError, match="method must be"):
        fused_ep_moe(x, wi, wo, routing, mesh=mesh, method="magic")


@pytest.mark.slow
def test_the_fallback_is_equal():
    from fused_ep_case import Case, make_mesh, relative_error

    from moe_flax.kernels.fused_ep import fused_ep_moe_reference

    case = Case(tokens=32, dtype="float32")
    inputs = case.inputs()
    routing = Routing(jnp.asarray(case.routings(4)["half_dropped"]), inputs["weights"])
    arrays = inputs["tokens"], inputs["wi"], inputs["wo"], routing
    out = fused_ep_moe(*arrays, mesh=make_mesh(expert=4), method="replicated", **case.biases())
    assert relative_error(out, fused_ep_moe_reference(*arrays, **case.biases())) < 1e-5
