"""examples/decoder.py: shapes, causality, positions, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder import Decoder, DecoderConfig, active_parameters, rotate
from flax import nnx

import moe_flax

MOE = DecoderConfig(
    features=16,
    num_layers=2,
    num_heads=2,
    moe=moe_flax.MoEConfig(features=16, hidden_features=24, num_experts=4, num_experts_per_token=2),
)
DENSE = dataclasses.replace(MOE, moe=None, hidden_features=48)


@nnx.jit
def run(model, tokens):
    return model(tokens)


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_shapes_and_causality(config):
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 10), 0, 256)
    logits, reports = run(model, tokens)
    assert logits.shape == (2, 10, 256)
    assert len(reports) == (config.num_layers if config.moe else 0)
    for report in reports:
        assert report.tokens_per_expert.sum() == 2 * 10 * 2
    changed, _ = run(model, tokens.at[0, 6].add(1))
    np.testing.assert_allclose(changed[0, :6], logits[0, :6], atol=1e-6)
    np.testing.assert_allclose(changed[1], logits[1], atol=1e-6)
    assert np.abs(changed[0, 6:] - logits[0, 6:]).max(axis=-1).min() > 1e-4


def test_order_of_past_bytes_matters():
    # In one layer only positions tell: in the second the causal mask would.
    model = Decoder(dataclasses.replace(DENSE, num_layers=1), rngs=nnx.Rngs(0))
    one, other = run(model, jnp.array([[65, 66, 67, 68], [66, 65, 67, 68]]))[0]
    assert np.abs(one[-1] - other[-1]).max() > 1e-4


def test_rotation_keeps_length_and_depends_on_distance_alone():
    x, y = jax.random.normal(jax.random.key(0), (2, 8))
    a, b = (rotate(jnp.tile(v, (1, 9, 1, 1)), 100.0)[0, :, 0] for v in (x, y))
    np.testing.assert_allclose(jnp.linalg.norm(a, axis=-1), jnp.linalg.norm(x), rtol=1e-5)
    np.testing.assert_allclose(a[2] @ b[5], a[4] @ b[7], rtol=1e-4)
    assert abs(a[2] @ b[5] - a[2] @ b[8]) > 1e-2


def test_active_parameters_count_what_one_token_meets():
    sizes = jax.tree.map(jnp.size, nnx.state(Decoder(DENSE, rngs=nnx.Rngs(0)), nnx.Param))
    assert active_parameters(DENSE) == sum(jax.tree.leaves(sizes))
    router = MOE.num_layers * 16 * 4
    assert active_parameters(MOE) == active_parameters(DENSE) + router


def test_loss_falls_on_a_repeating_text():
    model = Decoder(MOE, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jnp.tile(jnp.frombuffer(b"abacad", jnp.uint8).astype(jnp.int32), (4, 3))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits, _ = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(40)]
    assert values[0] > 4
    assert values[-1] < 0.5  # with "b" or "c" or "d" after "a" unknown it would stay above 0.5
