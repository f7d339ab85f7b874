"""Layout strings: what they mean, and that there and back is the identity."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from moe_flax.checkpoint.layouts import PARAMETER_AXES, parse, rearrange, shape_of

SIZES = {"E": 3, "J": 2, "D": 4, "F": 5, "N": 9, "S": 6, "R": 7, "L": 2, "T": 3}


def test_concatenated_and_interleaved():
    x = np.arange(3 * 2 * 4 * 5).reshape(3, 2, 4, 5)
    concatenated = rearrange(x, "E J D F", "E D (J F)", SIZES)
    np.testing.assert_array_equal(concatenated[..., :5], x[:, 0])
    np.testing.assert_array_equal(concatenated[..., 5:], x[:, 1])
    interleaved = rearrange(x, "E J D F", "E D (F J)", SIZES)
    np.testing.assert_array_equal(interleaved[..., ::2], x[:, 0])
    np.testing.assert_array_equal(interleaved[..., 1::2], x[:, 1])
    flat = rearrange(x[:, 0], "E D F", "(E F) D", SIZES)
    np.testing.assert_array_equal(flat[5:10], x[1, 0].T)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.data())
def test_there_and_back_is_the_identity(data):
    axes = data.draw(st.sampled_from(sorted(PARAMETER_AXES.values())))
    atoms = [a for group in parse(axes) for a in group]
    shuffled = data.draw(st.permutations(atoms))
    cut = data.draw(st.integers(0, len(shuffled)))
    grouped = (
        [*shuffled[:cut], f"({' '.join(shuffled[cut:])})"] if cut < len(shuffled) else shuffled
    )
    target = " ".join(grouped)
    x = np.arange(np.prod(shape_of(axes, SIZES))).reshape(shape_of(axes, SIZES))
    there = rearrange(x, axes, target, SIZES)
    assert there.shape == shape_of(target, SIZES)
    np.testing.assert_array_equal(rearrange(there, target, axes, SIZES), x)


def test_wrong_layouts_are_errors():
    with pytest.raises(ValueError, match="names an axis twice"):
        parse("E D D")
    with pytest.raises(ValueError, match="malformed"):
        parse("E [D]")
    with pytest.raises(ValueError, match=r"has shape \(3, 4\), got \(4, 3\)"):
        rearrange(np.ones((4, 3)), "E D", "D E", SIZES)
    with pytest.raises(ValueError, match="different axes"):
        rearrange(np.ones((3, 4)), "E D", "D F", SIZES)
