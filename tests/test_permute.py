"""Sorting by expert against NumPy, and gradients that are gathers."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moe_flax.permute import combine_rows, gather_rows, gather_slots, sort_by_expert

E = 5


def routed(seed: int, tokens: int = 7, k: int = 3):
    """Ids of which some are no expert's, and rows, weights and tokens to go with them."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, E + 2, size=(tokens, k))
    rows = jnp.asarray(rng.normal(size=(tokens * k, 4)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(tokens, k)), jnp.float32)
    return ids, rows, weights, jnp.asarray(rng.normal(size=(tokens, 4)), jnp.float32)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([(0, 2), (1, 1), (7, 3), (16, 5)]))
def test_sorts_stably_with_no_expert_last(seed, shape):
    ids = np.random.default_rng(seed).integers(-2, E + 2, size=shape)
    permutation = sort_by_expert(jnp.asarray(ids), E)
    keys = np.where((ids >= 0) & (ids < E), ids, E).ravel()
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(keys, minlength=E + 1)[:E]
    np.testing.assert_array_equal(permutation.order, order)
    np.testing.assert_array_equal(permutation.group_sizes, counts)
    np.testing.assert_array_equal(
        np.asarray(permutation.inverse).ravel()[order], np.arange(keys.size)
    )
    np.testing.assert_array_equal(permutation.has_expert, (keys < E).reshape(shape))
    np.testing.assert_array_equal(permutation.occupied, keys[order] < E)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_ids_of_any_integer_dtype(dtype):
    permutation = sort_by_expert(jnp.asarray([[3, 0], [100, 3]], dtype), 4)
    np.testing.assert_array_equal(permutation.order, [1, 0, 3, 2])
    np.testing.assert_array_equal(permutation.group_sizes, [1, 0, 0, 2])


def test_ids_that_are_not_allowed():
    with pytest.raises(TypeError, match="float32"):
        sort_by_expert(jnp.zeros((2, 2)), 4)
    with pytest.raises(ValueError, match=r"\[T, K\].*\(3,\)"):
        sort_by_expert(jnp.zeros(3, jnp.int32), 4)
    many = jax.ShapeDtypeStruct((2**28, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"2\*\*31 - 1 slots"):
        jax.eval_shape(lambda ids: sort_by_expert(ids, 4), many)


def plain_gather(tokens, ids):
    order = np.argsort(np.where((ids >= 0) & (ids < E), ids, E).ravel(), kind="stable")
    valid = ((ids >= 0) & (ids < E)).ravel()[order]
    return jnp.where(valid[:, None], tokens[order // ids.shape[1]], 0)


def plain_combine(rows, weights, ids):
    order = np.argsort(np.where((ids >= 0) & (ids < E), ids, E).ravel(), kind="stable")
    slots = rows[np.argsort(order)].reshape(*ids.shape, -1) * weights[:, :, None]
    return jnp.where(((ids >= 0) & (ids < E))[:, :, None], slots, 0).sum(1)


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_equal_the_plain_ones(seed):
    ids, rows, weights, tokens = routed(seed)
    permutation = sort_by_expert(jnp.asarray(ids), E)
    pairs = [
        (gather_rows, plain_gather, (tokens,)),
        (combine_rows, plain_combine, (rows, weights)),
        (
            gather_slots,
            lambda w, ids: plain_gather(w.reshape(-1, 1), ids.reshape(-1, 1))[:, 0],
            (weights,),
        ),
    ]
    for ours, plain, given in pairs:
        out, pull = jax.vjp(lambda *a, f=ours: f(*a, permutation), *given)
        wanted, plain_pull = jax.vjp(lambda *a, f=plain: f(*a, ids), *given)
        np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6)
        grad = jnp.asarray(np.random.default_rng(9).normal(size=out.shape), jnp.float32)
        for a, b in zip(pull(grad), plain_pull(grad), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_slots_without_an_expert_may_hold_anything():
    ids = np.array([[0, 9], [9, 9], [2, 1]])
    permutation = sort_by_expert(jnp.asarray(ids), E)
    tokens = jnp.array([[1.0, 2.0], [np.nan, np.nan], [3.0, 4.0]])
    weights = jnp.array([[1.0, np.nan], [np.nan, np.nan], [0.5, 2.0]])

    def loss(tokens, weights):
        rows = gather_rows(tokens, permutation)
        rows = rows * gather_slots(weights, permutation)[:, None]
        rows = jnp.where(permutation.occupied[:, None], rows, jnp.nan)
        return jnp.sum(combine_rows(rows, weights, permutation))

    value, (tokens_grad, weights_grad) = jax.value_and_grad(loss, (0, 1))(tokens, weights)
    np.testing.assert_allclose(value, 3.0 + 7.0 * (0.25 + 4.0))
    np.testing.assert_allclose(tokens_grad, [[1, 1], [0, 0], [4.25, 4.25]])
    np.testing.assert_allclose(weights_grad, [[6, 0], [0, 0], [7, 28]])


def test_combine_sums_in_float32():
    ids = jnp.zeros((1, 8), jnp.int32)
    rows = jnp.asarray([[256.0]] + [[0.5]] * 7, jnp.bfloat16)
    out = combine_rows(rows, None, sort_by_expert(ids, 1))
    assert out.dtype == jnp.float32
    assert out[0, 0] == 259.5


def test_gradients_scatter_nothing():
    ids, _, weights, tokens = routed(0)

    def loss(tokens, weights):
        permutation = sort_by_expert(jnp.asarray(ids), E)
        rows = gather_rows(tokens, permutation) * gather_slots(weights, permutation)[:, None]
        return jnp.sum(jnp.sin(combine_rows(rows, weights, permutation)))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(tokens, weights))
    assert "gather" in text
    assert "scatter-add" not in text


def test_combine_holds_no_copy_of_every_slot():
    """[T, K, D] is read in place: temporaries stay below it."""
    rows, weights = jnp.zeros((512 * 8, 256)), jnp.zeros((512, 8))
    permutation = sort_by_expert(jnp.zeros((512, 8), jnp.int32), E)
    compiled = jax.jit(combine_rows).lower(rows, weights, permutation).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * rows.nbytes
