"""Routed experts between two projections, as Nemotron-H has them; router and shared see D."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_flax import MoE, MoEConfig, RouterConfig, SharedConfig, expert_ffn, route

CONFIG = MoEConfig(
    features=24,
    hidden_features=16,
    num_experts=4,
    num_experts_per_token=2,
    router=RouterConfig(score="sigmoid"),
    shared=SharedConfig(8),
    activation="relu2",
    use_bias=True,
    latent_features=12,
)


def make(**kwargs):
    init = nnx.initializers.normal(0.5)
    return MoE.from_config(CONFIG, kernel_init=init, bias_init=init, rngs=nnx.Rngs(0), **kwargs)


@pytest.mark.slow
def test_equals_its_parts():
    layer, x = make(), jax.random.normal(jax.random.key(0), (9, 24))
    assert layer.experts.wi.shape == (4, 1, 12, 16)
    latent, experts, shared = layer.latent, layer.experts, layer.shared
    routed = expert_ffn(
        x @ latent.wi[...],
        experts.wi[...],
        experts.wo[...],
        route(layer.router(x), CONFIG.router, 2),
        activation="relu2",
        wi_bias=experts.wi_bias[...],
        wo_bias=experts.wo_bias[...],
    )
    hidden = jnp.square(jax.nn.relu(x @ shared.wi[0]))
    expected = routed @ latent.wo[...] + hidden @ shared.wo[...]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert MoEConfig.from_dict(CONFIG.to_dict()) == CONFIG


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"expert": 2, "tensor": 2, "fsdp": 2}, {"data": 2, "expert": 4}])
def test_on_a_mesh(sizes):
    x = jax.random.normal(jax.random.key(0), (9, 24))

    @nnx.jit
    def step(layer, x):
        return nnx.value_and_grad(lambda layer, x: jnp.sum(layer(x) ** 2), argnums=(0, 1))(layer, x)

    expected = jax.tree.leaves(step(make(), x))
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    for got, want in zip(jax.tree.leaves(step(make(mesh=mesh), x)), expected, strict=True):
        assert jnp.linalg.norm(got - want) < 1e-4 * jnp.linalg.norm(want)
