"""Blocks of parameters are copied the same whichever way either side lies, and in every dtype."""

import ml_dtypes
import numpy as np
import pytest

from moe_flax.checkpoint.mapping import (
    ArrayParameter,
    Binding,
    StoredParameter,
    read,
    stored_chunks,
)
from moe_flax.checkpoint.schema import Entry

RAGGED = {"E": 2, "J": 2, "D": 515, "F": 259, "R": 2, "S": 0}  # large enough for strips
EVEN = RAGGED | {"D": 4104, "F": 24}  # and for several values moved as one


@pytest.mark.parametrize("axes", ["E (J F) D", "E D (J F)", "E D (F J)"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float8_e4m3fn", "float64"])
@pytest.mark.parametrize(("target", "sizes"), [(None, RAGGED), (None, EVEN), ("float32", RAGGED)])
def test_large_blocks_there_and_back(axes, stored, target, sizes):
    binding = Binding(Entry("experts.wi", "x", axes), "", sizes)
    dtype = np.dtype(getattr(ml_dtypes, stored, None) or stored)
    x = np.random.default_rng(0).normal(size=binding.stored_shape).astype(dtype)
    got = read(StoredParameter(binding, {"x": x}), dtype=target)
    lengths = [sizes[a] for a in axes.replace("(", "").replace(")", "").split()]
    order = [axes.replace("(", "").replace(")", "").split().index(a) for a in "EJDF"]
    expected = x.reshape(lengths).transpose(order)
    assert got.dtype == np.dtype(target or dtype)
    np.testing.assert_array_equal(got, expected.astype(got.dtype))
    part = (slice(1, 2), slice(0, 2), slice(3, 514), slice(1, sizes["F"] - 1))
    np.testing.assert_array_equal(read(StoredParameter(binding, {"x": x}), part), expected[part])
    chunks = list(stored_chunks(binding, "x", ArrayParameter(got), got.dtype))
    back = np.concatenate([chunk.reshape(-1) for chunk in chunks])
    np.testing.assert_array_equal(back, x.reshape(-1).astype(got.dtype))
