"""Products of float8 rows with scales, against dequantised operands."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_flax.kernels.grouped_matmul import grouped_matmul

SIZES = jnp.array([5, 0, 7])


def operands(branches):
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(14, 16)).astype(ml_dtypes.float8_e4m3fn)
    rhs = rng.normal(size=(3, *branches, 9, 16)).astype(ml_dtypes.float8_e4m3fn)
    lhs_scale = rng.uniform(0.5, 2, size=(14, 1)).astype(np.float32)
    lhs_scale[12:] = np.nan  # rows past the end
    rhs_scale = rng.uniform(0.2, 0.4, size=(*rhs.shape[:-1], 1)).astype(np.float32)
    return tuple(map(jnp.asarray, (lhs, rhs, lhs_scale, rhs_scale)))


@pytest.mark.parametrize(("branches", "backend"), [((), "cpu"), ((2,), "reference")])
def test_equal_to_the_product_of_dequantised_operands(branches, backend):
    lhs, rhs, lhs_scale, rhs_scale = operands(branches)

    @functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
    def run(lhs, rhs, lhs_scale, rhs_scale, transposed, dtype):
        if not transposed:
            rhs, rhs_scale = rhs.swapaxes(-1, -2), rhs_scale.swapaxes(-1, -2)
        return grouped_matmul(
            lhs, rhs, SIZES, transpose_rhs=transposed, lhs_scale=lhs_scale, rhs_scale=rhs_scale,
            preferred_element_type=dtype, backend=backend,
        )  # fmt: skip

    rows, matrices = (
        np.asarray(x, np.float32) * s for x, s in ((lhs, lhs_scale), (rhs, rhs_scale))
    )
    wanted = np.zeros((14, *rhs.shape[1:-1]), np.float32)
    wanted[:5] = np.einsum("mk,...nk->m...n", rows[:5], matrices[0])
    wanted[5:12] = np.einsum("mk,...nk->m...n", rows[5:12], matrices[2])
    out = run(lhs, rhs, lhs_scale, rhs_scale, True, jnp.float32)
    assert np.linalg.norm(out - wanted) < 1e-6 * np.linalg.norm(wanted)
    assert not out[12:].any()
    out = run(lhs, rhs, lhs_scale, rhs_scale, False, None)
    assert out.dtype == jnp.bfloat16
    assert np.linalg.norm(out - wanted) < 4e-3 * np.linalg.norm(wanted)


def test_errors():
    lhs, rhs, lhs_scale, rhs_scale = operands(())

    def run(lhs=lhs, rhs=rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale):
        return grouped_matmul(
            lhs, rhs, SIZES, transpose_rhs=True, lhs_scale=lhs_scale, rhs_scale=rhs_scale,
            backend="reference",
        )  # fmt: skip

    with pytest.raises(TypeError, match="no gradient"):
        jax.grad(lambda s: run(lhs_scale=s).sum().astype(jnp.float32))(lhs_scale)
    with pytest.raises(ValueError, match="belong together"):
        run(rhs_scale=None)
    with pytest.raises(TypeError, match="needs lhs_scale and rhs_scale"):
        run(lhs_scale=None, rhs_scale=None)
    with pytest.raises(TypeError, match="lhs of a product with scales must be float8_e4m3fn"):
        run(lhs=lhs.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"rhs_scale must have shape \(3, 9, 1\), got \(3, 1, 9\)"):
        run(rhs_scale=rhs_scale.swapaxes(-1, -2))
    with pytest.raises(ValueError, match=r"lhs of a product with scales must be \[M, K\]"):
        run(lhs=lhs[:, None])
