"""The fused expert-parallel kernel for TPU."""

from moe_flax.kernels.fused_ep.api import fused_ep_moe
from moe_flax.kernels.fused_ep.blocks import BlockSizes
from moe_flax.kernels.fused_ep.from_logits import fused_ep_moe_from_logits
from moe_flax.kernels.fused_ep.local import fused_ep_local
from moe_flax.kernels.fused_ep.reference import fused_ep_moe_reference

__all__ = [
    "BlockSizes",
    "fused_ep_local",
    "fused_ep_moe",
    "fused_ep_moe_from_logits",
    "fused_ep_moe_reference",
]
