"""The plain reference of `fused_ep_moe`: every token through every expert, in float32."""

from moe_flax.experts import expert_ffn_reference as fused_ep_moe_reference

__all__ = ["fused_ep_moe_reference"]
