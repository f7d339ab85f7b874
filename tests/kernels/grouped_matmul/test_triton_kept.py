"""Which K meets which in the Hopper kernel for quantised weights, whose steps no interpreter runs.

Here they run on numpy arrays: what a thread does with its bytes, and the order of the rows' K.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_flax import quantize

pytest.importorskip("jax_triton")
pytestmark = pytest.mark.triton
N, K = 8, 512


def ordered(w):
    """`_ordered` of [N, 128]: two [N, 64]."""
    w = w.reshape(N, 4, 2, 4, 2, 2).transpose(0, 3, 4, 1, 5, 2).reshape(N, 64, 2)
    return [w[..., 0], w[..., 1]]


def halves(words):
    """The two bfloat16 of 32 bits, as float64."""
    pairs = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint16)
    return pairs.view(ml_dtypes.bfloat16).astype(np.float64)


def mxfp4_parts(packed, exponents):
    """`_windows` and `_mxfp4` of a step's bytes [N, 128] and scales [N, 8]."""
    words = np.ascontiguousarray(packed).view(np.uint32)  # [N, 32]
    bits = np.minimum(exponents.astype(np.uint32) + 63, 254) << 7
    scale = halves(np.repeat(bits | bits << 16, 4, axis=1))
    registers = []
    for nibble in range(4):
        sign = words << np.uint32(12 - 4 * nibble)
        move = 6 - 4 * nibble
        rest = words << np.uint32(move) if move > 0 else words >> np.uint32(-move)
        both = (sign & np.uint32(0x80008000)) | (rest & np.uint32(0x01C001C0))
        registers.append(halves(both) * scale)
    low, high = (np.stack(registers[i : i + 2], 2).reshape(N, 128) for i in (0, 2))
    return ordered(low) + ordered(high)


@pytest.mark.parametrize("mxfp4", [True, False])
def test_the_sums_are_those_of_the_product(mxfp4):
    from moe_flax.kernels.grouped_matmul.triton import kept_hopper

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, K)).astype(np.float32)
    slices = np.asarray(kept_hopper.reorder(jnp.asarray(x), mxfp4), np.float64)
    steps = K // kept_hopper.depth(mxfp4)
    if mxfp4:
        weights = jnp.asarray(rng.normal(size=(N, K)), jnp.float32)
        values, scales = map(np.asarray, quantize.quantize_mxfp4(weights))
        wanted = np.asarray(quantize.dequantize(jnp.asarray(values), jnp.asarray(scales)))
        parts = [
            mxfp4_parts(values[:, 128 * i : 128 * i + 128], scales[:, 8 * i : 8 * i + 8])
            for i in range(steps)
        ]
    else:
        wanted = rng.integers(-128, 128, size=(N, K)).astype(np.float64)
        parts = [ordered(wanted[:, 128 * i : 128 * i + 128]) for i in range(steps)]
    parts = [part for step in parts for part in step]
    total = sum(part @ rows.T for part, rows in zip(parts, slices, strict=True))
    total = total * 2.0**63 if mxfp4 else total
    np.testing.assert_allclose(total, wanted.astype(np.float64) @ x.T.astype(np.float64), rtol=1e-9)


def test_int8_as_bfloat16():
    """`_int8`: 128 and the low bits, less 128, or 256 where the sign is set."""
    byte = np.arange(256, dtype=np.uint16)
    first = (byte & 0x7F | 0x4300).view(ml_dtypes.bfloat16).astype(np.float64)
    second = (byte & 0x80 | 0xC300).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(first + second, byte.astype(np.uint8).view(np.int8))


@pytest.mark.parametrize("mxfp4", [True, False])
def test_a_first_product_stores_where_a_second_one_looks(mxfp4):
    from moe_flax.kernels.grouped_matmul.triton import kept_hopper

    n = np.arange(1024)
    slices = kept_hopper.reorder(jnp.asarray(n, jnp.int32)[None], mxfp4)
    places = np.argsort(np.asarray(slices).ravel())
    np.testing.assert_array_equal(kept_hopper._reordered.fn(n, mxfp4), places)
