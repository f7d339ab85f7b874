"""Float8 products and the float8 layer on an NVIDIA GPU, against plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_base import distance

import moe_flax
from moe_flax.activations import resolve_activation
from moe_flax.experts import expert_ffn, expert_ffn_reference
from moe_flax.kernels.grouped_matmul import grouped_matmul
from moe_flax.quantize import dequantize, quantize_rows

pytest.importorskip("triton")
from moe_flax.kernels.grouped_matmul.triton import ffn_float8, quantizing

pytestmark = pytest.mark.gpu
# M, G, K, N: MSLK's shapes, and widths that tiles do not divide
PRODUCTS = [
    (m, g, 256, 256) for m in (0, 128, 2048, 16384) for g in (1, 4, 16, 128)
] + [(300, 4, 272, 264), (300, 4, 257, 451), (40, 4, 512, 1040), (5, 8, 144, 96)]  # fmt: skip
# T, E, K, D, F, activation, branches, biases, scale_ub, apply_to, dtype
LAYERS = {
    "long groups": (1200, 4, 2, 512, 1024, "silu", 2, False, None, "output", "bfloat16"),
    "clamped": (1200, 4, 2, 576, 1040, "gpt_oss", 2, True, 3.0, "output", "bfloat16"),
    "no gate": (900, 4, 2, 256, 528, "relu2", 1, True, None, "output", "bfloat16"),
    "short groups": (64, 8, 2, 512, 768, "silu", 2, True, None, "output", "bfloat16"),
    "one row a group": (16, 64, 2, 272, 320, "silu", 2, False, None, "output", "bfloat16"),
    "odd widths": (300, 4, 3, 257, 451, "gelu", 2, True, None, "output", "bfloat16"),
    "input weights": (300, 4, 2, 128, 192, "silu", 2, True, None, "input", "bfloat16"),
    "float32": (300, 4, 2, 256, 320, "silu", 2, True, None, "output", "float32"),
    "long rows": (64, 2, 1, 128, 20000, "silu", 2, False, None, "output", "bfloat16"),
}


def normal(seed, shape, scale=1.0, dtype="float32"):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


@pytest.mark.parametrize(("rows", "groups", "k", "n"), PRODUCTS)
def test_product(rows, groups, k, n):
    rng = np.random.default_rng(rows + groups)
    ends = np.sort(rng.integers(0, max(rows, 1), size=groups - 1)).tolist()
    sizes = np.diff([0, *ends, max(rows - 7, 0)]).clip(0)
    lhs, lhs_scale = quantize_rows(normal(0, (rows, k)))
    rhs, rhs_scale = quantize_rows(normal(1, (groups, n, k), k**-0.5))
    end = int(sizes.sum())
    lhs_scale = lhs_scale.at[end:].set(jnp.nan)
    out = grouped_matmul(
        lhs, rhs, jnp.asarray(sizes), transpose_rhs=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale,
        backend="triton",
    )  # fmt: skip
    assert out.dtype == jnp.bfloat16
    assert out.shape == (rows, n)
    assert not out[end:].any()
    if end:
        wide = np.asarray(dequantize(lhs, lhs_scale)), np.asarray(dequantize(rhs, rhs_scale))
        group = np.repeat(np.arange(groups), sizes)
        wanted = np.concatenate([wide[0][:end][group == g] @ wide[1][g].T for g in range(groups)])
        assert distance(out[:end].astype(jnp.float32), jnp.asarray(wanted)) < 5e-3


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [96, 5000, 20000])
def test_rows_are_quantised_as_in_plain_jax(width, gated):
    shape = (37, 2, width) if gated else (37, width)
    x = normal(0, shape, dtype="bfloat16")
    x = x.at[3].set(0).at[4, ..., 2].set(jnp.nan).at[5].multiply(1000)
    activation = moe_flax.Activation() if gated else None
    values, scales = quantizing.quantize_rows(x, scale_ub=50.0, activation=activation)
    plain = x.astype(jnp.float32)
    others, wanted = quantize_rows(activation(plain) if activation else plain, scale_ub=50.0)
    np.testing.assert_allclose(scales, wanted[:, 0], rtol=1e-5)
    assert np.isnan(scales[4])
    fine = np.arange(37) != 4
    a, b = (np.asarray(v, np.float32)[fine] for v in (values, others))
    np.testing.assert_allclose(a, b, rtol=0.13, atol=2**-8)  # a step, for those on an edge
    assert (a != b).mean() < 1e-2


def operands(case):
    tokens, experts, top_k, features, hidden, name, branches, biases, scale_ub, apply_to, dtype = (
        case
    )
    x = normal(0, (tokens, features), dtype=dtype).at[0].set(0).at[1].multiply(30)
    wi, wi_scale = quantize_rows(normal(1, (experts, branches, hidden, features), features**-0.5))
    wo, wo_scale = quantize_rows(normal(2, (experts, features, hidden), hidden**-0.5))
    scores, ids = jax.lax.top_k(normal(3, (tokens, experts)), top_k)
    ids = jnp.where(ids == 1, experts, ids)  # an expert without rows
    routing = moe_flax.Routing(ids, jax.nn.softmax(scores), apply_to=apply_to)
    options = {
        "activation": name, "scale_ub": scale_ub, "wi_scale": wi_scale, "wo_scale": wo_scale,
        "wi_bias": normal(4, (experts, branches, hidden)) if biases else None,
        "wo_bias": normal(5, (experts, features)) if biases else None,
        "transpose_weights": True, "act_qtype": jnp.float8_e4m3fn,
    }  # fmt: skip
    return x, wi, wo, routing, options


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """As far from the layer without rounded activations as the emulation in plain JAX is.

    The two differ by more than their products do: where hidden values are 1e-3 apart, one in fifty
    lies on the other side of an edge between two float8, a step of 1e-1.
    """
    x, wi, wo, routing, options = operands(LAYERS[name])

    def run(x, backend):
        return expert_ffn(x, wi, wo, routing, backend=backend, **options)

    run = jax.jit(run, static_argnums=1)
    y, wanted = run(x, "triton"), run(x, "reference")
    names = ("activation", "wi_scale", "wo_scale", "wi_bias", "wo_bias", "transpose_weights")
    exact = jax.jit(
        lambda x: expert_ffn_reference(x, wi, wo, routing, **{n: options[n] for n in names})
    )(x.astype(jnp.float32))
    for rows in (np.arange(len(x)) != 1, np.arange(len(x)) == 1):  # the large row outweighs others
        ours, emulated, right = (np.asarray(a, np.float32)[rows] for a in (y, wanted, exact))
        if right.any():
            assert distance(ours, emulated) < 5e-2
            far, others = distance(ours, right), distance(emulated, right)
            assert far < 1.3 * others if rows.sum() == 1 else abs(far / others - 1) < 0.1
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(run(x, "triton")), np.asarray(y))
    spoilt = np.asarray(run(x.at[5, 7].set(jnp.nan), "triton"), np.float32)
    others = np.arange(len(x)) != 5
    np.testing.assert_array_equal(spoilt[others], np.asarray(y, np.float32)[others])
    assert np.isnan(spoilt[5]).all() or not (np.asarray(routing.expert_ids[5]) < len(wi)).any()


def test_the_activation_apart_from_the_product():
    case = LAYERS["clamped"]
    x, wi, wo, routing, options = operands(case)
    call = ffn_float8.make_call(resolve_activation(case[5]), 3.0, wi, routing.expert_ids)
    weights = [options[n] for n in ("wi_scale", "wo_scale", "wi_bias", "wo_bias")]
    results = []
    for fused in (True, False):
        up = call.up if fused else call.down
        run = functools.partial(
            ffn_float8.routed_ffn, dataclasses.replace(call, fused=fused, up=up)
        )
        results.append(jax.jit(run)(x, wi, wo, *weights, routing.expert_ids, routing.weights))
    assert distance(*(y.astype(jnp.float32) for y in results)) < 2e-2


def test_vmap_runs_one_after_another():
    x, wi, wo, routing, options = operands(LAYERS["short groups"])

    def run(x):
        return expert_ffn(x, wi, wo, routing, backend="triton", **options)

    y = jax.jit(jax.vmap(run))(jnp.stack([x, 2 * x]))
    np.testing.assert_array_equal(np.asarray(y[0]), np.asarray(run(x)))
