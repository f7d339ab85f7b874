"""Logits to `Routing`: which experts a token goes to, and with what weight."""

import dataclasses
import math
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_flax.config import RouterConfig, check_experts_per_token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes: the only thing that passes from routing to the experts.

    A slot whose id is E or more has no expert: it belongs to one of the Z identity experts (E to
    E + Z - 1), or it was dropped for want of capacity or pads the batch (E + Z, with weight 0).
    Experts skip all of these.

    Attributes:
      expert_ids: [T, K] int32; within a token no id below E + Z occurs twice.
      weights: [T, K] float32.
      probabilities: [T, E + Z] float32, the router's distribution over experts before the choice
        (see ``route``), or None.
      apply_to: weights multiply the experts' "output" or "input".
    """

    expert_ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    probabilities: Float[Array, "T E"] | None = None
    apply_to: tp.Literal["output", "input"] = dataclasses.field(
        default="output", metadata={"static": True}
    )


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    num_experts_per_token: int,
    *,
    correction_bias: Float[Array, " E"] | None = None,
    per_expert_scale: Float[Array, " E"] | None = None,
) -> Routing:
    """Chooses K experts for each token and weighs them, as ``config`` says.

    The steps: soft-cap, score, correction bias and group limit (for the choice alone), top-k with
    the lowest index first on ties, weights from the scores without bias, activation over the K,
    renormalisation, scale. All in float32 and differentiable from weights and probabilities to
    logits. NaN and infinite logits still choose K distinct experts, of the kept groups; only the
    weights of their own token are not finite. A NaN choice score comes after every number.

    A capacity is not applied here, see ``apply_capacity``.

    Args:
      logits: [T, E + Z], of any float dtype; the last Z = ``config.num_identity_experts`` columns
        are identity experts.
      config: RouterConfig.
      num_experts_per_token: K.
      correction_bias: [E + Z] float32, needed if and only if ``config.correction_bias``.
      per_expert_scale: [E + Z], needed if and only if ``config.per_expert_scale``.

    Returns:
      Routing, experts of a token by falling choice score. Rows of ``probabilities`` sum to 1:
      softmax scores as they are, sigmoid and sqrt_softplus scores over their sum (DeepSeek-V3),
      for identity scores the softmax of the logits.

    Raises:
      ValueError: K is out of range, a shape does not fit, or an optional array is missing or given
        although ``config`` has none.
      TypeError: logits are not floating point, or the bias has less than float32 precision.
    """
    _check_logits(logits, config, num_experts_per_token)
    _check_vector("correction_bias", correction_bias, config.correction_bias, logits.shape[-1])
    if correction_bias is not None and correction_bias.dtype not in (jnp.float32, jnp.float64):
        raise TypeError(
            f"correction_bias must be float32, got {correction_bias.dtype}: rounding it changes"
            " which experts are chosen; keep it out of casts of the model"
        )
    _check_vector("per_expert_scale", per_expert_scale, config.per_expert_scale, logits.shape[-1])

    logits = logits.astype(jnp.float32)
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    scores = _scores(logits, config.score)

    if config.selection == "sparse_mixer":
        expert_ids, weights = sparse_mixer(logits, config.jitter)
    else:
        choice = _choice_scores(logits, scores, correction_bias, config)
        expert_ids = jax.lax.top_k(choice, num_experts_per_token)[1]
        weights = _weights(logits, scores, expert_ids, config)

    if config.scale != 1.0:
        weights = weights * config.scale
    if per_expert_scale is not None:
        weights = weights * per_expert_scale.astype(jnp.float32)[expert_ids]
    return Routing(expert_ids, weights, _probabilities(logits, scores, config), config.apply_to)


def sparse_mixer(
    logits: Float[Array, "T E"], jitter: float
) -> tuple[Int[Array, "T 2"], Float[Array, "T 2"]]:
    """PhiMoE's choice of two experts, as it is in evaluation.

    Each expert's weight is its softmax among those within a relative distance of ``2 * jitter``
    below it; the second is chosen and weighed with the first taken out. The two weights do not
    sum to 1 (Phi-3.5-MoE; Liu et al. 2024, arXiv:2409.12136).

    Args:
      logits: [T, E] float32, E >= 2.
      jitter: relative threshold.

    Returns:
      Expert ids [T, 2] int32 and weights [T, 2] float32.
    """
    remaining = logits
    choice = _finite(logits)
    ids, weights = [], []
    for _ in range(2):
        best = jnp.argmax(choice, axis=-1, keepdims=True).astype(jnp.int32)
        top = jnp.take_along_axis(remaining, best, axis=-1)
        far = top - logits > 2 * jitter * jnp.maximum(jnp.abs(logits), top)
        near = jax.nn.softmax(jnp.where(far, -jnp.inf, remaining), axis=-1)
        ids.append(best)
        weights.append(jnp.take_along_axis(near, best, axis=-1))
        taken = jnp.arange(logits.shape[-1]) == best
        remaining = jnp.where(taken, -jnp.inf, remaining)
        choice = jnp.where(taken, -jnp.inf, choice)
    return jnp.concatenate(ids, axis=-1), jnp.concatenate(weights, axis=-1)


def input_jitter(x: Float[Array, "..."], epsilon: float, key: Array) -> Float[Array, "..."]:
    """Multiplies by uniform noise in [1 - epsilon, 1 + epsilon), as training does to router input.

    Args:
      x: the input of the router, or of the whole layer (Mixtral's ``router_jitter_noise``).
      epsilon: half width of the noise.
      key: random key.
    """
    noise = jax.random.uniform(key, x.shape, jnp.float32, 1 - epsilon, 1 + epsilon)
    return (x * noise).astype(x.dtype)


def _scores(logits: jax.Array, score: str) -> jax.Array:
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(logits)
    if score == "sqrt_softplus":
        # Far below zero softplus(x) is exp(x); its root through sqrt would have a NaN gradient.
        low = logits < -20
        root = jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, logits)))
        return jnp.where(low, jnp.exp(logits / 2), root)
    return logits


def _choice_scores(
    logits: jax.Array, scores: jax.Array, bias: jax.Array | None, config: RouterConfig
) -> jax.Array:
    """What top-k compares; never part of the weights."""
    if bias is None and config.num_groups == 1:
        # Every score rises with its logit: comparing logits makes no ties by under- or overflow.
        return _finite(jax.lax.stop_gradient(logits))
    choice = jax.lax.stop_gradient(scores)
    if bias is not None:
        choice = choice + jax.lax.stop_gradient(bias).astype(jnp.float32)
    choice = _finite(choice)
    return choice if config.num_groups == 1 else _limit_groups(choice, config)


def _finite(choice: jax.Array) -> jax.Array:
    """Makes choice scores comparable: NaN comes last, and only a masked expert is at -inf."""
    info = jnp.finfo(choice.dtype)
    choice = jnp.where(jnp.isnan(choice), info.min, choice)
    choice = jnp.where(choice == 0, 0.0, choice)  # top_k puts -0 below 0: that is no tie
    return jnp.clip(choice, info.min, info.max)


def _limit_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    """Masks all experts but those of the best groups."""
    size = choice.shape[-1] // config.num_groups
    grouped = choice.reshape(*choice.shape[:-1], config.num_groups, size)
    members = min(2, size) if config.group_score == "top2_sum" else 1
    group_scores = jax.lax.top_k(grouped, members)[0].sum(axis=-1)
    selected = jax.lax.top_k(group_scores, config.num_selected_groups)[1]
    kept = (selected[..., None] == jnp.arange(config.num_groups)).any(axis=-2)
    masked = -jnp.inf if config.group_mask == "-inf" else 0.0
    return jnp.where(kept[..., None], grouped, masked).reshape(choice.shape)


def _weights(
    logits: jax.Array, scores: jax.Array, expert_ids: jax.Array, config: RouterConfig
) -> jax.Array:
    """The weights of the chosen experts, from scores without bias."""
    exact = config.renormalize_epsilon == 0 and config.renormalize_order == 1
    if config.renormalize and exact and config.weight_activation is None:
        # s / sum(s) as a softmax of log(s): right also where every chosen s underflows.
        if config.score == "softmax":
            return jax.nn.softmax(jnp.take_along_axis(logits, expert_ids, axis=-1), axis=-1)
        if config.score == "sigmoid":
            chosen = jnp.take_along_axis(logits, expert_ids, axis=-1)
            return jax.nn.softmax(jax.nn.log_sigmoid(chosen), axis=-1)
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    if config.weight_activation == "softmax":
        weights = jax.nn.softmax(weights, axis=-1)
    elif config.weight_activation == "sigmoid":
        weights = jax.nn.sigmoid(weights)
    return renormalize_weights(weights, config) if config.renormalize else weights


def renormalize_weights(weights: jax.Array, config: RouterConfig) -> jax.Array:
    order = config.renormalize_order
    if order == 1:
        norm = weights.sum(axis=-1, keepdims=True)
    elif math.isinf(order):
        norm = jnp.abs(weights).max(axis=-1, keepdims=True)
    else:
        power = (jnp.abs(weights) ** order).sum(axis=-1, keepdims=True)
        norm = jnp.where(power == 0, 0.0, jnp.where(power == 0, 1.0, power) ** (1 / order))
    if config.renormalize_mode == "max":
        norm = jnp.maximum(norm, config.renormalize_epsilon)
    else:
        norm = norm + config.renormalize_epsilon
    return weights / jnp.where(norm == 0, 1.0, norm)


def _probabilities(logits: jax.Array, scores: jax.Array, config: RouterConfig) -> jax.Array:
    if config.score == "softmax":
        return scores
    if config.score == "identity":
        return jax.nn.softmax(logits, axis=-1)
    total = scores.sum(axis=-1, keepdims=True)
    return scores / jnp.where(total == 0, 1.0, total)


def _check_logits(logits: jax.Array, config: RouterConfig, k: int) -> None:
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits must be [tokens, experts], got shape {logits.shape}")
    check_experts_per_token(k, logits.shape[-1] - config.num_identity_experts, config)


def _check_vector(name: str, value: jax.Array | None, wanted: bool, size: int) -> None:
    if value is None:
        if wanted:
            raise ValueError(f"the router has {name}: pass {name} of shape ({size},)")
        return
    if not wanted:
        raise ValueError(f"{name} was given, but RouterConfig.{name} is False")
    if value.shape != (size,):
        raise ValueError(
            f"{name} must have shape ({size},), one entry an expert, got {value.shape}"
        )
