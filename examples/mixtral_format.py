"""The whole decoder as a Mixtral directory, and back.

``moe_flax.checkpoint`` writes and reads the MoE layers; the other weights travel in ``.rest``
under Mixtral's names, where matrices are [out, in]. What is written opens in other software that
knows Mixtral, such as Hugging Face transformers.
"""

import dataclasses
import os
import typing as tp

import jax.numpy as jnp
import numpy as np
from decoder import Decoder, DecoderConfig
from flax import nnx

import moe_flax
from moe_flax import checkpoint

ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}


def mixtral_config(config: DecoderConfig) -> moe_flax.MoEConfig:
    """The decoder's MoE layers with Mixtral's router, which has no correction bias."""
    if config.moe is None:
        raise ValueError("a dense decoder has no Mixtral format")
    router = dataclasses.replace(config.moe.router, correction_bias=False)
    if router != moe_flax.RouterConfig():
        raise ValueError(f"Mixtral's router is {moe_flax.RouterConfig()}, this one is {router}")
    every = tuple(range(config.num_layers))
    return dataclasses.replace(
        config.moe,
        router=router,
        num_layers=config.num_layers,
        moe_layers=every,
        family="mixtral",
    )


def save(path: str | os.PathLike[str], model: Decoder, *, context: int) -> None:
    """Writes ``model`` as a Mixtral directory.

    Args:
      path: the directory; absent or empty.
      model: a decoder whose correction biases, if it has them, are 0.
      context: tokens that it was trained on at once; only noted in config.json.

    Raises:
      ValueError: a router's correction bias is not 0: without it the model would be another.
    """
    for index, layer in enumerate(model.moe_layers()):
        bias = layer.router.correction_bias
        if bias is not None and np.any(np.asarray(bias[...])):
            raise ValueError(
                f"layer {index} routes by a correction bias, for which Mixtral has no place: let"
                " it go in training, or write another family"
            )
    moe = mixtral_config(model.config)
    config = dataclasses.replace(model.config, moe=moe)
    plain = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    nnx.update(plain, nnx.state(model, nnx.Param))  # the bias is no Param: it stays behind
    written = checkpoint.Checkpoint(
        config=moe,
        layers=dict(enumerate(plain.moe_layers())),
        rest={name: get() for name, (get, _) in other_weights(plain).items()},
        hf_config={
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": config.features,
            "intermediate_size": moe.hidden_features,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": context,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": config.vocab_size,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        },
    )
    checkpoint.save(path, written, family="mixtral")


def load(path: str | os.PathLike[str]) -> Decoder:
    """Reads a directory that `save` wrote, onto the mesh in scope or one device."""
    read = checkpoint.load(path)
    values = read.hf_config
    config = DecoderConfig(
        features=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        moe=read.config,
        vocab_size=values["vocab_size"],
        rope_theta=values["rope_theta"],
        norm_epsilon=values["rms_norm_eps"],
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for index, layer in enumerate(model.layers):
        layer.feed_forward = read.layers[index]
    weights = other_weights(model)
    if set(weights) != set(read.rest):
        raise ValueError(f"not this decoder's weights: {sorted(set(weights) ^ set(read.rest))}")
    for name, (_, put) in weights.items():
        put(read.rest[name])
    return model


class Accessors(tp.NamedTuple):
    """Reads a weight as Mixtral stores it, and writes it from there."""

    get: tp.Callable[[], np.ndarray]
    put: tp.Callable[[np.ndarray], None]


def other_weights(model: Decoder) -> dict[str, Accessors]:
    """The weights outside the MoE layers, by Mixtral's names."""
    found = {
        "model.embed_tokens.weight": _accessors(model.embed.embedding),
        "model.norm.weight": _accessors(model.norm.scale),
        "lm_head.weight": _accessors(model.head.kernel, transposed=True),
    }
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}"
        found[f"{prefix}.input_layernorm.weight"] = _accessors(layer.attention_norm.scale)
        found[f"{prefix}.post_attention_layernorm.weight"] = _accessors(
            layer.feed_forward_norm.scale
        )
        for ours, theirs in ATTENTION.items():
            kernel = getattr(layer.attention, ours).kernel
            found[f"{prefix}.self_attn.{theirs}.weight"] = _accessors(kernel, transposed=True)
    return found


def _accessors(variable: tp.Any, transposed: bool = False) -> Accessors:
    def get() -> np.ndarray:
        value = np.asarray(variable[...])
        return value.T if transposed else value

    def put(value: np.ndarray) -> None:
        variable.set_value(jnp.asarray(value.T if transposed else value))

    return Accessors(get, put)
