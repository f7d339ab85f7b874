"""Packed rows: the plain forms that the kernels are held against."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_flax.kernels.fused_ep.rows import pack_rows, row_words, unpack_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [1, 100, 128, 129, 256, 384, 2880])
def test_round_trip(features, dtype):
    x = jax.random.normal(jax.random.key(0), (3, features)).astype(dtype)
    packed = pack_rows(x)
    assert packed.shape == (3, 1, row_words(features, dtype))
    assert packed.dtype.itemsize == 4
    np.testing.assert_array_equal(unpack_rows(packed, features, dtype), x)


def test_halves_lie_in_one_word():
    x = jnp.arange(512, dtype=jnp.bfloat16)[None]
    words = np.asarray(pack_rows(x))[0, 0]
    low = (words << 16).view(np.float32)
    high = (words & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(low, np.asarray(x[0, :256], np.float32))
    np.testing.assert_array_equal(high, np.asarray(x[0, 256:], np.float32))
