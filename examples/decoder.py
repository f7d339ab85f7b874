"""A small decoder of Mixtral's architecture, over bytes: to copy and change.

Pre-norm blocks of causal attention with rotary positions and a feed-forward layer, which is a
``moe_flax.MoE`` or, for comparison, a dense one. Only the line that makes ``feed_forward`` and the
losses it returns know of experts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import moe_flax


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder.

    Args:
      features: model width D.
      num_layers: blocks.
      num_heads: attention heads of width D / num_heads.
      moe: the feed-forward layers, or None for dense ones.
      hidden_features: width of the dense ones.
      vocab_size: 256, the bytes.
      rope_theta, norm_epsilon: as in Mixtral's config.json.
    """

    features: int
    num_layers: int
    num_heads: int
    moe: moe_flax.MoEConfig | None = None
    hidden_features: int = 0
    vocab_size: int = 256
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.features // self.num_heads


class Attention(nnx.Module):
    """Causal self-attention with rotary positions, without biases."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        d = config.features
        self.query = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.config = config

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        q, k, v = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        q, k = (rotate(h, self.config.rope_theta) for h in (q, k))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(x.shape))


def rotate(x: Float[Array, "B T N H"], theta: float) -> Float[Array, "B T N H"]:
    """Rotary positions (Su et al. 2021); dimension i turns with dimension i + H / 2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Dense(nnx.Module):
    """The gated feed-forward layer that one expert is."""

    def __init__(self, features: int, hidden_features: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Linear(features, hidden_features, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(features, hidden_features, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden_features, features, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then a feed-forward layer, each on the normed residual stream."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        d, epsilon = config.features, config.norm_epsilon
        self.attention_norm = nnx.RMSNorm(d, epsilon=epsilon, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.RMSNorm(d, epsilon=epsilon, rngs=rngs)
        if config.moe is not None:
            self.feed_forward = moe_flax.MoE.from_config(config.moe, rngs=rngs)
        else:
            self.feed_forward = Dense(d, config.hidden_features, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], moe_flax.MoEAux | None]:
        x = x + self.attention(self.attention_norm(x))
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, moe_flax.MoE):
            y, aux = self.feed_forward(normed, return_aux=True)
            return x + y, aux
        return x + self.feed_forward(normed), None


class Decoder(nnx.Module):
    """Bytes in, logits of the next byte out.

    Under ``jax.set_mesh`` the experts are made where the mesh's "expert" axis puts them.

    Args:
      config: DecoderConfig.
      rngs: rng key.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(config.vocab_size, config.features, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.features, epsilon=config.norm_epsilon, rngs=rngs)
        self.head = nnx.Linear(config.features, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], list[moe_flax.MoEAux]]:
        """Logits [B, T, 256], and what each MoE layer reports (none of a dense decoder)."""
        x = self.embed(tokens)
        reports = []
        for layer in self.layers:
            x, aux = layer(x)
            if aux is not None:
                reports.append(aux)
        return self.head(self.norm(x)), reports

    def moe_layers(self) -> list[moe_flax.MoE]:
        """The MoE layers, in order; none of a dense decoder."""
        layers = [layer.feed_forward for layer in self.layers]
        return [layer for layer in layers if isinstance(layer, moe_flax.MoE)]


def active_parameters(config: DecoderConfig) -> int:
    """Weights that one token meets, embedding table and head included."""
    d = config.features
    if config.moe is None:
        feed_forward = 3 * d * config.hidden_features
    else:
        chosen = config.moe.num_experts_per_token * config.moe.hidden_features
        feed_forward = 3 * d * chosen + d * config.moe.num_experts
    norms = d * (2 * config.num_layers + 1)
    return 2 * config.vocab_size * d + config.num_layers * (4 * d * d + feed_forward) + norms
