"""A MoE layer in plain float32 jnp, from the layer's own parameters: what the layer must equal."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_flax import MoE, route
from moe_flax.activations import resolve_activation
from moe_flax.experts import expert_ffn_reference


@nnx.jit
def reference_layer(layer: MoE, x: jax.Array, router_inputs: jax.Array | None = None) -> jax.Array:
    config, experts, router = layer.config, layer.experts, layer.router
    tokens = x.reshape(-1, config.features).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        seen = tokens if router_inputs is None else router_inputs.reshape(tokens.shape)
        logits = seen.astype(jnp.float32) @ router.kernel[...]
        if router.bias is not None:
            logits = logits + router.bias[...]
        routing = route(
            logits,
            config.router,
            config.num_experts_per_token,
            correction_bias=None if router.correction_bias is None else router.correction_bias[...],
        )
        y = expert_ffn_reference(
            tokens,
            experts.wi[...],
            experts.wo[...],
            routing,
            activation=config.activation,
            wi_bias=None if experts.wi_bias is None else experts.wi_bias[...],
            wo_bias=None if experts.wo_bias is None else experts.wo_bias[...],
        )
        if config.shared is not None:
            wi, wo = layer.shared.wi[...], layer.shared.wo[...]
            activation = resolve_activation(config.shared.activation or config.activation)
            shared = activation(jnp.einsum("td,jds->tjs", tokens, wi)) @ wo
            if config.shared.combine == "gated":
                shared = jax.nn.sigmoid(tokens @ layer.shared.gate[...]) * shared
            y = y + shared
            if config.shared.combine == "average":
                y = y / 2
    return y.reshape(x.shape)


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    out, expected = (np.asarray(jax.device_get(a), np.float32) for a in (out, expected))
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
