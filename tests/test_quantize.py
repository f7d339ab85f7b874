"""Dequantisation against scales spread by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.quantize import dequantize, quantize_rows

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
