"""`expert_ffn` against its plain reference, and what a routing may hold."""

import dataclasses
import sys
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_grids import LAYERS, PublishedLayers, operands, padded_ffn, smaller
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe_flax.activations import Activation
from moe_flax.experts import expert_ffn, expert_ffn_reference
from moe_flax.quantize import dequantize, quantize_blocks, quantize_mxfp4
from moe_flax.routing import Routing


def layer(t=12, k=2, e=4, d=16, f=24, j=2, bias=True, apply_to="output", seed=0):
    """Operands of order 1 with outputs of order 1: (arguments by name, expert ids, apply_to)."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    arrays = {
        "tokens": normal(t, d),
        "weights": jnp.asarray(rng.uniform(0.2, 1, size=(t, k)), jnp.float32),
        "wi": normal(e, j, d, f, scale=2 * d**-0.5),
        "wo": normal(e, f, d, scale=f**-0.5),
    }
    if bias:
        arrays |= {"wi_bias": normal(e, j, f), "wo_bias": normal(e, d)}
    ids = np.array([rng.permutation(max(e, k))[:k] for _ in range(t)]).reshape(t, k)
    return arrays, jnp.asarray(ids, jnp.int32), apply_to


def run(function, arrays, ids, apply_to, **keywords):
    arrays = dict(arrays)
    routing = Routing(ids, arrays.pop("weights"), apply_to=apply_to)
    tokens, wi, wo = (arrays.pop(name) for name in ("tokens", "wi", "wo"))
    return function(tokens, wi, wo, routing, **arrays, **keywords)


def output_and_gradients(function, arrays, ids, apply_to, **keywords):
    @jax.jit
    def both(arrays, ids):
        out, pull = jax.vjp(lambda a: run(function, a, ids, apply_to, **keywords), arrays)
        grad = np.random.default_rng(5).normal(size=out.shape)
        return {"out": out, **pull(jnp.asarray(grad, out.dtype))[0]}

    return both(arrays, ids)


def distance(actual, wanted) -> float:
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    return float(np.linalg.norm(actual - wanted) / max(np.linalg.norm(wanted), 1e-30))


def check(arrays, ids, apply_to, tolerance=2e-6, **keywords):
    backend = keywords.pop("backend", "auto")
    actual = output_and_gradients(expert_ffn, arrays, ids, apply_to, backend=backend, **keywords)
    wanted = output_and_gradients(expert_ffn_reference, arrays, ids, apply_to, **keywords)
    assert {n: x.dtype for n, x in actual.items()} == {n: x.dtype for n, x in wanted.items()}
    for name in wanted:
        assert distance(actual[name], wanted[name]) < tolerance, name


@pytest.mark.parametrize("apply_to", ["output", pytest.param("input", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("j", "activation", "bias"),
    [
        (2, "silu", False),
        (2, "gpt_oss", True),
        (1, "relu2", True),
        (1, Activation("silu", alpha=1.7, limit=0.5), False),
    ],
)
def test_equals_the_reference(j, activation, bias, apply_to):
    check(*layer(j=j, bias=bias, apply_to=apply_to), activation=activation)


class TestCpu(PublishedLayers):
    backend = "cpu"


def test_the_published_layers_reference_is_the_reference():
    floats, ids, _ = operands(smaller(LAYERS["scatter 256 100 3 bias"]))
    tokens, wi, wo, weights, wi_bias, wo_bias = floats
    routing = Routing(jnp.asarray(ids), weights)
    wanted = expert_ffn_reference(tokens, wi, wo, routing, wi_bias=wi_bias, wo_bias=wo_bias)
    assert distance(padded_ffn(floats, ids, "silu"), wanted) < 2e-6


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_other_backends(backend):
    check(*layer(), backend=backend)


@pytest.mark.parametrize(
    "sizes",
    [
        {"t": 0},
        {"t": 1},
        {"e": 1, "k": 1},
        pytest.param({"k": 4}, marks=pytest.mark.slow),
        {"d": 100, "f": 257, "t": 40},
        {"t": 200, "e": 2, "k": 1},
        {"t": 30, "e": 512, "k": 8, "d": 8, "f": 12},
        pytest.param({"t": 20, "d": 264, "f": 451}, marks=pytest.mark.slow),
    ],
)
def test_sizes(sizes):
    check(*layer(**sizes))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("apply_to", [pytest.param("output", marks=pytest.mark.slow), "input"])
def test_narrow_dtypes(dtype, tolerance, apply_to):
    arrays, ids, _ = layer(t=40, d=64, f=96, apply_to=apply_to)
    weights = arrays.pop("weights")
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    check(arrays | {"weights": weights}, ids, apply_to, tolerance)


def test_narrow_tokens_with_wide_weights():
    arrays, ids, apply_to = layer()
    arrays["tokens"] = arrays["tokens"].astype(jnp.bfloat16)
    check(arrays, ids, apply_to, 5e-3)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans())
def test_slots_without_an_expert(seed, skewed):
    """Any mix of experts and ids outside [0, E); tokens and weights of the latter are NaN."""
    arrays, ids, _ = layer()
    rng = np.random.default_rng(seed)
    drop = rng.random(ids.shape) < 0.4
    ids = np.where(drop, rng.choice([-1, 4, 99], size=ids.shape), np.asarray(ids))
    if skewed:
        ids[:, 0], ids[:, 1] = 2, 4
    inside = (ids >= 0) & (ids < 4)
    poisoned = dict(arrays)
    poisoned["weights"] = jnp.where(inside, arrays["weights"], jnp.nan)
    poisoned["tokens"] = jnp.where(inside.any(1)[:, None], arrays["tokens"], jnp.nan)
    actual = _jitted(poisoned, jnp.asarray(ids))
    wanted = _jitted_reference(arrays, jnp.asarray(ids))
    for name in wanted:
        assert distance(actual[name], wanted[name]) < 2e-6, name
    assert not np.asarray(actual["out"])[~inside.any(1)].any()


def _both(function):
    @jax.jit
    def both(arrays, ids):
        out, pull = jax.vjp(lambda a: run(function, a, ids, "output"), arrays)
        return {"out": out, **pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))[0]}

    return both


_jitted, _jitted_reference = _both(expert_ffn), _both(expert_ffn_reference)


@pytest.mark.parametrize("apply_to", ["output", "input"])
def test_a_nan_token_spoils_its_own_output_only(apply_to):
    arrays, ids, _ = layer(apply_to=apply_to)
    clean = run(expert_ffn, arrays, ids, apply_to)
    arrays["tokens"] = arrays["tokens"].at[3].set(jnp.nan)
    spoilt = np.asarray(run(expert_ffn, arrays, ids, apply_to))
    assert np.isnan(spoilt[3]).all()
    np.testing.assert_array_equal(np.delete(spoilt, 3, 0), np.delete(clean, 3, 0))


def test_experts_without_tokens_have_exactly_zero_gradients():
    arrays, ids, apply_to = layer()
    ids = jnp.where(ids == 1, 4, ids)
    gradients = output_and_gradients(expert_ffn, arrays, ids, apply_to)
    for name in ("wi", "wo", "wi_bias", "wo_bias"):
        assert not np.asarray(gradients[name])[1].any(), name
        assert np.asarray(gradients[name])[0].any(), name


def test_same_bits_twice():
    arrays, ids, apply_to = layer(t=40, d=100, f=257)
    first, second = (output_and_gradients(expert_ffn, arrays, ids, apply_to) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]))


@pytest.mark.slow
def test_vmap_over_tokens_and_routings():
    arrays, ids, apply_to = layer(t=24)
    rows = {name: arrays.pop(name).reshape(2, 12, -1) for name in ("tokens", "weights")}

    def gradients(rows, ids):
        def loss(rows):
            return jnp.sum(jnp.sin(run(expert_ffn, arrays | rows, ids, apply_to)))

        return jax.value_and_grad(loss)(rows)

    ids = ids.reshape(2, 12, -1)
    actual = jax.jit(jax.vmap(gradients))(rows, ids)
    for i in range(2):
        wanted = gradients(jax.tree.map(lambda x: x[i], rows), ids[i])  # noqa: B023
        for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            assert distance(a[i], w) < 2e-6


def test_order_of_the_choices_does_not_matter_to_a_row():
    arrays, ids, apply_to = layer(k=3)
    out = run(expert_ffn, arrays, ids, apply_to)
    turned = arrays | {"weights": arrays["weights"][:, ::-1]}
    assert distance(run(expert_ffn, turned, ids[:, ::-1], apply_to), out) < 1e-6


def test_quantised_weights():
    arrays, ids, apply_to = layer(d=130, f=64)
    rng = np.random.default_rng(1)
    quantised = {
        "wi": jnp.asarray(rng.integers(-127, 128, size=arrays["wi"].shape), jnp.int8),
        "wo": jnp.asarray(rng.normal(size=arrays["wo"].shape) * 30, jnp.float8_e4m3fn),
        "wi_scale": jnp.asarray(rng.uniform(0.5, 2, size=(4, 2, 2, 1)) / 1000, jnp.float32),
        "wo_scale": jnp.asarray(rng.uniform(0.5, 2, size=(4, 1, 130)) / 200, jnp.float32),
    }
    out = run(expert_ffn, arrays | quantised, ids, apply_to)
    wide = arrays | {
        "wi": jnp.asarray(quantised["wi"], jnp.float32)
        * np.repeat(quantised["wi_scale"], 128, 2)[:, :, :130],
        "wo": jnp.asarray(quantised["wo"], jnp.float32) * quantised["wo_scale"],
    }
    assert distance(out, run(expert_ffn_reference, wide, ids, apply_to)) < 2e-6


def transposed(arrays):
    return arrays | {name: arrays[name].swapaxes(-1, -2) for name in ("wi", "wo")}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_transposed_weights_and_their_gradients(backend):
    arrays, ids, apply_to = layer()
    wanted = output_and_gradients(expert_ffn_reference, arrays, ids, apply_to)
    turned = transposed(arrays)
    for function, keywords in ((expert_ffn, {"backend": backend}), (expert_ffn_reference, {})):
        actual = output_and_gradients(
            function, turned, ids, apply_to, transpose_weights=True, **keywords
        )
        actual = transposed(actual)
        for name in wanted:
            assert distance(actual[name], wanted[name]) < 2e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("quantise", [quantize_mxfp4, quantize_blocks])
def test_transposed_quantised_weights(quantise):
    arrays, ids, apply_to = layer(d=160, f=70)
    arrays = transposed(arrays)
    kept = dict(arrays)
    for name in ("wi", "wo"):
        kept[name], kept[f"{name}_scale"] = jax.jit(quantise)(arrays[name])
        arrays[name] = jax.jit(dequantize)(kept[name], kept[f"{name}_scale"])
    out = run(expert_ffn, kept, ids, apply_to, transpose_weights=True)
    wanted = run(expert_ffn_reference, arrays, ids, apply_to, transpose_weights=True)
    assert distance(out, wanted) < 2e-6


def test_packed_weights_that_do_not_fit():
    arrays, ids, _ = layer()
    packed = {"wi": jnp.zeros((4, 2, 24, 8), jnp.uint8), "wi_scale": jnp.ones((4, 2, 24, 1))}
    with pytest.raises(ValueError, match="pass transpose_weights=True"):
        run(expert_ffn, arrays | packed, ids, "output")
    arrays = transposed(arrays) | packed
    for name, change, message in (
        ("wi", jnp.zeros((4, 2, 24, 16), jnp.uint8), r"wi must have shape \(4, 2, 24, 8\)"),
        ("tokens", arrays["tokens"][:, :15], r"D must be even .*, got 15"),
        ("wo", arrays["wi"], r"wo \[E, D, F\]"),
    ):
        with pytest.raises(ValueError, match=message):
            run(expert_ffn, arrays | {name: change}, ids, "output", transpose_weights=True)


def test_tokens_sharded_and_experts_replicated_under_shard_map():
    mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[:8])
    arrays, ids, apply_to = layer(t=40)
    ids = ids.at[:5].set(4)  # one device has no token of an expert
    specs = {name: P("data") if name in ("tokens", "weights") else P() for name in arrays}

    def local(arrays, ids):
        out = run(expert_ffn, arrays, ids, apply_to)
        return jax.lax.psum(jnp.sum(jnp.sin(out)), "data")

    def sharded(arrays):
        put = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), arrays, specs)
        given = (put, jax.device_put(ids, NamedSharding(mesh, P("data"))))
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())(*given)

    def plain(arrays):
        return jnp.sum(jnp.sin(run(expert_ffn_reference, arrays, ids, apply_to)))

    actual, wanted = (jax.jit(jax.value_and_grad(f))(arrays) for f in (sharded, plain))
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert distance(a, w) < 5e-6


def test_a_backend_may_bring_the_whole_ffn(monkeypatch):
    seen = {}

    def whole(tokens, wi, wo, routing, **keywords):
        seen.update(keywords, routing=routing)
        return tokens + 1

    name = "moe_flax.kernels.grouped_matmul.cpu"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(expert_ffn=whole))
    arrays, ids, _ = layer()
    out = run(expert_ffn, arrays, ids, "input", activation="gpt_oss", backend="cpu")
    np.testing.assert_array_equal(out, arrays["tokens"] + 1)
    assert seen["activation"] == Activation("silu", alpha=1.702, up_offset=1.0, limit=7.0)
    assert seen["routing"].apply_to == "input"
    np.testing.assert_array_equal(seen["wo_bias"], arrays["wo_bias"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokens": (12, 2, 16)}, ValueError, r"tokens \[T, D\], got shape \(12, 2, 16\)"),
        ({"tokens": (12, 15)}, ValueError, r"wi must have shape \(4, 2, 15, 24\)"),
        ({"wi": (4, 16, 24)}, ValueError, r"wi \[E, J, D, F\]"),
        ({"wi": (4, 3, 16, 24), "wi_bias": None}, ValueError, r"2 \(gate, up\) or 1"),
        ({"wo": (4, 16, 24)}, ValueError, r"wo must have shape \(4, 24, 16\)"),
        ({"wi_bias": (4, 24)}, ValueError, r"wi_bias must have shape \(4, 2, 24\)"),
        ({"wo_bias": (3, 16)}, ValueError, r"wo_bias must have shape \(4, 16\)"),
        ({"weights": (12, 3)}, ValueError, r"routing.weights must have shape \(12, 2\)"),
        ({"tokens": jnp.int32}, TypeError, "tokens must have a dtype of .*float32.*int32"),
        ({"wi": jnp.int8}, TypeError, "wi must .*int8; quantised weights need wi_scale"),
    ],
)
def test_operands_that_do_not_fit(change, error, message):
    arrays, ids, apply_to = layer()
    for name, new in change.items():
        if new is None:
            arrays.pop(name)
        else:
            arrays[name] = jnp.zeros(new) if isinstance(new, tuple) else arrays[name].astype(new)
    with pytest.raises(error, match=message):
        run(expert_ffn, arrays, ids, apply_to)


def test_routings_and_activations_that_do_not_fit():
    arrays, ids, _ = layer()
    with pytest.raises(ValueError, match=r"expert_ids must have shape \(12, 2\), got \(11, 2\)"):
        run(expert_ffn, arrays, ids[1:], "output")
    with pytest.raises(ValueError, match="'output' or 'input', got 'both'"):
        run(expert_ffn, arrays, ids, "both")
    with pytest.raises(TypeError, match="integer"):
        run(expert_ffn, arrays, ids.astype(jnp.float32), "output")
    with pytest.raises(ValueError, match="'swish' is not known; allowed"):
        run(expert_ffn, arrays, ids, "output", activation="swish")
    with pytest.raises(ValueError, match="'fast' is not known; allowed"):
        run(expert_ffn, arrays, ids, "output", backend="fast")
    single, ids, _ = layer(j=1)
    offset = dataclasses.replace(Activation(), up_offset=1.0)
    for activation in ("gpt_oss", offset):
        with pytest.raises(ValueError, match=r"wi must be \[E, 2, D, F\], got \(4, 1, 16, 24\)"):
            run(expert_ffn, single, ids, "output", activation=activation)
