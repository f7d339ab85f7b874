"""Quantised weights read as stored by the Triton kernels, on an NVIDIA GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_base import distance

import moe_flax
from moe_flax import quantize
from moe_flax.experts import expert_ffn, expert_ffn_reference

pytestmark = pytest.mark.gpu
MAKE = {
    "block": quantize.quantize_blocks,
    "channel": quantize.quantize_channels,
    "mxfp4": quantize.quantize_mxfp4,
}
# T, E, K, D, F, activation, branches, biases, how wi and wo are held
CASES = {
    "short groups": (16, 8, 2, 384, 272, "silu", 2, True, "block", "block"),
    "groups of 16": (40, 8, 3, 320, 352, "gpt_oss", 2, True, "mxfp4", "mxfp4"),
    "groups of 64": (256, 8, 2, 512, 384, "silu", 2, False, "block", "block"),
    "groups of 64 mxfp4": (256, 8, 2, 512, 384, "silu", 2, True, "mxfp4", "mxfp4"),
    "ragged groups": (250, 4, 2, 256, 416, "silu", 2, True, "mxfp4", "block"),
    "no gate": (33, 4, 2, 256, 400, "relu2", 1, True, "channel", "channel"),
    "mixed": (60, 4, 2, 288, 448, "silu", 2, True, "mxfp4", "channel"),
    "no tile loads": (40, 4, 2, 264, 328, "silu", 2, True, "block", "block"),
    "odd widths": (40, 4, 2, 257, 451, "gelu", 2, True, "channel", "block"),
    "one token": (1, 8, 3, 256, 256, "silu", 2, False, "mxfp4", "mxfp4"),
    "many empty groups": (24, 512, 1, 256, 256, "silu", 2, True, "block", "block"),
    "dequantised ahead": (1200, 4, 2, 256, 256, "silu", 2, True, "mxfp4", "block"),
}


def operands(name: str):
    t, e, k, d, f, activation, j, biases, first, second = CASES[name]
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    x = normal(t, d).astype(jnp.bfloat16)
    wi, wi_scale = MAKE[first](1.5 * d**-0.5 * normal(e, j, f, d))
    wo, wo_scale = MAKE[second](1.5 * f**-0.5 * normal(e, d, f))
    scores, ids = jax.lax.top_k(normal(t, e), k)
    if t > 1:
        ids = ids.at[0, 0].set(e)  # a slot without an expert
    wi_bias, wo_bias = (normal(e, j, f), normal(e, d)) if biases else (None, None)

    def run(function, x, weights, wi_bias, wo_bias, **keywords):
        return function(
            x, wi, wo, moe_flax.Routing(ids, weights), activation=activation, wi_bias=wi_bias,
            wo_bias=wo_bias, wi_scale=wi_scale, wo_scale=wo_scale, transpose_weights=True,
            **keywords,
        )  # fmt: skip

    return run, (x, jax.nn.softmax(scores), wi_bias, wo_bias)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_against_the_reference(name):
    run, floats = operands(name)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, floats, cotangent):
        y, pull = jax.vjp(function, *floats)
        return jax.tree.leaves((y, pull(cotangent.astype(y.dtype))))

    cotangent = jax.random.normal(jax.random.key(9), floats[0].shape)
    actual = both(functools.partial(run, expert_ffn, backend="triton"), floats, cotangent)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), floats)
    wanted = both(functools.partial(run, expert_ffn_reference), wide, cotangent)
    for a, b in zip(actual, wanted, strict=True):
        assert distance(a, b) < 1.5e-2


@pytest.mark.parametrize("name", ["groups of 16", "groups of 64", "no tile loads"])
def test_a_nan_token_spoils_its_own_output_and_runs_give_the_same_bits(name):
    run, (x, *rest) = operands(name)
    call = jax.jit(functools.partial(run, expert_ffn, backend="triton"))
    clean = np.asarray(call(x, *rest), np.float32)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(call(x, *rest), np.float32), clean)
    spoilt = np.asarray(call(x.at[3].set(jnp.nan), *rest), np.float32)
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("kind", ["float32", "float8_e8m0fnu"])
def test_scales_of_mxfp4_in_other_dtypes(kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(40, 256)), jnp.bfloat16)
    wi, wi_scale = quantize.quantize_mxfp4(jnp.asarray(rng.normal(size=(4, 2, 320, 256)) / 16))
    wo, wo_scale = quantize.quantize_mxfp4(jnp.asarray(rng.normal(size=(4, 256, 320)) / 16))
    ids = jnp.asarray(rng.integers(0, 4, size=(40, 1)), jnp.int32)
    routing = moe_flax.Routing(ids, jnp.ones((40, 1)))

    def run(**scales):
        return expert_ffn(
            x, wi, wo, routing, transpose_weights=True, backend="triton", **scales
        )  # fmt: skip

    def wide(scale):
        if kind == "float32":
            return jnp.exp2(scale.astype(jnp.float32) - 127)
        return jax.lax.bitcast_convert_type(scale, kind)

    wanted = run(wi_scale=wi_scale, wo_scale=wo_scale)
    actual = run(wi_scale=wide(wi_scale), wo_scale=wide(wo_scale))
    np.testing.assert_array_equal(np.asarray(actual, np.float32), np.asarray(wanted, np.float32))
