"""The FFN with float8 activations: what it computes, its odd rows and its errors, on a CPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import moe_flax
from moe_flax.experts import expert_ffn, expert_ffn_reference

T, E, K, D, F = 10, 3, 2, 32, 24


def rounded(x, bound=np.inf):
    """`quantize_rows` in numpy."""
    scale = np.minimum(np.abs(x).max(-1, keepdims=True), bound) / np.float32(448)
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def operands(apply_to="output"):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    x = normal(T, D)
    (wi, wi_scale), (wo, wo_scale) = rounded(normal(E, 2, F, D) / 6), rounded(normal(E, D, F) / 5)
    ids = np.argsort(normal(T, E), axis=-1)[:, :K].astype(np.int32)
    ids[0] = E
    weights = rng.uniform(0.2, 1, size=ids.shape).astype(np.float32)
    routing = moe_flax.Routing(jnp.asarray(ids), jnp.asarray(weights), apply_to=apply_to)
    options = {
        "wi_bias": jnp.asarray(normal(E, 2, F)),
        "wo_bias": jnp.asarray(normal(E, D)),
        "wi_scale": jnp.asarray(wi_scale),
        "wo_scale": jnp.asarray(wo_scale),
        "transpose_weights": True,
        "act_qtype": jnp.float8_e4m3fn,
    }
    return jnp.asarray(x), jnp.asarray(wi), jnp.asarray(wo), routing, options


def wide(values, scales):
    return np.asarray(values, np.float32) * np.asarray(scales)


def plain(x, wi, wo, routing, options, scale_ub=np.inf):
    """One token and one expert at a time, in numpy and float32."""
    wi, wo = wide(wi, options["wi_scale"]), wide(wo, options["wo_scale"])
    ids, weights = np.asarray(routing.expert_ids), np.asarray(routing.weights)

    y = np.zeros((T, D), np.float32)
    for t in range(T):
        for expert, weight in zip(ids[t], weights[t], strict=True):
            if expert < E:
                row = np.asarray(x[t], np.float32)
                row = row * weight if routing.apply_to == "input" else row
                row = wide(*rounded(row, scale_ub))
                gate, up = wi[expert] @ row + np.asarray(options["wi_bias"][expert])
                hidden = wide(*rounded(gate / (1 + np.exp(-gate)) * up, scale_ub))
                out = wo[expert] @ hidden + np.asarray(options["wo_bias"][expert])
                y[t] += out * (1 if routing.apply_to == "input" else weight)
    return y


def plain_without_rounding(x, wi, wo, routing, options):
    matrices = (
        jnp.asarray(wide(w, options[f"{name}_scale"]).swapaxes(-1, -2))
        for w, name in ((wi, "wi"), (wo, "wo"))
    )
    biases = {name: options[name] for name in ("wi_bias", "wo_bias")}
    return jax.jit(expert_ffn_reference)(x, *matrices, routing, **biases)


@pytest.mark.parametrize(("apply_to", "bound"), [("output", np.inf), ("input", 1.5)])
def test_equal_to_plain_numpy(apply_to, bound):
    x, wi, wo, routing, options = operands(apply_to)
    scale_ub = None if bound == np.inf else bound
    run = functools.partial(expert_ffn, scale_ub=scale_ub, backend="reference", **options)
    y = jax.jit(run)(x, wi, wo, routing)
    wanted = plain(x, wi, wo, routing, options, bound)
    # A value on the edge between two float8 may round either way.
    assert np.linalg.norm(y - wanted) < 5e-3 * np.linalg.norm(wanted)
    assert not y[0].any()
    exact = plain_without_rounding(x, wi, wo, routing, options)
    apart = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert 1e-2 < apart < (0.06 if scale_ub is None else 1)


def test_odd_rows_and_backends():
    x, wi, wo, routing, options = operands()
    run = jax.jit(
        functools.partial(expert_ffn, routing=routing, **options), static_argnames="backend"
    )
    clean = run(x, wi, wo, backend="cpu")
    spoilt = run(x.at[3, 1].set(jnp.nan).at[4].set(0), wi, wo, backend="cpu")
    others = ~np.isin(np.arange(T), (3, 4))
    np.testing.assert_array_equal(spoilt[others], clean[others])
    assert np.isnan(spoilt[3]).all()
    assert np.isfinite(spoilt[4]).all()
    np.testing.assert_allclose(run(x, wi, wo, backend="xla"), clean, atol=2e-2)


def test_errors():
    x, wi, wo, routing, options = operands()
    run = functools.partial(expert_ffn, routing=routing, backend="reference")
    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda x: run(x, wi, wo, **options).sum())(x)
    with pytest.raises(TypeError, match=r"act_qtype must be None or float8_e4m3fn, got int8"):
        run(x, wi, wo, **options | {"act_qtype": jnp.int8})
    for change in (
        {"transpose_weights": False},
        {"wi_scale": options["wi_scale"].swapaxes(-1, -2)},
        {"wo_scale": None},
    ):
        with pytest.raises(ValueError, match=r"needs transpose_weights=True and w[io] in f"):
            run(x, wi, wo, **options | change)
    with pytest.raises(ValueError, match="needs transpose_weights"):
        run(x, wi.astype(jnp.float32), wo, **options)
    with pytest.raises(ValueError, match="scale_ub must be None or a number above 0, got 0"):
        run(x, wi, wo, scale_ub=0, **options)
    with pytest.raises(ValueError, match="give act_qtype too"):
        run(x, wi, wo, scale_ub=1.0, **options | {"act_qtype": None})
    short = options | {"wo_scale": options["wo_scale"][:, :-1]}
    with pytest.raises(ValueError, match="wo must have shape"):
        run(x, wi, wo[:, :-1], **short)
