"""How token rows travel to the devices that hold their experts: one file a strategy."""

from moe_flax.parallel.all_gather import all_gather, replicated
from moe_flax.parallel.all_to_all import all_to_all, buffer_rows
from moe_flax.parallel.common import ExpertWeights, FeedForward, Strategy
from moe_flax.parallel.fused import Fused, choose_fused
from moe_flax.parallel.none import none

STRATEGIES: dict[str, Strategy] = {
    "none": none,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}

__all__ = [
    "STRATEGIES",
    "ExpertWeights",
    "FeedForward",
    "Fused",
    "Strategy",
    "all_gather",
    "all_to_all",
    "check_strategy",
    "choose_fused",
    "choose_strategy",
    "none",
    "replicated",
]


def check_strategy(name: str | Fused) -> str | Fused:
    """Returns the name of a strategy, or raises a ValueError that lists them."""
    allowed = ("auto", *STRATEGIES, "fused")
    if not isinstance(name, Fused) and name not in allowed:
        raise ValueError(
            f"expert_parallel {name!r} is not known; allowed: {allowed} and moe_flax.parallel.Fused"
        )
    return name


def choose_strategy(name: str, *, num_tokens: int, k: int, peers: int) -> Strategy:
    """The collective strategy of a name; "auto" takes the one that moves the fewest rows.

    Args:
      name: "auto", "none", "all_gather" or "all_to_all".
      num_tokens: tokens on one device.
      k: experts a token.
      peers: devices that share the experts.
    """
    if name != "auto":
        return STRATEGIES[name]
    if peers == 1:
        return none
    exchanged = peers * buffer_rows(num_tokens, k, peers)
    return all_to_all if exchanged < peers * num_tokens else all_gather
