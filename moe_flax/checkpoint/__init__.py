"""Public PyTorch MoE checkpoints to this library's layers, and back."""

from moe_flax.checkpoint.convert import Checkpoint, load, load_layer, load_parameters, save
from moe_flax.checkpoint.errors import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load", "load_layer", "load_parameters", "save"]
