"""Mixture-of-experts layers for Flax: fast on CPU, GPU and TPU, sharded over any mesh."""

import typing as _tp

from moe_flax import checkpoint, losses
from moe_flax.activations import Activation
from moe_flax.config import MoEConfig, RouterConfig, SharedConfig, preset_names
from moe_flax.experts import expert_ffn
from moe_flax.kernels.grouped_matmul import grouped_matmul
from moe_flax.layers import Experts, MoE, Router, SharedExperts
from moe_flax.losses import MoEAux
from moe_flax.parameters import CorrectionBias
from moe_flax.routing import Routing, route

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "CorrectionBias",
    "Experts",
    "MoE",
    "MoEAux",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedConfig",
    "SharedExperts",
    "checkpoint",
    "expert_ffn",
    "fused_ep_moe",
    "fused_ep_moe_from_logits",
    "grouped_matmul",
    "losses",
    "preset_names",
    "route",
]


def __getattr__(name: str) -> _tp.Any:
    if name in ("fused_ep_moe", "fused_ep_moe_from_logits"):
        from moe_flax.kernels import fused_ep  # imports Pallas for TPU, which few programs need

        return getattr(fused_ep, name)
    raise AttributeError(f"module 'moe_flax' has no attribute {name!r}")
