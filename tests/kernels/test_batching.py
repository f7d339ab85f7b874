"""vmap as a loop, over pytrees with and without a batch."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_flax.kernels.batching import one_by_one


def combine(pair, none, scale):
    assert none is None
    return {"sum": pair["a"] @ pair["b"] * scale, "first": (pair["a"][0],)}


def test_equals_vmap():
    rng = np.random.default_rng(0)
    a, b = jnp.asarray(rng.normal(size=(5, 3, 4))), jnp.asarray(rng.normal(size=(4, 2)))
    scale = jnp.arange(5.0)
    axes = ({"a": 0, "b": None}, None, 0)
    given = ({"a": a, "b": b}, None, scale)
    actual, wanted = (jax.vmap(f, in_axes=axes)(*given) for f in (one_by_one(combine), combine))
    for x, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, w, rtol=1e-6)


def test_nested_vmap_and_other_axes():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    run = jax.vmap(jax.vmap(one_by_one(jnp.cumsum), in_axes=1), in_axes=0)
    np.testing.assert_array_equal(run(x), jnp.cumsum(jnp.swapaxes(x, 1, 2), axis=-1))


def test_what_has_no_batch_is_not_copied():
    run = jax.vmap(one_by_one(lambda x, w: x @ w), in_axes=(0, None))
    text = str(jax.make_jaxpr(run)(jnp.zeros((5, 2, 7)), jnp.zeros((7, 3))))
    assert "5,2,7" in text
    assert "5,7,3" not in text
