"""The packing kernels in Pallas' TPU interpreter, against the plain forms."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moe_flax.kernels.fused_ep import pack, rows

PARAMS = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def check(number, features, dtype, seed=0):
    x = jax.random.normal(jax.random.key(seed), (number, features)).astype(dtype)
    packed = pack.pack_rows(x, interpret=PARAMS)
    assert packed.shape == (-(-number // 8) * 8, 1, rows.row_words(features, dtype))
    assert packed.dtype == rows.word_dtype(dtype)
    np.testing.assert_array_equal(packed[:number], rows.pack_rows(x))
    back = pack.unpack_rows(packed, x.shape, dtype, interpret=PARAMS)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("number", "features"), [(0, 256), (1, 100), (8, 1), (33, 2880), (700, 129), (1000, 384)]
)
def test_equal_the_plain_forms(number, features, dtype):
    check(number, features, dtype)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    st.integers(1, 600), st.integers(1, 700), st.sampled_from(["float32", "bfloat16"])
)
def test_any_sizes(number, features, dtype):
    check(number, features, dtype, seed=number)


def test_blocks_are_whole_pieces_and_small():
    for words in (128, 1024, 3584, 14336):
        for number in (1, 31, 300, 8192):
            block = pack._block_rows(number, words)
            assert block % 32 == 0
            assert block == 32 or 4 * block * words <= pack._BLOCK_BYTES
