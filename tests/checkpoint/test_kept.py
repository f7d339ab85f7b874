"""Quantized experts kept in layers: they compute what their floats do and go back unchanged."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx
from golden import config_of, fixture, relative_error, write

from moe_flax import checkpoint, expert_ffn, route
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.quantized import pack
from moe_flax.quantized_weights import QuantizedWeight

F8, E8M0 = ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e8m0fnu)
D, F, E = 64, 96, 4


def compressed(name, size=None, **weights):
    weights = {"num_bits": 4, "symmetric": True, "group_size": size, **weights}
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def block_config(block, **others):
    return {"quant_method": "fp8", "weight_block_size": list(block), **others}


def grid(shape, block):
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def exponents(rng, shape):
    return rng.integers(119, 124, shape).astype(np.uint8)


def fp4(rng, shape):
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)


# Each gives the stored tensors of one [out, in] matrix, by suffixes of its name's stem.


def fp8_block(rng, shape, block=(128, 128)):
    return {
        ".weight": rng.normal(size=shape).astype(F8),
        ".weight_scale_inv": rng.uniform(0.01, 0.1, grid(shape, block)).astype(np.float32),
    }


def fp8_exponents(rng, shape):
    scale = exponents(rng, grid(shape, (32, 32))).view(E8M0)
    return {".weight": rng.normal(size=shape).astype(F8), ".scale": scale}


def fp8_small(rng, shape):
    return fp8_block(rng, shape, (64, 16))


def fp8_channel(rng, shape):
    return {
        ".weight": rng.normal(size=shape).astype(F8),
        ".weight_scale": rng.uniform(0.01, 0.1, (shape[0], 1)).astype(ml_dtypes.bfloat16),
        ".input_scale": np.ones(1, np.float32),
    }


def fp8_tensor(rng, shape):
    return {
        ".weight": rng.normal(size=shape).astype(F8),
        ".weight_scale": np.array(rng.uniform(0.01, 0.1), np.float32),
    }


def int8_channel(rng, shape):
    return {
        ".weight": rng.integers(-127, 128, shape).astype(np.int8),
        ".weight_scale": rng.uniform(0.001, 0.002, (shape[0], 1)).astype(np.float32),
    }


def int4(rng, shape):
    return {
        ".weight_packed": pack(rng.integers(-8, 8, shape).astype(np.int8), "int4").view(np.int32),
        ".weight_scale": rng.uniform(0.01, 0.02, grid(shape, (1, 32))).astype(ml_dtypes.bfloat16),
        ".weight_shape": np.array(shape, np.int64),
    }


def mxfp4_pack(rng, shape):
    scale = exponents(rng, grid(shape, (1, 32)))
    return {".weight_packed": fp4(rng, shape), ".weight_scale": scale}


def nvfp4_pack(rng, shape):
    return {
        ".weight_packed": fp4(rng, shape),
        ".weight_scale": rng.uniform(1, 400, grid(shape, (1, 16))).astype(F8),
        ".weight_global_scale": rng.uniform(2000, 9000, 1).astype(np.float32),
        ".input_global_scale": np.ones(1, np.float32),
    }


def nvfp4_modelopt(rng, shape):
    return {
        ".weight": fp4(rng, shape),
        ".weight_scale": rng.uniform(1, 400, grid(shape, (1, 16))).astype(F8),
        ".weight_scale_2": np.array(rng.uniform(1e-4, 5e-4), np.float32),
        ".input_scale": np.array(1.0, np.float32),
    }


PER_EXPERT = {
    "fp8 blocks": (fp8_block, block_config((128, 128), fmt="e4m3")),
    "fp8 blocks of 64 x 16": (fp8_small, block_config((64, 16))),
    "fp8 ue8m0": (fp8_exponents, block_config((32, 32), scale_fmt="ue8m0")),
    "fp8 channel": (fp8_channel, compressed("float-quantized", strategy="channel", num_bits=8)),
    "fp8 tensor": (fp8_tensor, compressed("float-quantized", strategy="tensor", num_bits=8)),
    "int8 channel": (int8_channel, compressed("int-quantized", strategy="channel", num_bits=8)),
    "int4": (int4, compressed("pack-quantized", 32)),
    "mxfp4 packed": (mxfp4_pack, compressed("mxfp4-pack-quantized", 32)),
    "nvfp4 packed": (nvfp4_pack, compressed("nvfp4-pack-quantized", 16)),
    "nvfp4 modelopt": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


def per_expert(kind):
    """(tensors, config) of a Qwen3-MoE with an attention matrix in the same format."""
    encode, quantization = PER_EXPERT[kind]
    rng = np.random.default_rng(0)
    block = "model.layers.0."
    found = {block + "mlp.gate.weight": rng.normal(size=(E, D)).astype(np.float32)}
    stems = {block + "self_attn.q_proj": (2 * D, D)}
    for e in range(E):
        stems |= {f"{block}mlp.experts.{e}.{n}_proj": (F, D) for n in ("gate", "up")}
        stems[f"{block}mlp.experts.{e}.down_proj"] = (D, F)
    for stem, shape in stems.items():
        found |= {stem + suffix: value for suffix, value in encode(rng, shape).items()}
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": D,
        "moe_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "norm_topk_prob": True,
        "quantization_config": quantization,
    }
    return found, config


def gpt_oss():
    """MXFP4 as gpt-oss stores it: gate and up in turn, [out, in] where bf16 is [in, out]."""
    rng = np.random.default_rng(0)
    d, f, e = 64, 64, 12
    p = "model.layers.0.mlp."
    found = {
        f"{p}router.weight": rng.normal(size=(e, d)).astype(np.float32),
        f"{p}router.bias": rng.normal(size=e).astype(np.float32),
        f"{p}experts.gate_up_proj_blocks": fp4(rng, (e, 2 * f, d)).reshape(e, 2 * f, -1, 16),
        f"{p}experts.gate_up_proj_scales": exponents(rng, (e, 2 * f, d // 32)),
        f"{p}experts.gate_up_proj_bias": rng.normal(size=(e, 2 * f)).astype(np.float32),
        f"{p}experts.down_proj_blocks": fp4(rng, (e, d, f)).reshape(e, d, -1, 16),
        f"{p}experts.down_proj_scales": exponents(rng, (e, d, f // 32)),
        f"{p}experts.down_proj_bias": rng.normal(size=(e, d)).astype(np.float32),
    }
    _, config = fixture("gpt_oss-square")
    config = {**config, "hidden_size": d, "intermediate_size": f, "num_hidden_layers": 1}
    return found, {**config, "quantization_config": {"quant_method": "mxfp4"}}


def fbgemm(name="llama4-plain"):
    rng = np.random.default_rng(0)
    tensors, config = fixture(name)
    found = {}
    for key, value in tensors.items():
        found[key] = value
        if ".experts." in key:
            down = key.endswith("down_proj")
            scale = rng.uniform(0.01, 0.02, (value.shape[0], 1, value.shape[2])).astype(np.float32)
            found[key] = (value / scale).astype(F8)
            found[key + "_scale"] = scale.swapaxes(1, 2).copy() if down else scale
    return found, {**config, "quantization_config": {"quant_method": "fbgemm_fp8"}}


def deepseek():
    """Ragged blocks, which dequantize cannot know from shapes; shared experts in fp8 too."""
    rng = np.random.default_rng(0)
    tensors, config = fixture("deepseek_v3-plain")
    found = {}
    for key, value in tensors.items():
        found[key] = value
        if ".experts." in key or ".shared_experts." in key:
            found[key] = rng.normal(size=value.shape).astype(F8)
            scale = rng.uniform(0.01, 0.1, grid(value.shape, (5, 7)))
            found[key + "_scale_inv"] = scale.astype(np.float32)
    return found, {**config, "quantization_config": block_config((5, 7))}


def fused_nvfp4():
    """ModelOpt's fused form: [E, 2F, D] with a second scale for each expert and half."""
    rng = np.random.default_rng(0)
    p = "model.language_model.layers.0.mlp."
    up, down = (E, 2 * F, D), (E, D, F)
    found = {
        f"{p}gate.weight": rng.normal(size=(E, D)).astype(np.float32),
        f"{p}shared_expert_gate.weight": rng.normal(size=(1, D)).astype(np.float32),
        f"{p}experts.gate_up_proj": fp4(rng, up),
        f"{p}experts.gate_up_proj_scale": rng.uniform(1, 400, (*up[:2], D // 16)).astype(F8),
        f"{p}experts.gate_up_proj_scale_2": rng.uniform(1e-4, 5e-4, (E, 2)).astype(np.float32),
        f"{p}experts.gate_up_proj_input_scale": np.array(1.0, np.float32),
        f"{p}experts.down_proj": fp4(rng, down),
        f"{p}experts.down_proj_scale": rng.uniform(1, 400, (*down[:2], F // 16)).astype(F8),
        f"{p}experts.down_proj_scale_2": rng.uniform(1e-4, 5e-4, E).astype(np.float32),
    }
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        found[f"{p}shared_expert.{name}_proj.weight"] = rng.normal(size=shape).astype(np.float32)
    text = {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": D,
        "moe_intermediate_size": F,
        "shared_expert_intermediate_size": F,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return found, {**config, "quantization_config": quantization}


MAKERS = {kind: (lambda kind=kind: per_expert(kind)) for kind in PER_EXPERT} | {
    "mxfp4 of gpt-oss": gpt_oss,
    "fbgemm": fbgemm,
    "fbgemm, square": lambda: fbgemm("llama4-square"),
    "fp8 blocks, ragged": deepseek,
    "nvfp4 fused": fused_nvfp4,
}
PACKED = {"mxfp4 packed", "nvfp4 packed", "nvfp4 modelopt", "mxfp4 of gpt-oss", "nvfp4 fused"}


def made(tmp_path, kind):
    tensors, config = MAKERS[kind]()
    return write(tmp_path / "source", tensors, config, shards=2), tensors


def raw(path):
    """{name: (dtype, shape, bytes)}, read by the reference implementation."""
    found = {}
    for file in path.glob("*.safetensors"):
        for name, entry in safetensors.deserialize(file.read_bytes()):
            found[name] = (entry["dtype"], entry["shape"], bytes(entry["data"]))
    return found


def assert_same(path, source, **changed):
    found, wanted = raw(path), raw(source)
    assert set(found) == set(wanted)
    for name, (dtype, shape, data) in wanted.items():
        data = changed[name].tobytes() if name in changed else data
        assert found[name] == (dtype, shape, data), name
    assert config_of(path) == config_of(source)


def outputs(layer, mesh=None):
    x = jax.random.normal(jax.random.key(0), (11, layer.config.features))
    if mesh is None:
        return layer(x)
    with jax.set_mesh(mesh):
        return nnx.jit(lambda m, x: m(x))(layer, x)


@pytest.mark.parametrize("transposed", [None, False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_saved_again_it_is_the_same_file(tmp_path, kind, transposed):
    source, _ = made(tmp_path, kind)
    model = checkpoint.load(source, quantized="keep", transposed=transposed)
    for layer in model.layers.values():
        for weight in (layer.experts.wi, layer.experts.wo):
            assert isinstance(weight, QuantizedWeight)
            assert (weight.dtype == jnp.uint8) == (kind in PACKED and transposed is not False)
        assert layer.experts.transposed == (transposed or (kind in PACKED and transposed is None))
        powers = kind.startswith("mxfp4") and transposed is not False
        assert layer.experts.wi_scale.dtype == (jnp.float8_e8m0fnu if powers else jnp.float32)
        for name in ("kernel", "correction_bias"):
            value = getattr(layer.router, name)
            assert value is None or value.dtype == jnp.float32
    checkpoint.save(tmp_path / "saved", model)
    assert_same(tmp_path / "saved", source)


SHORT = ("fp8 blocks, ragged", "mxfp4 of gpt-oss")


@pytest.mark.parametrize(
    ("kind", "transposed"),
    [
        pytest.param(
            *(kind, transposed),
            marks=[] if kind in SHORT and transposed is None else pytest.mark.slow,
        )
        for kind in MAKERS
        for transposed in (None, False, True)
    ],
)
def test_the_layer_computes_what_its_floats_do(tmp_path, kind, transposed):
    source, _ = made(tmp_path, kind)
    index = next(iter(checkpoint.load(source).layers))
    layer = checkpoint.load_layer(source, index, quantized="keep", transposed=transposed)
    expected = outputs(checkpoint.load_layer(source, index))
    assert relative_error(outputs(layer), expected) < 1e-6


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("fp8 blocks of 64 x 16", {"expert": 2, "tensor": 2}),  # 64 and 32 values, 48 a device
        pytest.param("fp8 blocks", {"expert": 2, "tensor": 4}, marks=pytest.mark.slow),
        pytest.param("fp8 ue8m0", {"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("int4", {"expert": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("mxfp4 packed", {"expert": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("mxfp4 of gpt-oss", {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("nvfp4 fused", {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("fp8 blocks, ragged", {"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh(tmp_path, kind, axes):
    source, _ = made(tmp_path, kind)
    expected = {i: outputs(layer) for i, layer in checkpoint.load(source).layers.items()}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    model = checkpoint.load(source, quantized="keep", mesh=mesh)
    for index, layer in model.layers.items():
        experts = layer.experts
        held = experts.wi[...].addressable_shards[0].data.size
        assert held * mesh.size == experts.wi.size
        if "expert" in axes:
            part = experts.wi_scale[...].addressable_shards[0].data.shape[0]
            assert part * axes["expert"] == experts.wi_scale.shape[0]
        assert relative_error(outputs(layer, mesh), expected[index]) < 1e-6
    checkpoint.save(tmp_path / "saved", model)
    assert_same(tmp_path / "saved", source)


@pytest.mark.slow
def test_parameters_for_expert_ffn(tmp_path):
    source, _ = made(tmp_path, "mxfp4 packed")
    plain = checkpoint.load_layer(source, 0)
    x = jax.random.normal(jax.random.key(0), (11, D))
    routing = route(plain.router(x), plain.config.router, 2)
    expected = expert_ffn(x, plain.experts.wi[...], plain.experts.wo[...], routing)
    for transposed in (False, True):
        found = checkpoint.load_parameters(source, 0, quantized="keep", transposed=transposed)
        parts = [jnp.asarray(found[f"experts.{n}"]) for n in ("wi", "wo")]
        scales = {f"{n}_scale": jnp.asarray(found[f"experts.{n}_scale"]) for n in ("wi", "wo")}
        got = expert_ffn(x, *parts, routing, **scales, transpose_weights=transposed)
        assert relative_error(got, expected) < 1e-6
        assert parts[0].dtype == (jnp.uint8 if transposed else jnp.float8_e4m3fn)
        assert scales["wi_scale"].dtype == (jnp.float8_e8m0fnu if transposed else jnp.float32)


def test_scales_that_changed_are_written_where_the_format_has_them(tmp_path):
    source, _ = made(tmp_path, "fp8 ue8m0")
    model = checkpoint.load(source, quantized="keep")
    scale = model.layers[0].experts.wi_scale
    scale[...] = scale[...] * 2
    checkpoint.save(tmp_path / "twice", model)
    before, after = raw(source), raw(tmp_path / "twice")
    for e in range(E):
        name = f"model.layers.0.mlp.experts.{e}.up_proj.scale"
        assert after[name][2] == bytes(byte + 1 for byte in before[name][2])
    (tmp_path / "across").mkdir()
    across, tensors = made(tmp_path / "across", "fbgemm, square")
    other = checkpoint.load(across, quantized="keep")
    wo_scale = other.layers[1].experts.wo_scale
    wo_scale[...] = wo_scale[...] + jnp.arange(wo_scale.shape[-1])
    checkpoint.save(tmp_path / "more", other)
    name = "model.layers.1.feed_forward.experts.down_proj_scale"
    more = tensors[name] + np.arange(wo_scale.shape[-1], dtype=np.float32)[:, None]
    assert_same(tmp_path / "more", across, **{name: more})
    scale[...] = scale[...] * 1.5
    with pytest.raises(CheckpointError, match="its scales have changed, and float8_e8m0fnu"):
        checkpoint.save(tmp_path / "half", model)
    assert not (tmp_path / "half").exists()


def test_values_that_changed_are_written(tmp_path):
    source, tensors = made(tmp_path, "mxfp4 of gpt-oss")
    for transposed in (False, True):
        model = checkpoint.load(source, quantized="keep", transposed=transposed)
        wo = model.layers[0].experts.wo
        wo[...] = jnp.roll(wo[...], 1, axis=0)
        path = tmp_path / str(transposed)
        checkpoint.save(path, model)
        name = "model.layers.0.mlp.experts.down_proj_blocks"
        assert_same(path, source, **{name: np.roll(tensors[name], 1, axis=0)})


def test_what_cannot_be_written(tmp_path):
    source, _ = made(tmp_path, "fp8 blocks, ragged")
    model = checkpoint.load(source, quantized="keep")
    with pytest.raises(CheckpointError, match="quantized weights go back to where they came from"):
        checkpoint.save(tmp_path / "form", model, form="fused")
    shared = model.layers[1].shared
    shared.wo[...] = shared.wo[...] * 1.1
    with pytest.raises(CheckpointError, match=r"shared_experts.down_proj.weight': has changed"):
        checkpoint.save(tmp_path / "changed", model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_dtype_is_that_of_what_is_not_quantized(tmp_path):
    source, _ = made(tmp_path, "fp8 blocks, ragged")
    layer = checkpoint.load_layer(source, 1, quantized="keep", dtype=jnp.bfloat16)
    assert layer.experts.wi.dtype == jnp.float8_e4m3fn
    assert layer.experts.wi_scale.dtype == jnp.float32
    assert layer.shared.wi.dtype == jnp.bfloat16
    assert layer.router.kernel.dtype == layer.router.correction_bias.dtype == jnp.float32


def test_a_float_checkpoint_has_nothing_to_keep(tmp_path):
    tensors, config = fixture("mixtral-plain")
    source = write(tmp_path / "source", tensors, config)
    layer = checkpoint.load_layer(source, 0, quantized="keep", transposed=True)
    assert isinstance(layer.experts.wi, nnx.Param)
    assert not layer.experts.transposed
    np.testing.assert_array_equal(outputs(layer), outputs(checkpoint.load_layer(source, 0)))
