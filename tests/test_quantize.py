"""Dequantisation against scales spread by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.quantize import (
    dequantize,
    quantize_blocks,
    quantize_channels,
    quantize_mxfp4,
    quantize_rows,
)

E, D, F = 2, 130, 257


def spread(scales, shape, windows):
    """scales[i // window] for every index of every axis."""
    indices = [np.arange(size) // window for size, window in zip(shape, windows, strict=True)]
    return np.asarray(scales)[np.ix_(*indices)]


@pytest.mark.parametrize(
    ("shape", "scales_shape", "windows", "window"),
    [
        ((E, D, F), (E, 1, F), (1, D, 1), None),  # per output channel
        ((E, D, F), (1, 1, 1), (E, D, F), None),
        ((E, D, F), (E, D, F), (1, 1, 1), None),
        ((E, D, F), (E, 2, 3), (1, 128, 128), None),  # ragged blocks: 128, not 65
        ((E, 96, F), (E, 3, F), (1, 32, 1), None),  # sub-channel windows
        ((E, 2, 96, 300), (E, 2, 3, 3), (1, 1, 32, 128), None),  # one rule an axis
        ((E, 70, F), (E, 3, F), (1, 32, 1), 32),  # a ragged window that has to be given
        ((E, D, F), (E, 2, F), (1, 65, 1), 65),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_every_layout_of_scales(shape, scales_shape, windows, window, dtype):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.normal(size=shape) * 20, dtype)
    scales = jnp.asarray(rng.uniform(0.5, 2, size=scales_shape), jnp.float32)
    out = dequantize(values, scales, window=window)
    assert out.dtype == jnp.float32
    wanted = np.asarray(values, np.float32) * spread(scales, shape, windows)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("values", "scales", "window", "message"),
    [
        ((2, 8, 4), (2, 4), None, r"as many axes.*\(2, 4\) for \(2, 8, 4\)"),
        ((2, 70, 4), (2, 3, 4), None, r"axis 1 of scales must be 1, 70 or.*got 3"),
        ((2, 96, 4), (2, 3, 4), 64, r"ceil\(96 / window\), got 3.*window 64"),
        ((2, 96, 4), (2, 0, 4), None, "got 0"),
        ((2, 96, 4), (2, 3, 4), 0, "window 0"),
    ],
)
def test_scales_that_do_not_fit(values, scales, window, message):
    with pytest.raises(ValueError, match=message):
        dequantize(jnp.zeros(values, jnp.int8), jnp.zeros(scales), window=window)


def test_scales_have_gradients():
    values = jnp.asarray(np.random.default_rng(0).integers(-9, 9, size=(2, 130, 3)), jnp.int8)
    grad = jax.grad(lambda s: jnp.sum(dequantize(values, s)))(jnp.ones((2, 2, 1)))
    sums = np.asarray(values, np.float32)
    wanted = [[s[:128].sum(), s[128:].sum()] for s in sums]
    np.testing.assert_allclose(grad[..., 0], wanted)


def test_rows_to_float8():
    x = np.random.default_rng(0).normal(size=(3, 6, 40)).astype(np.float32)
    x[0, 1], x[0, 2, 5], x[0, 3] = 0, np.nan, 1e4 * x[0, 3]
    values, scales = quantize_rows(jnp.asarray(x), scale_ub=100.0)
    assert (values.dtype, scales.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    assert (values.shape, scales.shape) == (x.shape, (3, 6, 1))
    bound = np.maximum(np.minimum(np.abs(x).max(-1, keepdims=True), 100), 1e-12)
    np.testing.assert_allclose(scales, bound / 448, rtol=1e-6)
    back = np.asarray(dequantize(values, scales))
    assert not back[0, 1].any()
    assert np.isfinite(scales[0, 1])
    assert np.isnan(back[0, 2]).all()
    assert np.isfinite(np.delete(back[0], 2, 0)).all()
    np.testing.assert_allclose(np.abs(back[0, 3]).max(), 100, rtol=1e-6)
    # Half a step of 3 bits, or of the smallest numbers, which have fewer.
    apart = np.abs(back[1:] - x[1:])
    assert (apart <= np.maximum(np.abs(x[1:]) / 16, np.asarray(scales[1:]) / 1024)).all()
    assert apart.max() > 0.01


FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize(
    ("pairs", "windows", "scale_dtype"),
    [
        (48, 3, "float32"),
        (48, 3, "float8_e8m0fnu"),
        (40, 3, "uint8"),
        (48, 1, "uint8"),
        (8, 16, "f4"),
    ],
)
def test_packed_float4(pairs, windows, scale_dtype):
    """Each byte is two values, the low four bits first; windows of 32, the last perhaps ragged."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, size=(3, pairs), dtype=np.uint8)
    exponents = rng.integers(120, 135, size=(3, windows), dtype=np.uint8)
    factors = 2.0 ** (exponents.astype(np.float32) - 127)
    scales = jnp.asarray(factors)
    if scale_dtype == "float8_e8m0fnu":
        scales = scales.astype(scale_dtype)
    elif scale_dtype == "uint8":
        scales = jnp.asarray(exponents)
    values = np.stack([FLOAT4[packed & 15], FLOAT4[packed >> 4]], -1).reshape(3, -1)
    window = {1: 2 * pairs, 16: 1}.get(windows, 32)
    wanted = values * spread(factors, values.shape, (1, window))
    out = dequantize(jnp.asarray(packed), scales)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, wanted)


def test_scales_of_a_byte_at_their_ends():
    out = dequantize(
        jnp.full((1, 64), 0x22, jnp.uint8), jnp.asarray([[1, 254, 255, 127]], jnp.uint8)
    )
    np.testing.assert_array_equal(out[0, ::32], [2.0**-126, 2.0**127, np.nan, 1])


def test_mxfp4_rounds_to_the_nearest_and_halves_to_even():
    """The largest, 6, makes the scale 1; every midpoint and its neighbours on either side."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    even = np.array([0, 1, 1, 2, 2, 4, 4], np.float32)
    below, above = np.nextafter(middles, 0), np.nextafter(middles, 9)
    row = np.concatenate([middles, -middles, below, above, [6, 7.9, 0, -7]]).astype(np.float32)
    wanted = np.concatenate([even, -even, FLOAT4[:7], FLOAT4[1:8], [6, 6, 0, -6]])
    values, scales = jax.jit(quantize_mxfp4)(jnp.asarray(row)[None] * 2**-9)
    assert values.dtype == scales.dtype == jnp.uint8
    assert (values.shape, scales.shape) == ((1, 16), (1, 1))
    np.testing.assert_array_equal(jax.jit(dequantize)(values, scales)[0], wanted * 2**-9)


def test_mxfp4_of_zeros_nan_and_ragged_windows():
    x = jnp.zeros((2, 70)).at[0, 40].set(jnp.nan).at[1, 69].set(-3e-3)
    values, scales = jax.jit(quantize_mxfp4)(x)
    assert (values.shape, scales.shape) == ((2, 35), (2, 3))
    out = np.asarray(jax.jit(dequantize)(values, scales))
    assert np.isnan(out[0, 32:64]).all()
    assert not out[0, :32].any()
    assert not out[1, :69].any()
    np.testing.assert_allclose(out[1, 69], -3e-3, rtol=0.26)
    with pytest.raises(ValueError, match="must be even, got 7"):
        quantize_mxfp4(jnp.zeros((2, 7)))


def test_quantised_blocks_and_channels():
    """Within half a step of what was quantised; the largest of each block is exact."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 130, 257)) * np.exp(rng.normal(size=(2, 130, 1)))
    x[0, :128, :128] = 0
    x = jnp.asarray(x, jnp.float32)
    values, scales = jax.jit(quantize_blocks)(x)
    assert (values.dtype, scales.shape) == (jnp.float8_e4m3fn, (2, 2, 3))
    out = jax.jit(dequantize)(values, scales)
    np.testing.assert_allclose(out, x, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    block = np.abs(x[1, :128, 128:256])
    np.testing.assert_allclose(np.abs(out[1, :128, 128:256]).max(), block.max(), rtol=1e-6)
    assert not out[0, :128, :128].any()
    for axis, shape in ((-1, (2, 130, 1)), (-2, (2, 1, 257))):
        values, scales = quantize_channels(x, axis=axis)
        assert (values.dtype, scales.shape) == (jnp.int8, shape)
        error = np.abs(dequantize(values, scales) - x)
        assert (error <= 0.501 * np.broadcast_to(scales, x.shape)).all()
        largest = np.abs(x).max(axis)
        np.testing.assert_allclose(
            127 * np.asarray(scales).squeeze(axis), np.where(largest, largest, 127), rtol=1e-6
        )
