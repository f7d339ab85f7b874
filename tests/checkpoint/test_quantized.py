"""Quantized formats: each decoded exactly, against encoders written here, and never guessed."""

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden import fixture, write

from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.inspect import inspect
from moe_flax.checkpoint.kept import keep_parameters
from moe_flax.checkpoint.mapping import read
from moe_flax.checkpoint.quantized import FP4_VALUES, Logical, expand
from moe_flax.checkpoint.source import Source, open_source
from moe_flax.quantize import dequantize

F8 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
rng = np.random.default_rng(0)
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
CHANNEL = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def packed(name, strategy="group", size=32):
    weights = {"num_bits": 4, "symmetric": True, "strategy": strategy, "group_size": size}
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


def decode(tensors, quantization, name="x.weight"):
    return np.asarray(Logical(tensors, {"quantization_config": quantization})[name])


def f8(*shape):
    return rng.normal(size=shape).astype(F8)


def fp4(*shape):
    """(codes, packed bytes): low bits hold the even column."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    return codes, codes[..., ::2] | (codes[..., 1::2] << 4)


@pytest.mark.parametrize("shape", [(128, 256), (576, 256), (256, 192), (130, 7), (1, 1)])
@pytest.mark.parametrize("kind", ["float32", "exponent", "byte"])
def test_fp8_blocks_with_ragged_edges(shape, kind):
    grid = tuple(-(-n // 128) for n in shape)
    exponents = rng.integers(120, 132, grid).astype(np.uint8)
    scale = np.exp2(exponents.astype(np.float32) - 127)
    stored = {"float32": scale, "exponent": exponents.view(E8M0), "byte": exponents}[kind]
    if kind == "float32":
        stored = scale = rng.uniform(0.5, 2, grid).astype(np.float32)
    q = f8(*shape)
    expected = q.astype(np.float32).copy()
    for i, j in np.ndindex(grid):
        expected[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scale[i, j]
    for suffix in ("weight_scale_inv", "scale"):
        got = decode({"x.weight": q, f"x.{suffix}": stored}, BLOCK)
        np.testing.assert_array_equal(got, expected)


def test_the_block_comes_from_the_configuration_not_from_the_shapes():
    q, scale = f8(256, 192), np.array([[1, 2], [3, 4]], np.float32)
    got = decode({"x.weight": q, "x.weight_scale_inv": scale}, BLOCK)
    np.testing.assert_array_equal(got[:128, :128], q[:128, :128].astype(np.float32))
    np.testing.assert_array_equal(got[:128, 128:], 2 * q[:128, 128:].astype(np.float32))
    with pytest.raises(CheckpointError, match=r"tensor 'x\.weight': its scales have shape"):
        decode(
            {"x.weight": q, "x.weight_scale_inv": scale}, {**BLOCK, "weight_block_size": [64, 64]}
        )


@pytest.mark.parametrize("shape", [(6, 1), (6,), (1,), (), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_fp8_by_channel_or_tensor(shape, dtype):
    q, scale = f8(6, 4), rng.uniform(0.5, 2, shape).astype(dtype)
    expected = q.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1)
    tensors = {"x.weight": q, "x.weight_scale": scale, "x.input_scale": np.ones(1, np.float32)}
    np.testing.assert_array_equal(decode(tensors, CHANNEL), expected)
    assert list(Logical(tensors, {"quantization_config": CHANNEL})) == ["x.weight"]


@pytest.mark.parametrize("width", [4, 5])
def test_fbgemm_stores_the_down_scales_across(width):
    """[E, H, 1] belongs to [E, I, H]; with I = H plain broadcasting would fit and be wrong."""
    h = 4
    up, down = f8(3, h, 2 * width), f8(3, width, h)
    up_scale = rng.uniform(0.5, 2, (3, 1, 2 * width)).astype(np.float32)
    down_scale = rng.uniform(0.5, 2, (3, h, 1)).astype(np.float32)
    tensors = {
        "e.gate_up_proj": up,
        "e.gate_up_proj_scale": up_scale,
        "e.down_proj": down,
        "e.down_proj_scale": down_scale,
    }
    config = {"quant_method": "fbgemm_fp8"}
    got = decode(tensors, config, "e.gate_up_proj")
    np.testing.assert_array_equal(got, up.astype(np.float32) * up_scale)
    got = decode(tensors, config, "e.down_proj")
    np.testing.assert_array_equal(got, down.astype(np.float32) * down_scale.swapaxes(1, 2))
    tensor = Logical(tensors, {"quantization_config": config})["e.down_proj"]
    np.testing.assert_array_equal(tensor[1:3], got[1:3])


@pytest.mark.parametrize(("blocks", "scales"), [("x_blocks", "x_scales"), ("x.blocks", "x.scales")])
def test_mxfp4(blocks, scales):
    codes, bytes_ = fp4(2, 6, 64)
    exponents = rng.integers(1, 254, (2, 6, 2)).astype(np.uint8)
    tensors = {blocks: bytes_.reshape(2, 6, 2, 16), scales: exponents}
    got = decode(tensors, {"quant_method": "mxfp4"}, blocks)
    expected = FP4_VALUES[codes].reshape(2, 6, 2, 32)
    expected = np.ldexp(expected, exponents[..., None].astype(np.int32) - 127).reshape(2, 6, 64)
    np.testing.assert_array_equal(got, expected)
    assert got[codes == 1][0] != 0


def test_fp4_values_are_those_of_the_standard():
    np.testing.assert_array_equal(
        FP4_VALUES, np.arange(16).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )


def test_mxfp4_and_nvfp4_of_compressed_tensors():
    codes, bytes_ = fp4(6, 64)
    exponents = rng.integers(120, 132, (6, 2)).astype(np.uint8)
    got = decode(
        {"x.weight_packed": bytes_, "x.weight_scale": exponents}, packed("mxfp4-pack-quantized")
    )
    scale = np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, 1)
    np.testing.assert_array_equal(got, FP4_VALUES[codes] * scale)
    scale, whole = rng.uniform(1, 400, (6, 4)).astype(F8), np.float32(37.0)
    tensors = {
        "x.weight_packed": bytes_,
        "x.weight_scale": scale,
        "x.weight_global_scale": np.array([whole]),
        "x.input_global_scale": np.ones(1, np.float32),
    }
    got = decode(tensors, packed("nvfp4-pack-quantized", size=16))
    expected = FP4_VALUES[codes] * np.repeat(scale.astype(np.float32) / whole, 16, 1)
    np.testing.assert_array_equal(got, expected)
    del tensors["x.weight_global_scale"]
    with pytest.raises(CheckpointError, match=r"lacks its second scale 'x\.weight_global_scale'"):
        decode(tensors, packed("nvfp4-pack-quantized", size=16))


@pytest.mark.parametrize("kind", ["one", "experts", "halves"])
def test_nvfp4_of_modelopt_multiplies(kind):
    codes, bytes_ = fp4(3, 8, 32)
    scale = rng.uniform(1, 400, (3, 8, 2)).astype(F8)
    second = {
        "one": np.array(0.01, np.float32),
        "experts": rng.uniform(0.01, 1, 3).astype(np.float32),
        "halves": rng.uniform(0.01, 1, (3, 2)).astype(np.float32),
    }[kind]
    by_row = np.broadcast_to(
        np.repeat(second, 4, 1) if kind == "halves" else second.reshape(-1, 1), (3, 8)
    )
    tensors = {"e.gate_up_proj": bytes_, "e.gate_up_proj_scale": scale}
    tensors |= {"e.gate_up_proj_scale_2": second, "e.gate_up_proj_input_scale": np.ones(())}
    logical = Logical(
        tensors, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    )
    expected = np.repeat(scale.astype(np.float32) * by_row[..., None], 16, -1) * FP4_VALUES[codes]
    np.testing.assert_array_equal(np.asarray(logical["e.gate_up_proj"]), expected)
    np.testing.assert_array_equal(logical["e.gate_up_proj"][1:2], expected[1:2])
    assert list(logical) == ["e.gate_up_proj"]


@pytest.mark.parametrize(("strategy", "size", "groups"), [("group", 32, 2), ("channel", None, 1)])
def test_packed_int4(strategy, size, groups):
    values = rng.integers(-8, 8, (6, 64))
    words = np.zeros((6, 8), np.uint32)
    for i in range(8):
        words |= (values[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
    scale = rng.uniform(0.5, 2, (6, groups)).astype(ml_dtypes.bfloat16)
    tensors = {
        "x.weight_packed": words.view(np.int32),
        "x.weight_scale": scale,
        "x.weight_shape": np.array([6, 64]),
    }
    got = decode(tensors, packed("pack-quantized", strategy, size))
    np.testing.assert_array_equal(
        got, values * np.repeat(scale.astype(np.float32), 64 // groups, 1)
    )
    assert list(Logical(tensors, {"quantization_config": packed("pack-quantized", strategy, size)}))
    bad = packed("pack-quantized")
    bad["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    with pytest.raises(CheckpointError, match="not symmetric int4"):
        decode(tensors, bad)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "auto-round"])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(CheckpointError, match=f"quantization method '{method}'.*known: fp8"):
        Logical({}, {"quantization_config": {"quant_method": method}})
    with pytest.raises(CheckpointError, match=f"'{method}'"):
        Logical({}, {"text_config": {"quantization_config": {"quant_method": method}}})


def test_fp8_without_a_scale_is_an_error():
    for config in ({}, {"quantization_config": BLOCK}):
        with pytest.raises(
            CheckpointError, match=r"f: tensor 'x\.weight': has 8-bit floats and no"
        ):
            Logical({"x.weight": f8(2, 2)}, config, "f")


def test_scales_that_do_not_fit():
    with pytest.raises(CheckpointError, match=r"needs 3 on axis 1"):
        expand(np.ones((1, 2), np.float32), (4, 65), (0, 32))


def quantized_fixture(block=(5, 7)):
    """deepseek_v3-plain with its experts in fp8 blocks, and the values they decode to."""
    tensors, config = fixture("deepseek_v3-plain")
    found, exact = {}, {}
    for name, value in tensors.items():
        if ".experts." not in name:
            found[name] = value
            continue
        grid = tuple(-(-n // b) for n, b in zip(value.shape, block, strict=True))
        scale = rng.uniform(0.01, 0.02, grid).astype(np.float32)
        wide = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)
        wide = wide[: value.shape[0], : value.shape[1]]
        found[name] = (value / wide).astype(F8)
        found[name + "_scale_inv"] = scale
        exact[name] = found[name].astype(np.float32) * wide
    quantization = {**BLOCK, "weight_block_size": list(block)}
    return found, {**config, "quantization_config": quantization}, exact


def test_a_quantized_checkpoint_reads_like_its_float_one():
    tensors, config, exact = quantized_fixture()
    source = Source(Logical(tensors, config), config)
    wi = read(source.parameters(1)["experts.wi"])
    assert wi.dtype == np.float32
    for e in (0, 11):
        name = f"model.layers.1.mlp.experts.{e}.up_proj.weight"
        np.testing.assert_array_equal(wi[e, 1].T, exact[name])
    assert not any("scale" in name for name in source.rest)


@pytest.mark.parametrize("block", [(4, 6), (5, 7), (8, 12)])
def test_kept_values_and_scales_decode_to_the_same(block):
    tensors, config, _ = quantized_fixture(block)
    source = Source(Logical(tensors, config), config)
    kept = keep_parameters(source.layers[1].bindings, source.tensors)
    for name in ("experts.wi", "experts.wo"):
        values, scales = kept[name], kept[f"{name}_scale"]
        assert values.dtype == F8
        assert values.ndim == scales.ndim
        expected = read(source.parameters(1)[name])
        np.testing.assert_array_equal(dequantize(jnp.asarray(values), scales), expected)


def test_mxfp4_gpt_oss_has_the_other_orientation_and_is_kept():
    tensors, config = fixture("gpt_oss-square")
    tensors, e, f = dict(tensors), 12, 32
    config = {**config, "hidden_size": f, "intermediate_size": f}
    config |= {"num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    codes, bytes_ = fp4(e, 2 * f, f)
    down_codes, down_bytes = fp4(e, f, f)
    p = "model.layers.0.mlp."
    found = {
        f"{p}router.weight": np.zeros((e, f), np.float32),
        f"{p}router.bias": np.zeros(e, np.float32),
        f"{p}experts.gate_up_proj_blocks": bytes_.reshape(e, 2 * f, 1, 16),
        f"{p}experts.gate_up_proj_scales": rng.integers(120, 132, (e, 2 * f, 1)).astype(np.uint8),
        f"{p}experts.gate_up_proj_bias": rng.normal(size=(e, 2 * f)).astype(np.float32),
        f"{p}experts.down_proj_blocks": down_bytes.reshape(e, f, 1, 16),
        f"{p}experts.down_proj_scales": np.full((e, f, 1), 128, np.uint8),
        f"{p}experts.down_proj_bias": np.zeros((e, f), np.float32),
    }
    source = Source(Logical(found, config), config)
    assert source.layers[0].form.name == "mxfp4"
    parameters = {name: read(value) for name, value in source.parameters(0).items()}
    scale = np.exp2(found[f"{p}experts.gate_up_proj_scales"].astype(np.float32) - 127)
    rows = FP4_VALUES[codes] * scale  # [E, 2F, D], gate and up in turn
    np.testing.assert_array_equal(parameters["experts.wi"][:, 0], rows[:, ::2].swapaxes(1, 2))
    np.testing.assert_array_equal(parameters["experts.wi"][:, 1], rows[:, 1::2].swapaxes(1, 2))
    np.testing.assert_array_equal(
        parameters["experts.wo"], 2 * FP4_VALUES[down_codes].swapaxes(1, 2)
    )
    bias = found[f"{p}experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(parameters["experts.wi_bias"][:, 1], bias[:, 1::2])
    kept = keep_parameters(source.layers[0].bindings, source.tensors)
    assert kept["experts.wi_scale"].shape == (e, 2, 1, f)
    np.testing.assert_array_equal(
        kept["experts.wi"].astype(np.float32) * kept["experts.wi_scale"], parameters["experts.wi"]
    )


@pytest.mark.parametrize("name", ["llama4-plain", "llama4-square"])
def test_llama4_in_fp8_as_fbgemm_stores_it(name):
    """[E, D, 2F] and [E, F, D] with scales an output channel; square ones are no easier."""
    tensors, config = fixture(name)
    found, exact = {}, {}
    for key, value in tensors.items():
        found[key] = value
        if ".experts." not in key:
            continue
        down = key.endswith("down_proj")
        scale = rng.uniform(0.01, 0.02, (value.shape[0], 1, value.shape[2])).astype(np.float32)
        found[key] = (value / scale).astype(F8)
        found[key + "_scale"] = scale.swapaxes(1, 2) if down else scale
        exact[key] = found[key].astype(np.float32) * scale
    config = {**config, "quantization_config": {"quant_method": "fbgemm_fp8"}}
    source = Source(Logical(found, config), config)
    block = "model.layers.1.feed_forward.experts."
    wi = read(source.parameters(1)["experts.wi"])
    np.testing.assert_array_equal(
        np.concatenate([wi[:, 0], wi[:, 1]], -1), exact[block + "gate_up_proj"]
    )
    np.testing.assert_array_equal(
        read(source.parameters(1)["experts.wo"]), exact[block + "down_proj"]
    )
    kept = keep_parameters(source.layers[1].bindings, source.tensors)
    wo = kept["experts.wo"].astype(np.float32) * kept["experts.wo_scale"]
    np.testing.assert_array_equal(wo, exact[block + "down_proj"])


def test_llama4_in_fp8_by_channel_and_expert():
    """As compressed-tensors stores it: a Linear an expert, [out, in], with [out, 1] scales."""
    tensors, config = fixture("llama4-square")
    block = "model.layers.1.feed_forward.experts."
    fused, down = tensors[block + "gate_up_proj"], tensors[block + "down_proj"]
    found = {k: v for k, v in tensors.items() if not k.startswith(block)}
    exact = {}
    width = fused.shape[2] // 2
    for e in range(len(down)):
        halves = {"gate_proj": fused[e, :, :width], "up_proj": fused[e, :, width:]}
        for key, value in {**halves, "down_proj": down[e]}.items():
            scale = rng.uniform(0.01, 0.02, (value.shape[1], 1)).astype(np.float32)
            found[f"{block}{e}.{key}.weight"] = q = (value.T / scale).astype(F8)
            found[f"{block}{e}.{key}.weight_scale"] = scale
            exact[e, key] = (q.astype(np.float32) * scale).T
    config = {**config, "quantization_config": CHANNEL}
    source = Source(Logical(found, config), config)
    assert source.layers[1].form.name == "per_expert"
    wi, wo = (read(source.parameters(1)[f"experts.{n}"]) for n in ("wi", "wo"))
    for e in range(len(down)):
        np.testing.assert_array_equal(wi[e, 0], exact[e, "gate_proj"])
        np.testing.assert_array_equal(wi[e, 1], exact[e, "up_proj"])
        np.testing.assert_array_equal(wo[e], exact[e, "down_proj"])


def test_blocks_across_gate_and_up_cannot_be_kept():
    tensors, config = fixture("qwen3_moe-double")  # [E, 2F, D] with F = 4
    tensors = dict(tensors)
    for layer in (0, 2):
        for name, rows in (("gate_up_proj", 8), ("down_proj", 8)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[key] = tensors[key].astype(F8)
            grid = (12, -(-rows // 3), -(-tensors[key].shape[2] // 8))
            tensors[key + "_scale_inv"] = np.ones(grid, np.float32)
    config = {**config, "quantization_config": {**BLOCK, "weight_block_size": [3, 8]}}
    source = Source(Logical(tensors, config), config)
    assert read(source.parameters(0)["experts.wi"]).shape == (12, 2, 8, 4)
    with pytest.raises(CheckpointError, match=r"blocks of 3 lie across the parts of axis J F"):
        keep_parameters(source.layers[0].bindings, source.tensors)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ([], "expected an object"),
        (False, "expected an object"),
        ("fp8", "expected an object"),
        ({"bits": 8}, "without quant_method"),
        ({"quant_method": None}, "without quant_method"),
        ({"quant_method": [1]}, "quantization method"),
        ({"quant_method": "fp8", "weight_block_size": [None, 128]}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size='128'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": None}, "group_size"),
        ({"quant_method": "compressed-tensors", "format": []}, "format"),
        (CHANNEL | {"config_groups": {"g": 1}}, "config_groups"),
        (CHANNEL | {"config_groups": {"g": {"weights": []}}}, "weights"),
        (CHANNEL | {"config_groups": {"g": {"weights": "x"}}}, "weights"),
        (
            CHANNEL | {"config_groups": {"g": {"weights": {"num_bits": 4}}}},
            "num_bits=4",
        ),
        (
            CHANNEL
            | {"config_groups": {"g": {"weights": {"strategy": "block", "block_structure": "x"}}}},
            "block_structure='x'",
        ),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_odd_configurations(tmp_path, quantization, named, nested):
    """Also where nothing is quantized, from inspect too, and inside a part of config.json."""
    tensors, config = fixture("mixtral-plain")
    config = {**config, "quantization_config": quantization}
    if nested:
        config["audio_config"] = {"quantization_config": config.pop("quantization_config")}
    path = write(tmp_path / "m", tensors, config)
    for action in (open_source, inspect):
        with pytest.raises(CheckpointError, match=re.escape(named)) as error:
            action(path)
        assert str(path) in str(error.value)
        assert "malformed" not in str(error.value)


def test_an_empty_configuration_is_none(tmp_path):
    tensors, config = fixture("mixtral-plain")
    for value in ({}, None):
        path = write(tmp_path / str(value), tensors, {**config, "quantization_config": value})
        assert not open_source(path).quantized


def test_errors_name_the_file_of_the_tensor(tmp_path):
    """The shard, not the directory: without a scale, and with one that does not fit."""
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    for case, scale in (("without", None), ("misfit", np.ones((3, 7), np.float32))):
        tensors, config = fixture("qwen3_moe-plain")
        tensors = {**tensors, name: tensors[name].astype(ml_dtypes.float8_e4m3fn)}
        if scale is not None:
            tensors[name + "_scale_inv"] = scale
        config = {**config, "quantization_config": {"quant_method": "fp8"}}
        path = write(tmp_path / case, tensors, config, shards=3)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        file = re.escape(str(path / index["weight_map"][name]))
        with pytest.raises(CheckpointError, match=f"{file}: tensor '{name}'"):
            read(open_source(path).parameters(0)["experts.wi"])
