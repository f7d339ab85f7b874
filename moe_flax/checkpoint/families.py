"""The table of public families: a row a family, all data.

A row says which fields of config.json mean what, how the router runs, and under which keys and in
which layout the weights lie. Field names, defaults and orders follow the families' own published
configurations and files, as `transformers` reads and writes them.
"""

import dataclasses
import os
import typing as tp

from moe_flax.checkpoint.errors import fault, reading_config
from moe_flax.checkpoint.forms import (
    GATE_UP_DOWN,
    W123,
    fused,
    per_expert,
    router,
    shared,
    stacked,
    two_forms,
)
from moe_flax.checkpoint.hf_config import load_json, read_config, text_values
from moe_flax.checkpoint.schema import (
    FUNCTIONS,
    Act,
    Entry,
    Family,
    Field,
    Form,
    LayerRule,
    Shared,
    Stack,
    Values,
    field,
)
from moe_flax.config import MoEConfig

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _experts(first: str) -> Field:
    return Field((first, *(name for name in _EXPERTS if name != first)))


def _layers(rule: LayerRule, *prefixes: str) -> tuple[Stack, ...]:
    return (Stack(rule=rule, prefixes=(*Stack().prefixes, *prefixes)),)


_MOE_WIDTH = field("moe_intermediate_size")
_WIDTH = field("intermediate_size")


def _after_dense(default: int) -> tuple[Stack, ...]:
    """MoE past the first dense layers, or where ``mlp_layer_types`` says so."""
    return _layers(
        LayerRule(
            types=field("mlp_layer_types", default=None),
            first=field("first_k_dense_replace", default=default),
            period=field("moe_layer_freq", default=1),
        )
    )


def _softmax(renormalize: tp.Any) -> dict[str, tp.Any]:
    """Softmax over all experts, then the K best."""
    return {"score": "softmax", "renormalize": renormalize}


def _top_k_then(activation: tp.Any) -> dict[str, tp.Any]:
    """The K best logits, then softmax or sigmoid over them."""
    return {"score": "identity", "renormalize": False, "weight_activation": activation}


def _deepseek(
    scale: tp.Any,
    groups: tuple[int, int] = (1, 1),
    renormalize: tp.Any = True,
) -> dict[str, tp.Any]:
    """Sigmoid scores, a correction bias for the choice, groups by the sum of their two best."""
    return {
        "score": "sigmoid",
        "correction_bias": True,
        "renormalize": renormalize,
        "renormalize_epsilon": 1e-20,
        "scale": scale,
        "num_groups": field("n_group", default=groups[0]),
        "num_selected_groups": field("topk_group", default=groups[1]),
    }


def _norm(default: bool) -> Field:
    return field("norm_topk_prob", default=default)


def _scale(default: float) -> Field:
    return field("routed_scaling_factor", default=default)


def _shared_count(default: int) -> Shared:
    """n experts of the routed experts' width, run as one; null or 0 means none."""
    return Shared(
        _MOE_WIDTH, field("n_shared_experts", "num_shared_experts", default=default, null=0)
    )


