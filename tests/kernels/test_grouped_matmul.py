"""Every backend that runs on CPU through the shared base; the function's checks; memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_base import (
    CASES,
    GroupedMatmulBase,
    distance,
    expected,
    operands,
    product_and_gradients,
)
from grouped_matmul_grids import PublishedGrids

from moe_flax.kernels.grouped_matmul import grouped_matmul


@pytest.mark.slow
class TestReference(GroupedMatmulBase):
    backend = "reference"


class TestCpu(GroupedMatmulBase, PublishedGrids):
    backend = "cpu"


@pytest.mark.slow
class TestXla(GroupedMatmulBase):
    backend = "xla"


@pytest.mark.parametrize("backend", ["reference", "cpu", "xla"])
def test_float64(backend):
    case = CASES["odd sizes"]
    with jax.enable_x64(True):
        lhs, rhs, grad = map(jnp.asarray, operands(case))

        def product(lhs, rhs):
            return grouped_matmul(lhs, rhs, jnp.asarray(case.sizes), backend=backend)

        out, pull = jax.vjp(product, lhs, rhs)
        actual = [np.asarray(x) for x in (out, *pull(grad))]
    for a, w in zip(actual, expected(*operands(case), case.sizes, False), strict=True):
        assert a.dtype == np.float64
        assert distance(a, w) < 1e-14


@pytest.mark.parametrize("backend", ["reference", "cpu"])  # XLA's expansion multiplies by zero
def test_infinite_values_spoil_their_own_group_only(backend):
    lhs, rhs, grad = operands(CASES["plain"])
    sizes = jnp.array([5, 3, 8])
    clean = product_and_gradients(*map(jnp.float32, (lhs, rhs, grad)), sizes, backend=backend)
    lhs[6], rhs[1], grad[7] = np.nan, np.inf, np.inf
    spoilt = product_and_gradients(*map(jnp.float32, (lhs, rhs, grad)), sizes, backend=backend)
    rows, groups = np.r_[0:5, 8:16], np.r_[0, 2]
    for a, b, others in zip(clean, spoilt, (rows, rows, groups), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


def test_a_second_call_outside_jit_compiles_nothing(caplog):
    lhs, rhs, grad = map(jnp.float32, operands(CASES["plain"]))
    sizes = jnp.array([5, 3, 8])

    def gradients():
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="cpu"), lhs, rhs)
        return out, *pull(grad)

    gradients()
    with jax.log_compiles(True):
        gradients()
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]


def test_cpu_takes_no_memory_that_grows_with_groups():
    lhs, rhs = jnp.zeros((512, 64)), jnp.zeros((64, 64, 32))

    def gradients(lhs, rhs, sizes, grad):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, backend="cpu"), lhs, rhs)[1](grad)

    arguments = (lhs, rhs, jnp.zeros(64, jnp.int32), jnp.zeros((512, 32)))
    memory = jax.jit(gradients).lower(*arguments).compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < 0.25 * held


def shaped(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "error", "message"),
    [
        (shaped(4), shaped(2, 3, 5), [1, 1], ValueError, r"\[M, K\] x \[G, K, N\]"),
        (shaped(4, 2, 3), shaped(2, 3, 5), [1, 1], ValueError, r"\[M, J, K\]"),
        (shaped(4, 5), shaped(2, 3, 5), [1, 1], ValueError, r"axis -1 of lhs \(5\)"),
        (shaped(4, 2, 3), shaped(2, 1, 3, 5), [1, 1], ValueError, "branches"),
        (shaped(4, 3), shaped(2, 3, 5), [1, 1, 1], ValueError, r"shape \(2,\)"),
        (shaped(4, 3), shaped(0, 3, 5), np.zeros(0, int), ValueError, "one group or more"),
        (shaped(4, 3, dtype=jnp.int32), shaped(2, 3, 5), [1, 1], TypeError, "float32.*int32"),
        (shaped(4, 3), shaped(2, 3, 5, dtype=jnp.complex64), [1, 1], TypeError, "complex64"),
        (shaped(4, 3), shaped(2, 3, 5), [1.0, 1.0], TypeError, "integer"),
    ],
)
def test_operands_that_do_not_fit(lhs, rhs, sizes, error, message):
    with pytest.raises(error, match=message):
        grouped_matmul(lhs, rhs, jnp.asarray(sizes))


def test_other_arguments_that_are_not_allowed():
    given = (shaped(4, 3), shaped(2, 3, 5), jnp.array([1, 1]))
    with pytest.raises(ValueError, match=r"'fast'.*'reference', 'cpu', 'triton', 'tpu', 'xla'"):
        grouped_matmul(*given, backend="fast")
    with pytest.raises(TypeError, match=r"preferred_element_type.*int8"):
        grouped_matmul(*given, preferred_element_type=jnp.int8)
    with pytest.raises(ValueError, match="precision"):
        grouped_matmul(*given, precision=3)  # pyright: ignore[reportArgumentType]
    rows = jax.ShapeDtypeStruct((2**31, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1 rows"):
        jax.eval_shape(lambda lhs: grouped_matmul(lhs, *given[1:]), rows)


def test_operands_of_two_dtypes_are_promoted():
    lhs, rhs, _ = operands(CASES["plain"])
    out = grouped_matmul(jnp.bfloat16(lhs), jnp.float32(rhs), jnp.array([5, 3, 8]))
    same = grouped_matmul(
        jnp.bfloat16(lhs).astype(jnp.float32), jnp.float32(rhs), jnp.array([5, 3, 8])
    )
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out), np.asarray(same))
