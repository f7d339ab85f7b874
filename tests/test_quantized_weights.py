"""A layer that holds quantised experts computes what the same layer computes with their floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_flax import MoE, quantize
from moe_flax.quantized_weights import (
    QuantizedWeight,
    WeightScale,
    fits,
    fitting_window,
    is_packed,
    window_of,
)

D, F, E, K = 64, 128, 8, 2


def by_block(x):
    return quantize.quantize_blocks(x, block=32)


def by_tensor(x):
    scale = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True) / 448
    return (x / scale).astype(jnp.float8_e4m3fn), scale


def mxfp4(x):
    values, scales = quantize.quantize_mxfp4(x)
    return values, jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)


KINDS = {  # each takes [.., N, K] with the contraction last
    "block": by_block,
    "channel": quantize.quantize_channels,
    "tensor": by_tensor,
    "mxfp4": mxfp4,
}


def make(**kwargs):
    return MoE(D, F, E, K, rngs=nnx.Rngs(0), use_bias=True, **kwargs)


def held(kind, *, transposed, **kwargs):
    """(a layer with quantised experts, the layer with the floats that they stand for)."""
    layer, exact = make(**kwargs), make(**kwargs)
    found = []
    for name in ("wi", "wo"):
        weight = getattr(layer.experts, name)[...].swapaxes(-1, -2)
        values, scales = KINDS[kind](weight)
        getattr(exact.experts, name)[...] = quantize.dequantize(values, scales).swapaxes(-1, -2)
        if not transposed:
            values, scales = values.swapaxes(-1, -2), scales.swapaxes(-1, -2)
        found.append((values, scales))
    (wi, wi_scale), (wo, wo_scale) = found
    layer.experts.hold_quantized(wi, wo, wi_scale, wo_scale, transposed=transposed)
    return layer, exact


CASES = [
    (kind, transposed)
    for kind in KINDS
    for transposed in (False, True)
    if transposed or kind != "mxfp4"
]


def error(out, reference):
    return jnp.linalg.norm(out - reference) / jnp.linalg.norm(reference)


@pytest.mark.parametrize(
    ("kind", "transposed"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_on_one_device(kind, transposed):
    layer, exact = held(kind, transposed=transposed)
    x = jax.random.normal(jax.random.key(1), (24, D))
    assert error(nnx.jit(lambda m, x: m(x))(layer, x), exact(x)) < 1e-6
    narrow = layer(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    assert error(narrow.astype(jnp.float32), exact(x)) < 0.02


@pytest.mark.parametrize(
    ("kind", "transposed", "strategy", "shape", "axes"),
    [
        pytest.param(
            "block", False, "all_to_all", (4,), ("expert",), marks=pytest.mark.slow
        ),
        ("mxfp4", True, "all_gather", (2, 2), ("expert", "tensor")),
        pytest.param(
            "channel", True, "none", (2, 2), ("expert", "fsdp"), marks=pytest.mark.slow
        ),
        pytest.param(
            "mxfp4", True, "all_to_all", (2, 2, 2), ("expert", "fsdp", "tensor"),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(kind, transposed, strategy, (2, 2, 2), axes, marks=pytest.mark.slow)
            for kind, transposed in CASES
            for strategy in ("none", "all_gather", "all_to_all")
            for axes in (("expert", "fsdp", "tensor"),)
        ),
    ],
)  # fmt: skip
def test_on_a_mesh(kind, transposed, strategy, shape, axes):
    mesh = jax.make_mesh(shape, axes)
    layer, exact = held(kind, transposed=transposed, expert_parallel=strategy)
    x = jax.random.normal(jax.random.key(1), (24, D))
    expected = exact(x)
    with jax.set_mesh(mesh):
        out = nnx.jit(lambda m, x: m(x))(layer, x)
    assert error(out, expected) < 1e-6


def test_they_are_no_params():
    layer, _ = held("block", transposed=True)
    state = nnx.state(layer, nnx.Param)
    assert set(state["experts"]) == {"wi_bias", "wo_bias"}
    assert isinstance(layer.experts.wi, QuantizedWeight)
    assert isinstance(layer.experts.wo_scale, WeightScale)


@pytest.mark.slow
def test_gradients_pass_them_by():
    layer, exact = held("block", transposed=True)
    x = jax.random.normal(jax.random.key(1), (24, D))

    def loss(layer, x):
        return jnp.sum(layer(x) ** 2)

    got, wanted = nnx.grad(loss)(layer, x), nnx.grad(loss)(exact, x)
    for name in ("wi_bias", "wo_bias"):
        assert error(got["experts"][name][...], wanted["experts"][name][...]) < 1e-5
    assert error(got["router"]["kernel"][...], wanted["router"]["kernel"][...]) < 1e-5
    by_input = jax.grad(functools.partial(loss, layer))(x)
    assert error(by_input, jax.grad(functools.partial(loss, exact))(x)) < 1e-5


def test_split_merge_and_held_twice():
    layer, _ = held("mxfp4", transposed=True)
    assert is_packed(layer.experts.wi)
    x = jax.random.normal(jax.random.key(1), (24, D))
    again = nnx.merge(*nnx.split(layer))
    np.testing.assert_array_equal(again(x), layer(x))
    other, _ = held("channel", transposed=False)
    experts = other.experts
    again.experts.hold_quantized(
        experts.wi[...], experts.wo[...], experts.wi_scale[...], experts.wo_scale[...]
    )
    np.testing.assert_array_equal(again(x), other(x))


def test_one_weight_alone():
    layer, exact = held("block", transposed=True)
    wo = exact.experts.wo[...].swapaxes(1, 2)
    layer.experts.hold_quantized(
        layer.experts.wi[...], wo, layer.experts.wi_scale[...], transposed=True
    )
    assert layer.experts.wo_scale is None
    assert isinstance(layer.experts.wo, nnx.Param)
    x = jax.random.normal(jax.random.key(1), (24, D))
    assert error(layer(x), exact(x)) < 1e-6


def test_what_does_not_fit():
    layer, _ = held("mxfp4", transposed=True)
    wi, wo, a, b = (getattr(layer.experts, n)[...] for n in ("wi", "wo", "wi_scale", "wo_scale"))
    hold = layer.experts.hold_quantized
    with pytest.raises(ValueError, match="read transposed alone"):
        hold(wi, wo, a, b)
    with pytest.raises(ValueError, match=r"experts.wo must have shape \(8, 64, 64\)"):
        hold(wi, wo[:, :-1], a, b, transposed=True)
    with pytest.raises(TypeError, match=r"experts.wo of uint8 needs experts.wo_scale"):
        hold(wi, jnp.zeros((E, D, F), jnp.uint8), a, transposed=True)
    with pytest.raises(ValueError, match=r"wi_scale must have 4 axes and 8 experts"):
        hold(wi, wo, a[:1], b, transposed=True)
    with pytest.raises(ValueError, match=r"3 scales do not cover axis 3"):
        hold(wi, wo, jnp.ones((E, 2, 1, 3)), b, transposed=True)
    assert layer.experts.transposed
    assert is_packed(layer.experts.wi)


def test_scales_of_another_device_are_never_used():
    """192 values under two scales are windows of 128 and 64: two devices have 96 each."""
    layer = MoE(D, 192, E, K, rngs=nnx.Rngs(0))
    wi, wo = (w[...].astype(jnp.float8_e4m3fn) for w in (layer.experts.wi, layer.experts.wo))
    layer.experts.hold_quantized(wi, wo, jnp.ones((E, 1, 1, 2)), jnp.ones((E, 1, 1)))
    with (
        jax.set_mesh(jax.make_mesh((2,), ("tensor",))),
        pytest.raises(ValueError, match=r"2 scales over F = 192 do not divide .*'tensor': 2"),
    ):
        layer(jnp.ones((4, D)))


@pytest.mark.parametrize(
    "size", [32, 192, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 96, 256, 384))]
)
@pytest.mark.parametrize("packed", [False, True])
def test_windows_are_those_that_dequantize_takes(size, packed):
    """Marks of where a scale begins tell which window it took."""
    for count in (2, 3, 4, 5, 6, 12, size // 32, size // 16, size // 2, size - 1):
        if not 1 < count < size:
            continue
        window = window_of(size, count, packed=packed)
        values = jnp.full(size // 2, 0x22, jnp.uint8) if packed else jnp.ones(size)
        if window is None:
            with pytest.raises(ValueError, match="windows"):
                quantize.dequantize(values, jnp.arange(count, dtype=jnp.float32))
            continue
        got = quantize.dequantize(values, jnp.arange(count, dtype=jnp.float32))
        np.testing.assert_array_equal(got, np.arange(size) // window)


@pytest.mark.parametrize(
    ("size", "window", "shards", "expected"),
    [(256, 128, 2, 128), (192, 128, 1, 128), (192, 128, 2, 32), (24, 7, 1, 1), (384, 96, 2, 48)],
)
def test_fitting_window(size, window, shards, expected):
    assert fitting_window(size, window, shards) == expected
    assert expected == 1 or fits(size, expected, shards)