_SIGMOID_ONLY: dict[str, tuple[tp.Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
_QWEN_LAYERS = _layers(
    LayerRule(
        period=field("decoder_sparse_step", default=1),
        phase=-1,
        excluded=field("mlp_only_layers", default=()),
    )
)
_QWEN_ROUTER = router("mlp.gate.weight")
_QWEN_SHARED = shared("mlp.shared_expert.", gate="mlp.shared_expert_gate.weight")
_QWEN_SHARED_SIZE = Shared(field("shared_expert_intermediate_size"), combine="gated")
_BIAS_IN_GATE = router("mlp.gate.weight", correction_bias="mlp.gate.e_score_correction_bias")
_MIXTRAL_ROUTER = router("block_sparse_moe.gate.weight")
_DEEPSEEK_FORMS = two_forms("mlp.", GATE_UP_DOWN, _BIAS_IN_GATE + shared("mlp.shared_experts."))
_GPT_OSS_REST = (
    *router("mlp.router.weight", bias="mlp.router.bias"),
    Entry("experts.wi_bias", "mlp.experts.gate_up_proj_bias", "E (F J)"),
    Entry("experts.wo_bias", "mlp.experts.down_proj_bias", "E D"),
)
_OPENAI_REST = (
    *router("mlp.gate.weight", bias="mlp.gate.bias"),
    Entry("experts.wi_bias", "mlp.mlp1_bias", "E (F J)"),
    Entry("experts.wo_bias", "mlp.mlp2_bias", "E D"),
)
_INTERLEAVED_ROWS = ("E (F J) D", "E D F")
_IN_OUT = ("E D (J F)", "E F D")
_GRANITE_SHARED = (
    Entry("shared.wi", "shared_mlp.input_linear.weight", "(J S) D"),
    Entry("shared.wo", "shared_mlp.output_linear.weight", "D S"),
)
_GRANITE_FORMS = (
    Form(
        "stacked",
        router("block_sparse_moe.router.layer.weight")
        + _GRANITE_SHARED
        + stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    Form(
        "fused",
        router("block_sparse_moe.router.weight") + _GRANITE_SHARED + fused("block_sparse_moe."),
    ),
)

_LATENT = (
    Entry("latent.wi", "mixer.fc1_latent_proj.weight", "N D"),
    Entry("latent.wo", "mixer.fc2_latent_proj.weight", "D N"),
)

TABLE: tp.Final[tuple[Family, ...]] = (
    # Softmax over all experts, then the K best.
    Family(
        ("mixtral", "minimax", "minimax_text_01"),
        two_forms("block_sparse_moe.", W123, _MIXTRAL_ROUTER, _QWEN_ROUTER, "mlp."),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router=_softmax(True),
    ),
    Family(
        ("qwen2_moe",),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER + _QWEN_SHARED),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(_norm(False)),
        shared=_QWEN_SHARED_SIZE,
        stacks=_QWEN_LAYERS,
    ),
    Family(
        ("qwen3_moe",),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(_norm(False)),
        stacks=_QWEN_LAYERS,
    ),
    Family(
        ("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(_norm(True)),
        stacks=tuple(
            dataclasses.replace(
                stack,
                prefixes=(
                    "thinker.model.layers.{layer}.",
                    "model.layers.{layer}.",
                ),
            )
            for stack in _QWEN_LAYERS
        ),
        note="The thinker's layers; the talker's experts are passed on as they are.",
    ),
    Family(
        ("qwen3_next",),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER + _QWEN_SHARED),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(_norm(True)),
        shared=_QWEN_SHARED_SIZE,
        stacks=_QWEN_LAYERS,
    ),
    Family(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER + _QWEN_SHARED)[::-1],
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(True),
        shared=_QWEN_SHARED_SIZE,
    ),
    Family(
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        (
            Form("fused_in_out", _QWEN_ROUTER + fused("mlp.", _IN_OUT)),
            Form("fused", _QWEN_ROUTER + fused("mlp."), on_request=True),
            Form("per_expert", _QWEN_ROUTER + per_expert("mlp.")),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(True),
        stacks=_QWEN_LAYERS,
        note="Files that transformers 5 wrote from a newly made model hold [E, 2F, D] under the"
        " keys of [E, D, 2F]: load them with form='fused'.",
    ),
    Family(
        ("olmoe", "flex_olmo"),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER),
        hidden=_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(_norm(False)),
    ),
    Family(
        ("hunyuan_v1_moe", "hunyuan"),
        two_forms("mlp.", GATE_UP_DOWN, router("mlp.gate.wg.weight") + shared("mlp.shared_mlp.")),
        hidden=_WIDTH,
        experts=_experts("num_experts"),
        top_k=field("moe_topk", "num_experts_per_tok"),
        router=_softmax(True),
        shared=Shared(_WIDTH),
    ),
    Family(
        ("jamba",),
        two_forms("feed_forward.", GATE_UP_DOWN, router("feed_forward.router.weight")),
        hidden=_WIDTH,
        experts=_experts("num_experts"),
        router=_softmax(False),
        stacks=_layers(
            LayerRule(
                period=field("expert_layer_period", default=2),
                phase=field("expert_layer_offset", default=1),
            )
        ),
    ),
    Family(
        ("dbrx",),
        (
            Form(
                "flat",
                (
                    *router("ffn.router.layer.weight"),
                    Entry("experts.wi", "ffn.experts.mlp.{J}", "(E F) D", ("w1", "v1")),
                    Entry("experts.wo", "ffn.experts.mlp.w2", "(E F) D"),
                ),
            ),
        ),
        features=field("d_model", "hidden_size"),
        hidden=field("ffn_config.ffn_hidden_size"),
        experts=field("ffn_config.moe_num_experts"),
        top_k=field("ffn_config.moe_top_k"),
        router={
            **_softmax(
                field(
                    "ffn_config.moe_normalize_expert_weights", default=True, null=False, cast="bool"
                )
            ),
            "renormalize_order": field(
                "ffn_config.moe_normalize_expert_weights", default=1.0, null=1.0
            ),
        },
        activation=Act(field("ffn_config.ffn_act_fn.name", default="silu", choices=FUNCTIONS)),
        stacks=(
            Stack(
                ("transformer.blocks.{layer}.", "blocks.{layer}."),
                field("n_layers", "num_hidden_layers"),
            ),
        ),
    ),
    Family(
        ("gemma4_text", "gemma4"),
        (
            Form(
                "fused",
                router("router.proj.weight", per_expert_scale="router.per_expert_scale")
                + fused(""),
            ),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        top_k=field("top_k_experts", "num_experts_per_tok"),
        router={**_softmax(True), "per_expert_scale": True},
        activation=Act(field("hidden_activation", default="gelu_pytorch_tanh", choices=FUNCTIONS)),
        expects={"enable_moe_block": (True,)},
        passed=("router.scale",),
        note="The router sees rms_norm(x) * router.scale / sqrt(D), which is not what the experts"
        " see: call the layer with router_inputs; router.scale is in .rest.",
    ),
    Family(
        ("deepseek_v2",),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER + shared("mlp.shared_experts.")),
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router={
            "score": "softmax",
            "renormalize": _norm(False),
            "renormalize_epsilon": 1e-20,
            # DeepSeek's own code renormalises or scales, never both.
            "scale": field(
                "routed_scaling_factor",
                default=1.0,
                when=("norm_topk_prob", (False, None)),
                otherwise=1.0,
            ),
            "num_groups": field(
                "n_group", default=1, when=("topk_method", ("group_limited_greedy",)), otherwise=1
            ),
            "num_selected_groups": field(
                "topk_group",
                default=1,
                when=("topk_method", ("group_limited_greedy",)),
                otherwise=1,
            ),
            "group_score": "max",
            "group_mask": "0",
        },
        shared=_shared_count(2),
        stacks=_after_dense(0),
        expects={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
    ),
    # Softmax scores with a correction bias for the choice.
    Family(
        ("ernie4_5_moe",),
        two_forms(
            "mlp.",
            GATE_UP_DOWN,
            (
                *_QWEN_ROUTER,
                Entry("router.correction_bias", "mlp.moe_statics.e_score_correction_bias", "1 R"),
                *shared("mlp.shared_experts."),
            ),
            (
                *_QWEN_ROUTER,
                Entry(
                    "router.correction_bias",
                    "mlp.gate.moe_statics.e_score_correction_bias",
                    "1 R",
                ),
                *shared("mlp.shared_experts."),
            ),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("moe_num_experts"),
        top_k=field("moe_k", "num_experts_per_tok"),
        router={
            **_softmax(True),
            "correction_bias": True,
            "renormalize_mode": "max",
            "renormalize_epsilon": field("moe_norm_min", default=1e-12),
        },
        shared=Shared(_MOE_WIDTH, field("moe_num_shared_experts", default=2, null=0)),
        stacks=_layers(
            LayerRule(
                first=field("moe_layer_start_index", default=1),
                last=field("moe_layer_end_index", default=-1),
                period=field("moe_layer_interval", default=1),
                phase=-1,
            )
        ),
        expects={"use_bias": (False,)},
    ),
    Family(
        ("longcat_flash",),
        (
            Form(
                "per_expert",
                router(
                    "mlp.router.classifier.weight",
                    bias="mlp.router.classifier.bias",
                    correction_bias="mlp.router.e_score_correction_bias",
                )
                + per_expert("mlp."),
            ),
        ),
        hidden=field("expert_ffn_hidden_size", "moe_intermediate_size"),
        experts=_experts("n_routed_experts"),
        top_k=field("moe_topk", "num_experts_per_tok"),
        router={
            **_softmax(False),
            "correction_bias": True,
            "logit_bias": field("router_bias", default=False),
            "scale": _scale(6.0),
            "num_identity_experts": field("zero_expert_num", default=256, null=0),
        },
        stacks=(Stack(num_layers=field("num_layers", "num_hidden_layers")),),
        expects={"zero_expert_type": ("identity",), "norm_topk_prob": (False,)},
    ),
    # The K best logits, then softmax or sigmoid over them.
    Family(
        ("gpt_oss",),
        (
            Form("interleaved", _GPT_OSS_REST + fused("mlp.", ("E D (F J)", "E F D"))),
            Form(
                "mxfp4",
                _GPT_OSS_REST
                + stacked(
                    "mlp.experts.gate_up_proj_blocks",
                    "mlp.experts.down_proj_blocks",
                    _INTERLEAVED_ROWS,
                ),
                floats="interleaved",
            ),
            Form(
                "openai",
                _OPENAI_REST + stacked("mlp.mlp1_weight", "mlp.mlp2_weight", _INTERLEAVED_ROWS),
                prefix="block.{layer}.",
            ),
            Form(
                "openai_mxfp4",
                _OPENAI_REST
                + stacked("mlp.mlp1_weight.blocks", "mlp.mlp2_weight.blocks", _INTERLEAVED_ROWS),
                prefix="block.{layer}.",
                floats="openai",
            ),
        ),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        top_k=field("num_experts_per_tok", "experts_per_token"),
        router={**_top_k_then("softmax"), "logit_bias": True},
        activation=Act(
            function="silu",
            alpha=field("swiglu_alpha", default=1.702),
            up_offset=1.0,
            limit=field("swiglu_limit", default=7.0),
        ),
        use_bias=True,
        stacks=_layers(LayerRule(), "block.{layer}."),
        passed=("mlp.norm.scale",),
    ),
    Family(
        ("llama4_text", "llama4"),
        (
            Form(
                "fused_in_out",
                router("feed_forward.router.weight")
                + shared("feed_forward.shared_expert.")
                + fused("feed_forward.", _IN_OUT),
            ),
            Form(
                "per_expert",
                router("feed_forward.router.weight")
                + shared("feed_forward.shared_expert.")
                + per_expert("feed_forward."),
            ),
            Form(
                "meta",
                (
                    Entry("router.kernel", "feed_forward.router_DE", "D R"),
                    Entry(
                        "experts.wi",
                        "feed_forward.experts.{J}",
                        "(E D) F",
                        ("moe_w_in_eD_F", "moe_w_swiglu_eD_F"),
                    ),
                    Entry("experts.wo", "feed_forward.experts.moe_w_out_eF_D", "(E F) D"),
                    Entry(
                        "shared.wi",
                        "feed_forward.{J}.weight",
                        "S D",
                        ("w_in_shared_FD", "w_swiglu_FD"),
                    ),
                    Entry("shared.wo", "feed_forward.w_out_shared_DF.weight", "D S"),
                ),
                prefix="layers.{layer}.",
            ),
        ),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router={**_top_k_then("sigmoid"), "apply_to": "input"},
        shared=Shared(_WIDTH),
        stacks=_layers(
            LayerRule(
                indices=field("moe_layers", default=None),
                period=field("interleave_moe_layer_step", default=1),
                phase=-1,
            )
        ),
    ),
    Family(
        ("granitemoe", "granitemoeshared"),
        _GRANITE_FORMS,
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router=_top_k_then("softmax"),
        shared=Shared(field("shared_intermediate_size", default=0)),
    ),
    Family(
        ("granitemoehybrid",),
        _GRANITE_FORMS,
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router=_top_k_then("softmax"),
        shared=Shared(field("shared_intermediate_size", default=1024)),
    ),
    Family(
        ("jetmoe",),
        (
            Form(
                "stacked",
                (
                    *router("mlp.router.layer.weight"),
                    *stacked("mlp.input_linear.weight", "mlp.output_linear.weight"),
                    Entry("experts.wi_bias", None, "E J F"),
                    # One bias after the combine; the K weights of a token sum to 1, so it is the
                    # same as one that every expert adds.
                    Entry("experts.wo_bias", "mlp.bias", "D"),
                ),
            ),
        ),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router=_top_k_then("softmax"),
        activation=Act(
            field("activation_function", "hidden_act", default="silu", choices=FUNCTIONS)
        ),
        use_bias=True,
    ),
    Family(
        ("aria_text", "aria"),
        (
            Form(
                "stacked",
                router("mlp.router.weight")
                + shared("mlp.shared_experts.")
                + stacked("mlp.experts.fc1.weight", "mlp.experts.fc2.weight", _IN_OUT),
            ),
            Form(
                "fused_in_out",
                router("mlp.router.weight")
                + shared("mlp.shared_experts.")
                + fused("mlp.", _IN_OUT),
            ),
        ),
        hidden=_WIDTH,
        experts=_experts("moe_num_experts"),
        top_k=field("moe_topk", "num_experts_per_tok"),
        router=_top_k_then("softmax"),
        shared=Shared(_WIDTH, field("moe_num_shared_experts", default=2, null=0)),
        expects={"mlp_bias": (False,)},
    ),
    Family(
        ("cohere2_moe",),
        two_forms("mlp.", GATE_UP_DOWN, _QWEN_ROUTER + shared("mlp.shared_experts.")),
        hidden=_WIDTH,
        experts=_experts("num_experts"),
        router={
            "score": "identity",
            "weight_activation": field(
                "expert_selection_fn",
                default="softmax",
                choices={"softmax": "softmax", "sigmoid": "sigmoid"},
            ),
            "renormalize": field(
                "norm_topk_prob",
                default=True,
                when=("expert_selection_fn", ("sigmoid",)),
                otherwise=False,
            ),
        },
        shared=Shared(
            _WIDTH,
            field("num_shared_experts", default=0, null=0),
            combine=field(
                "shared_expert_combination_strategy",
                default="average",
                choices={"sum": "add", "average": "average"},
            ),
        ),
        stacks=_after_dense(0),
    ),
    # Sigmoid scores, a correction bias for the choice, groups.
    Family(
        ("deepseek_v3", "kimi_k2", "kimi_k25"),
        (
            *_DEEPSEEK_FORMS,
            Form(
                "native",
                router("ffn.gate.weight", correction_bias="ffn.gate.bias")
                + shared("ffn.shared_experts.", W123)
                + per_expert("ffn.", W123),
                prefix="layers.{layer}.",
            ),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(2.5), (8, 4), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(3),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("deepseek_v32",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(2.5), (8, 4), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(3),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("glm4_moe", "glm4v_moe", "glm4v_moe_text"),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.0), (1, 1), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(1),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("glm4_moe_lite",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.8), (1, 1), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(1),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("glm_moe_dsa",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(2.5), (1, 1), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(3),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("dots1",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.0), (1, 1), _norm(False)),
        shared=_shared_count(0),
        stacks=_after_dense(0),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("solar_open",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.0), (1, 1), _norm(True)),
        shared=_shared_count(1),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("mimo_v2_flash",),
        two_forms("mlp.", GATE_UP_DOWN, _BIAS_IN_GATE),
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.0), (1, 1), _norm(True)),
        stacks=_layers(
            LayerRule(
                types=field("mlp_layer_types", "moe_layer_freq", default=None),
                moe_type=("sparse", 1),
                first=1,
            )
        ),
        expects={**_SIGMOID_ONLY, "n_shared_experts": (0,)},
    ),
    Family(
        ("axk1",),
        _DEEPSEEK_FORMS,
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(2.5), (8, 4), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(1),
        expects=_SIGMOID_ONLY,
        note="The model normalises the layer's output; post_mlp_layernorm is in .rest.",
    ),
    Family(
        ("exaone_moe",),
        two_forms(
            "mlp.",
            GATE_UP_DOWN,
            router("mlp.gate.weight", correction_bias="mlp.e_score_correction_bias")
            + shared("mlp.shared_experts."),
            _BIAS_IN_GATE + shared("mlp.shared_experts."),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router=_deepseek(_scale(2.5), (1, 1), _norm(True)),
        shared=_shared_count(1),
        stacks=_after_dense(1),
        expects=_SIGMOID_ONLY,
    ),
    Family(
        ("bailing_hybrid", "bailing_moe_v2"),
        two_forms(
            "mlp.",
            GATE_UP_DOWN,
            router("mlp.gate.weight", correction_bias="mlp.gate.expert_bias")
            + shared("mlp.shared_experts."),
            _BIAS_IN_GATE + shared("mlp.shared_experts."),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router={
            **_deepseek(
                _scale(2.5), (8, 4), field("norm_topk_prob", "moe_renormalize", default=True)
            ),
            "num_groups": field("n_group", "num_expert_group", default=8),
        },
        shared=_shared_count(1),
        stacks=_after_dense(2),
        expects={"score_function": ("sigmoid",)},
    ),
    Family(
        ("kimi_linear",),
        two_forms(
            "block_sparse_moe.",
            W123,
            router(
                "block_sparse_moe.gate.weight",
                correction_bias="block_sparse_moe.gate.e_score_correction_bias",
            )
            + shared("block_sparse_moe.shared_experts."),
            _BIAS_IN_GATE + shared("mlp.shared_experts."),
            "mlp.",
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router={
            **_deepseek(
                _scale(2.446), (1, 1), field("moe_renormalize", "norm_topk_prob", default=True)
            ),
            "num_groups": field("num_expert_group", "n_group", default=1),
        },
        shared=_shared_count(1),
        stacks=_after_dense(1),
        expects={"moe_router_activation_func": ("sigmoid",)},
    ),
    Family(
        ("nemotron_h",),
        (
            Form(
                "per_expert",
                (
                    *router(
                        "mixer.gate.weight",
                        correction_bias="mixer.gate.e_score_correction_bias",
                    ),
                    Entry("experts.wi", "mixer.experts.{E}.up_proj.weight", "(J F) D"),
                    Entry("experts.wo", "mixer.experts.{E}.down_proj.weight", "D F"),
                    *_LATENT,
                    Entry("shared.wi", "mixer.shared_experts.up_proj.weight", "(J S) D"),
                    Entry("shared.wo", "mixer.shared_experts.down_proj.weight", "D S"),
                ),
            ),
            Form(
                "fused",
                (
                    *router(
                        "mixer.gate.weight",
                        correction_bias="mixer.gate.e_score_correction_bias",
                    ),
                    *stacked("mixer.experts.up_proj", "mixer.experts.down_proj"),
                    *_LATENT,
                    Entry("shared.wi", "mixer.shared_experts.up_proj.weight", "(J S) D"),
                    Entry("shared.wo", "mixer.shared_experts.down_proj.weight", "D S"),
                ),
                prefix="model.layers.{layer}.",
            ),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router=_deepseek(_scale(1.0), (1, 1), _norm(True)),
        activation=Act(field("mlp_hidden_act", default="relu2", choices=FUNCTIONS), gated=False),
        shared=Shared(field("moe_shared_expert_intermediate_size")),
        stacks=(
            Stack(
                ("backbone.layers.{layer}.", "model.layers.{layer}."),
                field("num_hidden_layers", length_of="layers_block_type"),
                LayerRule(
                    types=field("layers_block_type", "layer_types", "hybrid_override_pattern"),
                    moe_type=("moe", "E"),
                ),
            ),
        ),
        latent=field("moe_latent_size", default=None),
        expects={"mlp_bias": (False,)},
    ),
    # Sigmoid scores and a correction bias, without groups.
    Family(
        ("minimax_m2",),
        two_forms(
            "block_sparse_moe.",
            W123,
            router(
                "block_sparse_moe.gate.weight",
                correction_bias="block_sparse_moe.e_score_correction_bias",
            ),
            router("mlp.gate.weight", correction_bias="mlp.e_score_correction_bias"),
            "mlp.",
        ),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router={"score": "sigmoid", "correction_bias": True, "renormalize": True},
        expects={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
    ),
    Family(
        ("minimax_m3_vl_text", "minimax_m3_vl", "minimax_m3"),
        (
            Form(
                "per_expert",
                router(
                    "block_sparse_moe.gate.weight",
                    correction_bias="block_sparse_moe.e_score_correction_bias",
                )
                + shared("block_sparse_moe.shared_experts.")
                + per_expert("block_sparse_moe.", W123),
            ),
            Form(
                "fused",
                (
                    *_BIAS_IN_GATE,
                    Entry("shared.wi", "mlp.shared_experts.gate_up_proj.weight", "(J S) D"),
                    Entry("shared.wo", "mlp.shared_experts.down_proj.weight", "D S"),
                    *fused("mlp."),
                ),
            ),
        ),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router={
            "score": "sigmoid",
            "correction_bias": True,
            "renormalize": True,
            "scale": _scale(2.0),
        },
        activation=Act(
            function="silu",
            alpha=field("swiglu_alpha", default=1.702),
            up_offset=1.0,
            limit=field("swiglu_limit", default=7.0),
        ),
        shared=Shared(field("shared_intermediate_size")),
        stacks=_layers(
            LayerRule(
                types=field("mlp_layer_types", "moe_layer_freq", default=None),
                moe_type=("sparse", 1),
            )
        ),
    ),
    Family(
        ("afmoe",),
        two_forms(
            "mlp.",
            GATE_UP_DOWN,
            router("mlp.router.gate.weight", correction_bias="mlp.expert_bias")
            + shared("mlp.shared_experts."),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router={
            "score": "sigmoid",
            "correction_bias": True,
            "renormalize": True,
            "renormalize_epsilon": 1e-20,
            "scale": field("route_scale", default=1.0),
        },
        shared=Shared(_MOE_WIDTH, field("num_shared_experts", default=2, null=0)),
        stacks=_layers(LayerRule(first=field("num_dense_layers", default=1))),
        expects={"score_func": ("sigmoid",), "route_norm": (True,)},
    ),
    Family(
        ("hy_v3",),
        two_forms(
            "mlp.",
            GATE_UP_DOWN,
            router("mlp.router.gate.weight", correction_bias="mlp.expert_bias")
            + shared("mlp.shared_mlp."),
            router("mlp.gate.weight", correction_bias="mlp.e_score_correction_bias")
            + shared("mlp.shared_experts."),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router={
            "score": "sigmoid",
            "correction_bias": True,
            "renormalize": True,
            "renormalize_epsilon": 1e-20,
            "scale": field("router_scaling_factor", default=2.826),
        },
        shared=Shared(_MOE_WIDTH, field("num_shared_experts", default=1, null=0)),
        stacks=_after_dense(1),
    ),
    Family(
        ("lfm2_moe",),
        two_forms(
            "feed_forward.",
            W123,
            router("feed_forward.gate.weight", correction_bias="feed_forward.expert_bias"),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("num_experts"),
        router={
            "score": "sigmoid",
            "correction_bias": field("use_expert_bias", default=True),
            "renormalize": _norm(True),
            "renormalize_epsilon": 1e-6,
            "scale": _scale(1.0),
        },
        activation=Act(function="silu"),
        stacks=_layers(LayerRule(first=field("num_dense_layers", default=2))),
    ),
    Family(
        ("step3p7", "step3p5", "step3p7_text"),
        (
            Form(
                "stacked",
                (
                    *router("moe.gate.weight", correction_bias="moe.router_bias"),
                    Entry("experts.wi", "moe.{J}.weight", "E F D", ("gate_proj", "up_proj")),
                    Entry("experts.wo", "moe.down_proj.weight", "E D F"),
                    *shared("share_expert."),
                ),
            ),
            Form("fused", _BIAS_IN_GATE + shared("mlp.shared_experts.") + fused("mlp.")),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("moe_num_experts"),
        top_k=field("moe_top_k", "num_experts_per_tok"),
        router={
            "score": "sigmoid",
            "correction_bias": True,
            "renormalize": True,
            "scale": field("moe_router_scaling_factor", default=1.0),
        },
        activation=Act(limit=field("swiglu_limits", default=None), clamp="after"),
        shared=Shared(
            field("share_expert_dims", "share_expert_dim"),
            activation=Act(limit=field("swiglu_limits_shared", default=None), clamp="after"),
        ),
        stacks=_layers(
            LayerRule(
                types=field("mlp_layer_types", default=None),
                indices=field("moe_layers_enum", default=None),
                first=3,
            )
        ),
        expects={"mlp_bias": (False,)},
    ),
    Family(
        ("deepseek_v4",),
        (
            Form(
                "per_expert",
                router("ffn.gate.weight", correction_bias="ffn.gate.bias")
                + shared("ffn.shared_experts.", W123)
                + per_expert("ffn.", W123),
                prefix="layers.{layer}.",
            ),
            Form("fused", _BIAS_IN_GATE + shared("mlp.shared_experts.") + fused("mlp.")),
        ),
        hidden=_MOE_WIDTH,
        experts=_experts("n_routed_experts"),
        router={
            "score": "sqrt_softplus",
            "correction_bias": field(
                "mlp_layer_types",
                choices={"moe": True, "hash_moe": False},
                leading=("num_hash_layers", 3, False, True),
            ),
            "renormalize": True,
            "renormalize_epsilon": 1e-20,
            "scale": _scale(1.5),
        },
        activation=Act(limit=field("swiglu_limit", default=10.0)),
        shared=_shared_count(1),
        expects={
            "scoring_func": ("sqrtsoftplus",),
            "norm_topk_prob": (True,),
        },
        passed=("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
        note="Hash layers choose experts by token id: their table tid2eid is in .rest, and the"
        " layer's own choice is not theirs.",
    ),
    # Others.
    Family(
        ("phimoe",),
        two_forms("block_sparse_moe.", W123, _MIXTRAL_ROUTER, router("mlp.router.weight"), "mlp."),
        hidden=_WIDTH,
        experts=_experts("num_local_experts"),
        router={
            "score": "softmax",
            "renormalize": False,
            "selection": "sparse_mixer",
            "jitter": field("router_jitter_noise", default=0.01),
        },
        expects={"num_experts_per_tok": (2,)},
    ),
    Family(
        ("switch_transformers",),
        (
            Form(
                "per_expert",
                (
                    *router("mlp.router.classifier.weight", bias="mlp.router.classifier.bias"),
                    Entry("experts.wi", "mlp.experts.expert_{E}.wi.weight", "(J F) D"),
                    Entry("experts.wo", "mlp.experts.expert_{E}.wo.weight", "D F"),
                ),
            ),
        ),
        features=field("d_model", "hidden_size"),
        hidden=field("d_ff"),
        experts=_experts("num_experts"),
        top_k=1,
        router={
            **_softmax(False),
            "logit_bias": field("router_bias", default=False),
            "expert_capacity": field("expert_capacity", default=64),
            "capacity_scope": "sequence",
        },
        activation=Act(field("dense_act_fn", default="relu", choices=FUNCTIONS), gated=False),
        stacks=(
            Stack(
                ("encoder.block.{layer}.layer.1.",),
                field("num_layers"),
                LayerRule(period=field("encoder_sparse_step"), phase=1),
            ),
            Stack(
                ("decoder.block.{layer}.layer.2.",),
                field("num_decoder_layers"),
                LayerRule(period=field("decoder_sparse_step"), phase=1),
            ),
        ),
        note="A token past expert_capacity of its own sequence is dropped: call the layer with"
        " [batch, sequence, features].",
    ),
    Family(
        ("nllb-moe", "nllb_moe"),
        (
            Form(
                "per_expert",
                (
                    *router("ffn.router.classifier.weight", bias="ffn.router.classifier.bias"),
                    Entry("experts.wi", "ffn.experts.expert_{E}.fc1.weight", "(J F) D"),
                    Entry("experts.wi_bias", "ffn.experts.expert_{E}.fc1.bias", "(J F)"),
                    Entry("experts.wo", "ffn.experts.expert_{E}.fc2.weight", "D F"),
                    Entry("experts.wo_bias", "ffn.experts.expert_{E}.fc2.bias", "D"),
                ),
            ),
        ),
        features=field("d_model", "hidden_size"),
        hidden=field("encoder_ffn_dim", "decoder_ffn_dim"),
        experts=_experts("num_experts"),
        top_k=2,
        router={
            **_softmax(True),
            "renormalize_mode": "max",
            "renormalize_epsilon": 1.1920928955078125e-07,  # of float32
            "logit_bias": field("router_bias", default=False),
            # At inference the model multiplies by the probability that a token is kept.
            "scale": field("moe_token_dropout", default=0.2, cast="complement"),
            "capacity_fraction": field("moe_eval_capacity_token_fraction", default=1.0),
            "capacity_priority": field(
                "batch_prioritized_routing", default="slot", choices={True: "weight", False: "slot"}
            ),
            "capacity_renormalize": field(
                "normalize_router_prob_before_dropping",
                default=True,
                choices={True: False, False: True},
            ),
        },
        activation=Act(
            field("activation_function", default="relu", choices=FUNCTIONS), gated=False
        ),
        use_bias=True,
        stacks=(
            Stack(
                ("model.encoder.layers.{layer}.", "encoder.layers.{layer}."),
                field("encoder_layers"),
                LayerRule(period=field("encoder_sparse_step"), phase=-1),
            ),
            Stack(
                ("model.decoder.layers.{layer}.", "decoder.layers.{layer}."),
                field("decoder_layers"),
                LayerRule(period=field("decoder_sparse_step"), phase=-1),
            ),
        ),
        expects={"second_expert_policy": ("all",)},
        note="The layer is the one of evaluation; expert_capacity, for training, is not applied.",
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
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
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
      layer: the layer whose values count where the family has them a layer; by default that of
        most MoE layers.

    Raises:
      CheckpointError: a ValueError; the model type is unknown, or a field is missing or has a
        value that is not known.
    """
    values = load_json(source)
    with reading_config("" if isinstance(source, tp.Mapping) else source):
        return read_config(*resolve(values), layer=layer)
