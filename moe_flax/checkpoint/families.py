"""The table of public families: a row a family, all data.

A row says which fields of config.json mean what, how the router runs, and under which keys and in
which layout the weights lie. Field names, defaults and orders follow the families' own published
configurations and files, as `transformers` reads and writes them.
"""

import os
import typing as tp

from moe_flax.checkpoint.errors import fault
from moe_flax.checkpoint.hf_config import load_json, read_config, text_values
from moe_flax.checkpoint.schema import (
    Entry,
    Family,
    Field,
    Form,
    LayerRule,
    Stack,
    Values,
    field,
)
from moe_flax.config import MoEConfig

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _experts(first: str) -> Field:
    return Field((first, *(name for name in _EXPERTS if name != first)))


def _router(key: str, **more: str) -> tuple[Entry, ...]:
    """Entries of the router: its kernel [R, D], and per-output vectors by parameter name."""
    vectors = (Entry(f"router.{name}", stored, "R") for name, stored in more.items())
    return (Entry("router.kernel", key, "R D"), *vectors)


def _per_expert(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Entry, ...]:
    return (
        Entry("experts.wi", block + "experts.{E}.{J}.weight", "F D", (gate, up)),
        Entry("experts.wo", block + f"experts.{{E}}.{down}.weight", "D F"),
    )


def _fused(block: str) -> tuple[Entry, ...]:
    return (
        Entry("experts.wi", block + "experts.gate_up_proj", "E (J F) D"),
        Entry("experts.wo", block + "experts.down_proj", "E D F"),
    )


_W123 = ("w1", "w3", "w2")
_MIXTRAL_FORMS = (
    Form(
        "per_expert",
        _router("block_sparse_moe.gate.weight") + _per_expert("block_sparse_moe.", *_W123),
    ),
    Form("fused", _router("mlp.gate.weight") + _fused("mlp.")),
)
_QWEN_FORMS = (
    Form("per_expert", _router("mlp.gate.weight") + _per_expert("mlp.")),
    Form("fused", _router("mlp.gate.weight") + _fused("mlp.")),
)
_QWEN_LAYERS = LayerRule(
    period=field("decoder_sparse_step", default=1),
    phase=-1,
    excluded=field("mlp_only_layers", default=()),
)

TABLE: tp.Final[tuple[Family, ...]] = (
    Family(
        ("mixtral",),
        _MIXTRAL_FORMS,
        hidden=field("intermediate_size"),
        experts=_experts("num_local_experts"),
        router={"score": "softmax", "renormalize": True},
    ),
    Family(
        ("qwen3_moe",),
        _QWEN_FORMS,
        hidden=field("moe_intermediate_size"),
        experts=_experts("num_experts"),
        router={"score": "softmax", "renormalize": field("norm_topk_prob", default=False)},
        stacks=(Stack(rule=_QWEN_LAYERS),),
    ),
)

BY_MODEL_TYPE: tp.Final[dict[str, Family]] = {
    model_type: family for family in TABLE for model_type in family.model_types
}


def find(model_type: str) -> Family:
    """The row of a model type.

    Raises:
      CheckpointError: there is none; the message lists the known ones.
    """
    if model_type not in BY_MODEL_TYPE:
        raise fault(f"model_type {model_type!r} is not known; known: {', '.join(BY_MODEL_TYPE)}")
    return BY_MODEL_TYPE[model_type]


def resolve(values: Values) -> tuple[Family, Values]:
    """The row of a parsed config.json, and the part of it that the row's fields are read from."""
    model_type, text = text_values(values, BY_MODEL_TYPE)
    return find(model_type), text


def config_from_hf(source: str | os.PathLike[str] | Values, layer: int | None = None) -> MoEConfig:
    """Reads a Hugging Face configuration.

    Args:
      source: a model directory, a ``config.json``, or its parsed dict.
      layer: the layer whose values count where the family has them a layer; by default the first
        MoE layer.

    Raises:
      CheckpointError: a ValueError; the model type is unknown, or a field is missing or has a
        value that is not known.
    """
    return read_config(*resolve(load_json(source)), layer=layer)
