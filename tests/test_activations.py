import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.activations import ACTIVATIONS, Activation, resolve_activation

erf = np.vectorize(math.erf)


def sigmoid(x):
    return np.where(
        x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))
    )


FUNCTIONS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}


def hidden(branches, scale=1.0, seed=0):
    """Normal values, with a few far out on both sides of every clamp."""
    x = np.random.default_rng(seed).normal(size=(5, branches, 64)) * scale
    x[0, :, :4] = [40.0, -40.0, 9.0, -9.0]
    x[1, -1, :4] = [40.0, -40.0, 9.0, -9.0]
    return x.astype(np.float32)


def distance(out, ref):
    return np.linalg.norm(out - ref) / np.linalg.norm(ref)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("branches", [1, 2])
def test_functions_equal_numpy(name, branches):
    x = hidden(branches)
    first = FUNCTIONS[name](x[:, 0].astype(np.float64))
    ref = first if branches == 1 else first * x[:, 1]
    assert distance(np.asarray(Activation(name)(jnp.asarray(x))), ref) < 1e-6
    assert distance(np.asarray(ACTIVATIONS[name](jnp.asarray(x))), ref) < 1e-6


def test_gate_is_the_first_branch():
    x = jnp.array([[[2.0], [-3.0]]])
    np.testing.assert_allclose(Activation("relu")(x), [[-6.0]])


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_gpt_oss_beyond_the_clamp(scale):
    x = hidden(2, scale)
    gate = np.minimum(x[:, 0].astype(np.float64), 7.0)
    up = np.clip(x[:, 1].astype(np.float64), -7.0, 7.0)
    ref = (up + 1) * gate * sigmoid(1.702 * gate)
    out = np.asarray(ACTIVATIONS["gpt_oss"](jnp.asarray(x)))
    assert distance(out, ref) < 1e-6
    np.testing.assert_allclose(out, ref, rtol=1e-4, atol=1e-5)  # far-out entries one by one


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("clamp", ["before", "after"])
@pytest.mark.parametrize("branches", [1, 2])
def test_clamps_equal_numpy(name, clamp, branches):
    x = hidden(branches, 3.0)
    gate = x[:, 0].astype(np.float64)
    if clamp == "before":
        first = FUNCTIONS[name](np.minimum(gate, 2.0))
    else:
        first = np.minimum(FUNCTIONS[name](gate), 2.0)
    ref = first if branches == 1 else first * (np.clip(x[:, 1], -2.0, 2.0) + 0.5)
    activation = Activation(name, up_offset=0.5, limit=2.0, clamp=clamp)
    np.testing.assert_allclose(activation(jnp.asarray(x)), ref, rtol=1e-4, atol=1e-5)


def test_alpha_is_the_slope():
    x = hidden(1)
    ref = x[:, 0] * sigmoid(2.5 * x[:, 0].astype(np.float64))
    np.testing.assert_allclose(Activation(alpha=2.5)(jnp.asarray(x)), ref, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_is_kept_and_gradients_are_finite(name, dtype):
    x = jnp.asarray(hidden(2), dtype)
    assert ACTIVATIONS[name](x).dtype == dtype
    gradient = jax.grad(lambda x: ACTIVATIONS[name](x).astype(jnp.float32).sum())(x)
    assert gradient.dtype == dtype
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


def test_bad_input():
    with pytest.raises(ValueError, match=r"1 or 2 branches on axis -2, got shape \(3, 4\)"):
        Activation()(jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=r"'swish' is not known; allowed: .*'gelu_tanh'"):
        Activation("swish")
    with pytest.raises(ValueError, match="clamp must be 'before' or 'after', got 'inside'"):
        Activation(clamp="inside")
    with pytest.raises(ValueError, match="alpha applies to silu only, got function 'relu'"):
        Activation("relu", alpha=2.0)
    with pytest.raises(ValueError, match="limit must be positive or None, got 0"):
        Activation(limit=0)
    for bad in ("swiglu", None, 3, ["silu"]):
        with pytest.raises(ValueError, match=r"is not known; allowed: .*'gpt_oss'.* or a moe_flax"):
            resolve_activation(bad)


def test_resolve():
    assert resolve_activation("gpt_oss") is ACTIVATIONS["gpt_oss"]
    own = Activation("gelu", limit=3.0)
    assert resolve_activation(own) is own
    assert not resolve_activation("relu2").gated
    assert resolve_activation("silu").gated
