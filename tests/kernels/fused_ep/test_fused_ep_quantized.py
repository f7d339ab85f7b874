"""Quantised weights in the kernel against the dequantised float32 reference."""

import jax.numpy as jnp
import pytest
from fused_ep_case import SMALL, Case, check, make_mesh

from moe_flax.kernels.fused_ep.call import scale_window

BLOCK = "block"
SHORT = [("float8_e4m3fn", (BLOCK, BLOCK)), ("int8", (None, 128))]


def quantize(weight, dtype, window, columns):
    """Values and scales; a scale for ``window`` rows by ``columns`` columns."""
    *batch, depth, width = weight.shape
    dtype = jnp.dtype(dtype)
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    padded = jnp.pad(
        weight.astype(jnp.float32),
        [(0, 0)] * len(batch) + [(0, -depth % window), (0, -width % columns)],
    )
    rows, cols = padded.shape[-2] // window, padded.shape[-1] // columns
    blocks = padded.reshape(*batch, rows, window, cols, columns)
    scales = jnp.max(jnp.abs(blocks), axis=(-3, -1)) / largest
    values = blocks / scales[..., :, None, :, None]
    values = jnp.round(values) if dtype == jnp.int8 else values
    values = values.reshape(padded.shape)[..., :depth, :width].astype(dtype)
    return values, scales


def quantized_case(case, dtype, windows):
    inputs = case.inputs()
    extra = {}
    for name, window in zip(("wi", "wo"), windows, strict=True):
        depth = inputs[name].shape[-2]
        window, columns = (128, 128) if window == BLOCK else (window or depth, 1)
        inputs[name], extra[f"{name}_scale"] = quantize(inputs[name], dtype, window, columns)
    return inputs, extra


@pytest.mark.parametrize(
    ("dtype", "windows"),
    [
        pytest.param(
            dtype,
            windows,
            id=f"{dtype}-{windows}",
            marks=pytest.mark.interpret if (dtype, windows) in SHORT else pytest.mark.slow,
        )
        for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        for windows in ((None, None), (128, 64), (BLOCK, BLOCK), (None, 128))
    ],
)
def test_windows_channels_and_blocks(dtype, windows):
    case = Case(tokens=24, experts=4, features=256, hidden=384)
    inputs, extra = quantized_case(case, dtype, windows)
    ids = case.routings(2)["random"]
    check(case, make_mesh(expert=2), ids, inputs=inputs, extra=extra, tolerance=2e-2)


@pytest.mark.slow
def test_ragged_blocks_and_odd_windows():
    """The last block is cut short; windows of 10 are scaled ahead of the kernel."""
    case = Case(tokens=24, experts=4, features=320, hidden=200)
    for windows in ((BLOCK, BLOCK), (10, 10)):
        inputs, extra = quantized_case(case, "int8", windows)
        ids = case.routings(2)["random"]
        check(
            case,
            make_mesh(expert=2),
            ids,
            inputs=inputs,
            extra=extra | case.biases(),
            blocks=SMALL,
            tolerance=2e-2,
        )


def test_windows_from_their_number():
    assert scale_window(2880, 1) == 2880
    assert scale_window(2880, 23) == 128
    assert scale_window(512, 8) == 64
    with pytest.raises(ValueError, match="7 scales do not cover 512"):
        scale_window(512, 7)
