"""Router losses and load statistics, in two stages so that they are right on a mesh.

``routing_statistics`` makes plain sums over the tokens at hand. Sums of parts add up to the sum
of the whole, so the caller adds them over mesh axes that shard tokens (``jax.lax.psum`` of the
tree), over micro-batches or over layers; the functions after that turn sums into means.
"""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from moe_flax.routing import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Sums over tokens; padding tokens count nowhere. Adding two trees adds their tokens.

    Counts are int32: exact for up to 2^31 slots, T * K over all devices and layers added.

    Attributes:
      counts: [E] int32, slots that chose each expert.
      probability_sum: [E] float32, the router's probabilities.
      z_sum: [] float32, squared logsumexp of the logits.
      entropy_sum: [] float32, entropy of the probabilities, in nats.
      num_tokens: [] int32.
      num_slots: [] int32, tokens times K.
      num_dropped: [] int32, slots that got no expert for want of capacity.
      sequence_counts: [S, E] int32, ``counts`` of each sequence, or None.
      sequence_probability_sum: [S, E] float32, or None.
      sequence_tokens: [S] int32, or None.
    """

    counts: Int[Array, " E"]
    probability_sum: Float[Array, " E"]
    z_sum: Float[Array, ""]
    entropy_sum: Float[Array, ""]
    num_tokens: Int[Array, ""]
    num_slots: Int[Array, ""]
    num_dropped: Int[Array, ""]
    sequence_counts: Int[Array, "S E"] | None = None
    sequence_probability_sum: Float[Array, "S E"] | None = None
    sequence_tokens: Int[Array, " S"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """What a layer reports of one call, over all tokens of all devices.

    Attributes:
      load_balancing_loss: [] float32, without coefficient.
      router_z_loss: [] float32, without coefficient.
      tokens_per_expert: [E] int32, slots that chose each expert.
      dropped_fraction: [] float32, share of slots that got no expert.
      router_entropy: [] float32, mean entropy of the router's probabilities, in nats.
    """

    load_balancing_loss: Float[Array, ""]
    router_z_loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"]
    dropped_fraction: Float[Array, ""]
    router_entropy: Float[Array, ""]


def routing_statistics(
    logits: Float[Array, "T E"],
    routing: Routing,
    num_experts: int,
    *,
    kept: Routing | None = None,
    mask: Bool[Array, " T"] | None = None,
    probabilities: tp.Literal["softmax", "scores"] = "softmax",
    sequence_ids: Int[Array, " B"] | None = None,
    num_sequences: int = 0,
) -> RoutingStatistics:
    """Sums what losses and load figures need over the tokens at hand.

    Gradients flow through logits and probabilities, never through counts.

    Args:
      logits: [T, E + Z], what the router gave.
      routing: of these tokens. Ids of E + Z and more are dropped slots.
      num_experts: E; identity experts' columns past it are counted nowhere.
      kept: the same routing after capacity. Then ``routing`` is the demand, which losses count,
        and drops are taken from here.
      mask: [T], False for padding.
      probabilities: "softmax" of the logits, whatever the router's score (Mixtral, Switch), or
        "scores": ``routing.probabilities``, for sigmoid routers normalised scores (DeepSeek-V3).
      sequence_ids: [B], asks for sums of each sequence too: the T tokens are B rows of equal
        length, in order, and these are their distinct numbers in the global batch. A row may be
        a part of its sequence.
      num_sequences: S, sequences in the global batch; needed with ``sequence_ids``.

    Raises:
      ValueError: a shape does not fit.
    """
    columns = logits.shape[-1]
    _check_statistics(logits, routing, num_experts, mask, sequence_ids, num_sequences)
    valid = jnp.ones(logits.shape[0], jnp.bool) if mask is None else mask.astype(jnp.bool)
    # Padding may hold anything: it is replaced ahead of every function, so that gradients stay
    # finite as well.
    logits = jnp.where(valid[:, None], logits.astype(jnp.float32), 0.0)
    if probabilities == "softmax":
        p = jax.nn.softmax(logits, axis=-1)
    elif probabilities == "scores" and routing.probabilities is not None:
        p = jnp.where(valid[:, None], routing.probabilities, 0.0)
    else:
        raise ValueError(
            "probabilities must be 'softmax', or 'scores' where routing.probabilities is there,"
            f" got {probabilities!r}"
        )
    log_z = jax.nn.logsumexp(logits, axis=-1)
    log_p = jnp.log(jnp.where(p > 0, p, 1.0))
    chosen = jnp.where(valid[:, None], p[:, :num_experts], 0.0)
    final = (routing if kept is None else kept).expert_ids
    num_tokens = valid.sum(dtype=jnp.int32)

    sequences = {}
    if sequence_ids is not None:
        rows = len(sequence_ids)
        ids = routing.expert_ids.reshape(rows, -1, routing.expert_ids.shape[-1])
        row_valid = valid.reshape(rows, -1)
        parts = {
            "sequence_counts": jax.vmap(lambda i, v: tokens_per_expert(i, num_experts, mask=v))(
                ids, row_valid
            ),
            "sequence_probability_sum": chosen.reshape(rows, -1, num_experts).sum(axis=1),
            "sequence_tokens": row_valid.sum(axis=1, dtype=jnp.int32),
        }
        for name, part in parts.items():
            whole = jnp.zeros((num_sequences, *part.shape[1:]), part.dtype)
            sequences[name] = whole.at[sequence_ids].set(part, unique_indices=True)

    return RoutingStatistics(
        counts=tokens_per_expert(routing.expert_ids, num_experts, mask=valid),
        probability_sum=chosen.sum(axis=0),
        z_sum=jnp.where(valid, jnp.square(log_z), 0.0).sum(),
        entropy_sum=jnp.where(valid, -(p * log_p).sum(axis=-1), 0.0).sum(),
        num_tokens=num_tokens,
        num_slots=num_tokens * routing.expert_ids.shape[-1],
        num_dropped=(valid[:, None] & (final >= columns)).sum(dtype=jnp.int32),
        **sequences,
    )


def moe_aux(
    statistics: RoutingStatistics,
    *,
    form: tp.Literal["switch", "huggingface"] = "switch",
    per_sequence: bool = False,
) -> MoEAux:
    """Turns summed statistics into MoEAux; see ``load_balancing_loss`` for the arguments."""
    return MoEAux(
        load_balancing_loss=load_balancing_loss(statistics, form=form, per_sequence=per_sequence),
        router_z_loss=router_z_loss(statistics),
        tokens_per_expert=statistics.counts,
        dropped_fraction=dropped_fraction(statistics),
        router_entropy=router_entropy(statistics),
    )


def load_balancing_loss(
    statistics: RoutingStatistics,
    *,
    form: tp.Literal["switch", "huggingface"] = "switch",
    per_sequence: bool = False,
) -> Float[Array, ""]:
    """``E * sum_e f_e * P_e``: f_e the load of an expert, P_e its mean probability.

    Args:
      statistics: sums over all tokens. Added over layers first, they give the one loss of all
        layers that Hugging Face computes.
      form: "switch": f_e is the share of slots; 1 at balance (Switch Transformer, equation 4;
        DeepSeek-V3's form too). "huggingface": f_e is slots over tokens; K at balance.
      per_sequence: the mean over sequences of their own losses (DeepSeek-V3, equation 17), rather
        than the loss of the batch; needs statistics made with ``sequence_ids``.

    Raises:
      ValueError: ``form`` is not known, or there are no sums of sequences.
    """
    if form not in ("switch", "huggingface"):
        raise ValueError(f"form must be 'switch' or 'huggingface', got {form!r}")
    # With K = slots / tokens, both forms come from slots over tokens.
    scale = statistics.counts.shape[-1] * (
        _mean(statistics.num_tokens, statistics.num_slots) if form == "switch" else 1.0
    )
    if not per_sequence:
        load = _mean(statistics.counts, statistics.num_tokens)
        return scale * (load * _mean(statistics.probability_sum, statistics.num_tokens)).sum()
    if (
        statistics.sequence_counts is None
        or statistics.sequence_probability_sum is None
        or statistics.sequence_tokens is None
    ):
        raise ValueError("per_sequence needs routing_statistics(..., sequence_ids, num_sequences)")
    tokens = statistics.sequence_tokens[:, None]
    load = _mean(statistics.sequence_counts, tokens)
    losses = (load * _mean(statistics.sequence_probability_sum, tokens)).sum(axis=-1)
    return scale * _mean(losses.sum(), (tokens > 0).sum())


def router_z_loss(statistics: RoutingStatistics) -> Float[Array, ""]:
    """Mean over tokens of ``logsumexp(logits) ** 2`` (ST-MoE, equation 5)."""
    return _mean(statistics.z_sum, statistics.num_tokens)


def router_entropy(statistics: RoutingStatistics) -> Float[Array, ""]:
    """Mean over tokens of the entropy of the router's probabilities, in nats."""
    return _mean(statistics.entropy_sum, statistics.num_tokens)


def dropped_fraction(statistics: RoutingStatistics) -> Float[Array, ""]:
    """Share of slots that got no expert for want of capacity."""
    return _mean(statistics.num_dropped, statistics.num_slots)


def tokens_per_expert(
    expert_ids: Int[Array, "T K"], num_experts: int, *, mask: Bool[Array, " T"] | None = None
) -> Int[Array, " E"]:
    """Slots that chose each expert, int32; ids of ``num_experts`` and more count nowhere."""
    hits = expert_ids[..., None] == jnp.arange(num_experts, dtype=expert_ids.dtype)
    if mask is not None:
        hits = hits & mask[:, None, None]
    return hits.sum(axis=(0, 1), dtype=jnp.int32)


def max_violation(tokens_per_expert: Num[Array, "... E"]) -> Float[Array, "..."]:
    """How far the fullest expert is above the mean: ``max(load) / mean(load) - 1``, 0 if unused.

    MaxVio of Wang et al. 2024, arXiv:2408.15664.
    """
    load = tokens_per_expert.astype(jnp.float32)
    mean = load.mean(axis=-1)
    return jnp.where(mean > 0, load.max(axis=-1) / jnp.where(mean > 0, mean, 1.0) - 1.0, 0.0)


def update_correction_bias(
    bias: Float[Array, " E"], tokens_per_expert: Num[Array, " E"], rate: float
) -> Float[Array, " E"]:
    """One step of balancing without a loss: raises underloaded experts' biases, lowers others'.

    ``bias + rate * sign(mean_load - load)`` (DeepSeek-V3; Wang et al. 2024, arXiv:2408.15664).

    Args:
      bias: [E + Z] float32; those of identity experts stay.
      tokens_per_expert: [E], the load over the global batch: ``MoEAux.tokens_per_expert``.
      rate: the step (DeepSeek-V3: 1e-3).

    Raises:
      ValueError: the shapes do not fit.
    """
    if tokens_per_expert.ndim != 1 or bias.ndim != 1 or len(tokens_per_expert) > len(bias):
        raise ValueError(
            "need bias [E + Z] and tokens_per_expert [E], got shapes "
            f"{bias.shape} and {tokens_per_expert.shape}"
        )
    load = tokens_per_expert.astype(jnp.float32)
    step = rate * jnp.sign(load.mean() - load)
    return bias + jnp.pad(step, (0, len(bias) - len(load))).astype(bias.dtype)


def _mean(total: Num[Array, "..."], count: Int[Array, "..."]) -> Float[Array, "..."]:
    """Total over count; 0 where nothing was counted."""
    return total.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)


def _check_statistics(
    logits: jax.Array,
    routing: Routing,
    num_experts: int,
    mask: jax.Array | None,
    sequence_ids: jax.Array | None,
    num_sequences: int,
) -> None:
    tokens, columns = logits.shape
    if routing.expert_ids.shape[0] != tokens:
        raise ValueError(f"{tokens} tokens in logits, {routing.expert_ids.shape[0]} in routing")
    if not 1 <= num_experts <= columns:
        raise ValueError(f"num_experts must be between 1 and {columns}, got {num_experts}")
    if mask is not None and mask.shape != (tokens,):
        raise ValueError(f"mask must have shape ({tokens},), got {mask.shape}")
    if sequence_ids is not None and (tokens % max(len(sequence_ids), 1) or num_sequences < 1):
        raise ValueError(
            f"sequence_ids of {len(sequence_ids)} rows must divide {tokens} tokens and need"
            f" num_sequences >= 1, got {num_sequences}"
        )
