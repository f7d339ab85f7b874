"""The moe-flax command: inspect and convert, dry, cut off, and there and back."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from golden import FIXTURES, config_of, fixture, relative_error, tensors_of, write
from test_kept import gpt_oss

from moe_flax import checkpoint
from moe_flax.checkpoint.building import Building
from moe_flax.checkpoint.encode import SCHEMES, quantize
from moe_flax.checkpoint.errors import CheckpointError
from moe_flax.checkpoint.mapping import read
from moe_flax.checkpoint.reader import Reader
from moe_flax.checkpoint.source import open_source
from moe_flax.cli import main

DEEPSEEK = FIXTURES / "deepseek_v3-plain"


def test_inspect_reads_headers(capsys):
    assert main(["inspect", str(DEEPSEEK)]) == 0
    text = capsys.readouterr().out
    for line in (
        r"family +deepseek_v3",
        r"layers +1 MoE of 2: 1$",
        r"experts +12 of width 8, 3 a token",
        r"shared +width 16, add",
        r"form +per_expert \(1 layers\)",
        r"quantized +no",
        r"in experts +float32 13\.8 kB",
    ):
        assert re.search(line, text, re.MULTILINE), (line, text)


def test_inspect_of_a_bare_index_of_a_huge_model_takes_seconds(tmp_path, capsys):
    """DeepSeek-V3's own shape: 61 layers, 256 experts, fp8 with scales, one layer past the last."""
    config = config_of(DEEPSEEK) | {
        "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    names = []
    for layer in range(3, 62):
        block = f"model.layers.{layer}.mlp."
        names += [f"{block}gate.weight", f"{block}gate.e_score_correction_bias"]
        owners = [f"{block}experts.{e}." for e in range(256)] + [f"{block}shared_experts."]
        for owner in owners:
            for kind in ("gate", "up", "down"):
                names += [f"{owner}{kind}_proj.weight", f"{owner}{kind}_proj.weight_scale_inv"]
    index = {
        "weight_map": {name: f"model-{i % 163:05d}.safetensors" for i, name in enumerate(names)}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    start = time.process_time()
    assert main(["inspect", str(tmp_path)]) == 0
    assert time.process_time() - start < 10
    text = capsys.readouterr().out
    assert "58 MoE of 61: 3-60" in text
    assert "layers 61 are past the last one" in text
    assert "index only" in text


def test_inspect_of_a_huge_model_reads_headers_alone(tmp_path, capsys):
    """The same shape with every header there, and data that is a hole in the file."""
    config = config_of(DEEPSEEK) | {
        "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "hidden_size": 7168,
        "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    weight_map, total = {}, 0
    for layer in range(3, 62):
        block, header, position = f"model.layers.{layer}.mlp.", {}, 0

        def add(name, dtype, *shape, header=header):
            nonlocal position
            stop = position + math.prod(shape) * {"F8_E4M3": 1, "F32": 4}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}
            position = stop

        add(f"{block}gate.weight", "F32", 256, 7168)
        add(f"{block}gate.e_score_correction_bias", "F32", 256)
        for owner in [*(f"experts.{e}" for e in range(256)), "shared_experts"]:
            for kind, shape in (
                ("gate", (2048, 7168)),
                ("up", (2048, 7168)),
                ("down", (7168, 2048)),
            ):
                name = f"{block}{owner}.{kind}_proj.weight"
                add(name, "F8_E4M3", *shape)
                add(f"{name}_scale_inv", "F32", *(n // 128 for n in shape))
        text = json.dumps(header).encode()
        file = tmp_path / f"model-{layer:05d}.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + position)
        weight_map |= dict.fromkeys(header, file.name)
        total += position
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert total > 650e9
    assert sum(file.stat().st_blocks for file in tmp_path.iterdir()) * 512 < 100e6
    start = time.process_time()
    assert main(["inspect", str(tmp_path)]) == 0
    assert time.process_time() - start < 15
    text = capsys.readouterr().out
    for line in (
        "58 MoE of 61: 3-60",
        "fp8_block",
        "layers 61 are past the last one",
        f"{len(weight_map)} tensors",
        "in experts   float8_e4m3fn 654 GB",
    ):
        assert line in text, (line, text)


def test_errors_go_to_stderr(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "config.json: cannot be read" in capsys.readouterr().err
    target = tmp_path / "full"
    target.mkdir()
    (target / "mine").write_text("")
    assert main(["convert", str(DEEPSEEK), str(target)]) == 1
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", str(DEEPSEEK), str(target), "--shard-size", "0"])


def test_dry_run_prints_the_mapping_and_writes_nothing(tmp_path, capsys):
    arguments = ["convert", str(DEEPSEEK), str(tmp_path / "m"), "--form", "fused", "--dry-run"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "layers 1: per_expert -> fused" in text
    assert "experts.{E}.{gate_proj,up_proj}.weight [F D] ->" in text
    assert "experts.gate_up_proj [E (J F) D]" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--to", "orbax", "--family", "mixtral"], "--family"),
        (["--to", "orbax", "--form", "fused", "--quantize", "fp8_block"], "--form, --quantize"),
        (["--from-orbax", "--dtype", "bfloat16"], "--dtype"),
        (["--from-orbax", "--dry-run", "--quantize", "fp8_block"], "--quantize, --dry-run"),
        (["--from-orbax", "--to", "orbax"], "--to orbax"),
    ],
)
def test_options_that_would_be_passed_over(tmp_path, capsys, options, named):
    assert main(["convert", str(DEEPSEEK), str(tmp_path / "m"), *options]) == 1
    assert f"{named} cannot be used with" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_dry_run_to_orbax(tmp_path, capsys):
    arguments = ["convert", str(DEEPSEEK), str(tmp_path / "m"), "--to", "orbax", "--dry-run"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "layers 1: per_expert -> orbax" in text
    assert "{gate_proj,up_proj}.weight [F D] -> experts.wi [E J D F]" in text
    assert not list(tmp_path.iterdir())


def test_forms_there_and_back(tmp_path):
    (tmp_path / "s").mkdir()
    tensors, config = fixture("deepseek_v3-plain")
    source = write(tmp_path / "s" / "m", tensors, config, shards=3)
    (source / "tokenizer.json").write_text("{}")
    fused, back = tmp_path / "fused", tmp_path / "back"
    assert main(["convert", str(source), str(fused), "--form", "fused", "--shard-size", "4KB"]) == 0
    assert len(list(fused.glob("*.safetensors"))) > 3
    assert (fused / "tokenizer.json").read_text() == "{}"
    assert main(["convert", str(fused), str(back), "--form", "per_expert"]) == 0
    assert config_of(back) == config
    for name, value in tensors_of(back).items():
        np.testing.assert_array_equal(value, tensors[name])
    assert set(tensors_of(back)) == set(tensors)


def test_orbax_there_and_back(tmp_path):
    for name in ("deepseek_v3-plain", "gpt_oss-plain"):
        tensors, config = fixture(name)
        there, back = tmp_path / f"{name}.orbax", tmp_path / name
        assert main(["convert", str(FIXTURES / name), str(there), "--to", "orbax"]) == 0
        assert main(["convert", "--from-orbax", str(there), str(back)]) == 0
        assert config_of(back) == config
        saved = tensors_of(back)
        assert set(saved) == set(tensors)
        for key, value in tensors.items():
            np.testing.assert_array_equal(saved[key], value)


def test_dtype_spares_the_router_and_vectors(tmp_path):
    assert main(["convert", str(DEEPSEEK), str(tmp_path / "m"), "--dtype", "bfloat16"]) == 0
    for name, value in tensors_of(tmp_path / "m").items():
        kept = ".gate." in name or value.ndim == 1
        assert value.dtype == (np.float32 if kept else ml_dtypes.bfloat16), name


def test_another_family(tmp_path, capsys):
    source = str(FIXTURES / "mixtral-plain")
    assert main(["convert", source, str(tmp_path / "m"), "--family", "qwen3_moe"]) == 0
    assert config_of(tmp_path / "m")["model_type"] == "qwen3_moe"
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in tensors_of(tmp_path / "m")
    assert main(["convert", source, str(tmp_path / "n"), "--family", "gpt_oss"]) == 1
    assert "no place" in (err := capsys.readouterr().err) or "cannot express" in err
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_quantized_checkpoints_read_back(tmp_path, scheme, capsys):
    target = tmp_path / scheme
    assert main(["convert", str(DEEPSEEK), str(target), "--quantize", scheme]) == 0
    printed = re.search(r"layer 1: relative error of \w+ ([\d.e-]+)", capsys.readouterr().out)
    assert printed
    exact, rounded = open_source(DEEPSEEK), open_source(target)
    errors = []
    for name in ("experts.wi", "experts.wo"):
        a, b = read(exact.parameters(1)[name]), read(rounded.parameters(1)[name])
        errors.append((np.square(a - b).sum(), np.square(a).sum()))
        assert relative_error(b, a) < 0.05
    total = np.sqrt(np.sum(errors, 0)[0] / np.sum(errors, 0)[1])
    assert float(printed[1]) == pytest.approx(total, rel=0.01)
    np.testing.assert_array_equal(
        read(rounded.parameters(1)["router.kernel"]), read(exact.parameters(1)["router.kernel"])
    )


@pytest.mark.parametrize(("scheme", "bound"), [("fp8_channel", 0.03), ("int8_channel", 0.01)])
def test_quantize(scheme, bound):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(130, 257)).astype(np.float32) * np.exp(rng.normal(size=(130, 1)))
    matrix[3] = 0
    values, scales = quantize(matrix, scheme)
    assert values.dtype == SCHEMES[scheme].dtype
    assert scales.shape == (130, 1)
    assert relative_error(values.astype(np.float32) * scales, matrix) < bound
    assert np.abs(values.astype(np.float32)).max() == (127 if "int8" in scheme else 448)
    with pytest.raises(CheckpointError, match="not finite"):
        quantize(np.full((2, 2), np.nan), scheme)
    with pytest.raises(CheckpointError, match="'fp3' is not known"):
        quantize(matrix, "fp3")


def test_quantizing_a_fused_form_is_refused(tmp_path, capsys):
    source = str(FIXTURES / "qwen3_moe-double")
    assert main(["convert", source, str(tmp_path / "m"), "--quantize", "fp8_block"]) == 1
    assert "per-expert form" in capsys.readouterr().err
    arguments = ["convert", source, str(tmp_path / "m"), "--quantize", "fp8_block"]
    assert main([*arguments, "--form", "per_expert"]) == 0


def test_killed_conversion_is_continued(tmp_path):
    """kill -9 in the middle: nothing looks finished; run again, the files are those of one run."""
    arguments = ["convert", str(DEEPSEEK), str(tmp_path / "m"), "--form", "fused"]
    arguments += ["--shard-size", "2KB"]
    code = (
        "import os, sys, tqdm, moe_flax.cli as cli\n"
        "update, written = tqdm.tqdm.update, [0]\n"
        "def killing(self, n=1):\n"
        "    written[0] += n\n"
        "    if written[0] > 15000: os.kill(os.getpid(), 9)\n"
        "    return update(self, n)\n"
        "tqdm.tqdm.update = killing\n"
        "cli.main(sys.argv[1:])\n"
    )
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, check=False, capture_output=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["m.incomplete"]
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "m.incomplete").glob("*.safetensors")}
    assert len(done) > 2
    assert main(arguments) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert all((tmp_path / "m" / n).stat().st_mtime_ns == t for n, t in done.items())
    arguments[2] = str(tmp_path / "whole")
    assert main(arguments) == 0
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "m" / path.name).read_bytes()


def quantized_source(tmp_path, **changed):
    """deepseek_v3-plain with experts and one attention matrix in fp8; and what those decode to."""
    tensors, config = fixture("deepseek_v3-plain")
    found, exact = {}, {}
    for name, value in tensors.items():
        found[name] = value
        if ".experts." in name or ".shared_experts." in name or name.endswith("o_proj.weight"):
            scale = np.full((1, 1), 0.01037, np.float32)
            found[name] = (value / scale).astype(ml_dtypes.float8_e4m3fn)
            found[name + "_scale_inv"] = scale
            exact[name] = found[name].astype(np.float32) * scale
    config = {**config, **changed, "quantization_config": SCHEMES["fp8_block"].config}
    return write(tmp_path / "source", found, config), exact


@pytest.mark.parametrize(
    ("changed", "options", "wanted"),
    [
        ({"torch_dtype": None, "dtype": None}, [], "bfloat16"),
        ({"dtype": "float16"}, [], "float16"),
        ({"dtype": None, "torch_dtype": "float32"}, [], "float32"),
        ({"dtype": "bfloat16"}, ["--dtype", "float32"], "float32"),
    ],
)
def test_what_was_quantized_gets_the_models_dtype(tmp_path, changed, options, wanted):
    source, exact = quantized_source(tmp_path, **changed)
    assert len(exact) > 36
    assert main(["convert", str(source), str(tmp_path / "m"), *options]) == 0
    assert "quantization_config" not in config_of(tmp_path / "m")
    before, after = Reader(source), Reader(tmp_path / "m")
    assert set(after) == {name for name in before if not name.endswith("_scale_inv")}
    for name, value in after.items():
        expected = exact[name].astype(wanted) if name in exact else before[name]
        assert value.dtype == expected.dtype, name
        np.testing.assert_array_equal(value, expected)
    assert after["model.layers.1.mlp.gate.weight"].dtype == np.float32
    assert after["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == np.float32


def test_orbax_gets_the_models_dtype_too(tmp_path):
    source, exact = quantized_source(tmp_path, dtype="bfloat16")
    assert main(["convert", str(source), str(tmp_path / "o"), "--to", "orbax"]) == 0
    with ocp.StandardCheckpointer() as checkpointer:
        layer = checkpointer.restore(tmp_path / "o" / "layers" / "00001")
    for name, value in layer.items():
        assert value.dtype == (np.float32 if name.startswith("router.") else ml_dtypes.bfloat16)
    up = exact["model.layers.1.mlp.experts.11.up_proj.weight"]
    np.testing.assert_array_equal(layer["experts.wi"][11, 1].T, up.astype(ml_dtypes.bfloat16))
    rest = Reader(tmp_path / "o" / "rest")
    for name in rest:
        assert rest[name].dtype == (ml_dtypes.bfloat16 if name in exact else np.float32)


def test_quantizing_anew_is_from_exact_values(tmp_path):
    source, exact = quantized_source(tmp_path, dtype="bfloat16")
    target = tmp_path / "m"
    assert main(["convert", str(source), str(target), "--quantize", "int8_channel"]) == 0
    found = Reader(target)
    for name, value in exact.items():
        if ".experts." in name:
            values, scales = quantize(value, "int8_channel")
            np.testing.assert_array_equal(found[name], values)
            np.testing.assert_array_equal(found[name + "_scale"], scales)
        else:
            assert found[name].dtype == ml_dtypes.bfloat16


def mxfp4(tmp_path):
    tensors, config = gpt_oss()
    return write(tmp_path / "source", tensors, config)


@pytest.mark.parametrize("through", ["safetensors", "orbax", "load"])
def test_mxfp4_as_floats_goes_to_the_float_form(tmp_path, through):
    """Floats under the names of blocks and without scales would be read by nobody."""
    source, target = mxfp4(tmp_path), tmp_path / "m"
    if through == "safetensors":
        assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    elif through == "orbax":
        there = str(tmp_path / "o")
        assert main(["convert", str(source), there, "--to", "orbax", "--dtype", "float32"]) == 0
        assert main(["convert", "--from-orbax", there, str(target)]) == 0
    else:
        checkpoint.save(target, checkpoint.load(source))
    found, block = tensors_of(target), "model.layers.0.mlp.experts."
    assert not [name for name in found if name.endswith(("_blocks", "_scales"))]
    assert found[block + "gate_up_proj"].shape == (12, 64, 128)
    exact, again = open_source(source), open_source(target)
    assert again.layers[0].form.name == "interleaved"
    for name, parameter in exact.parameters(0).items():
        np.testing.assert_array_equal(read(again.parameters(0)[name]), read(parameter))


def test_floats_are_refused_in_a_quantized_form(tmp_path, capsys):
    source, target = mxfp4(tmp_path), tmp_path / "m"
    assert main(["convert", str(source), str(target), "--form", "mxfp4"]) == 1
    assert "form mxfp4 of family gpt_oss holds quantized weights" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="write form interleaved"):
        checkpoint.save(target, checkpoint.load(source), form="mxfp4")
    assert not target.exists()


def beyond(tmp_path):
    """deepseek_v3-plain with a multi-token layer past its last, and one under another prefix."""
    tensors, config = fixture("deepseek_v3-plain")
    mtp = {k.replace("layers.1.", "layers.2."): v for k, v in tensors.items() if "layers.1." in k}
    mtp |= {k.replace("model.layers.2.", "mtp.layers.0."): v for k, v in mtp.items()}
    return write(tmp_path / "source", tensors | mtp, config), mtp


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_layers_past_the_last_are_reported_and_their_routers_kept(tmp_path, capsys, to):
    source, mtp = beyond(tmp_path)
    options = ["--dtype", "bfloat16", "--to", to]
    assert main(["convert", str(source), str(tmp_path / "m"), *options]) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "past the last" in x]
    assert line.startswith("moe-flax: layers 2 are past the last one")
    found = tensors_of(tmp_path / "m" if to == "safetensors" else tmp_path / "m" / "rest")
    for name, value in mtp.items():
        kept = ".mlp.gate." in name or value.ndim == 1
        assert found[name].dtype == (np.float32 if kept else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(found[name], value.astype(found[name].dtype))


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_config_names_the_dtype_asked_for(tmp_path, to):
    tensors, config = fixture("deepseek_v3-plain")
    config = {**config, "dtype": "float32", "vision_config": {"torch_dtype": "float16", "a": 1}}
    source = write(tmp_path / "source", tensors, config)
    there, back = str(tmp_path / "m"), tmp_path / "m"
    assert main(["convert", str(source), there, "--dtype", "bfloat16", "--to", to]) == 0
    if to == "orbax":
        back = tmp_path / "back"
        assert main(["convert", "--from-orbax", there, str(back)]) == 0
    named = {"dtype": "bfloat16", "vision_config": {"torch_dtype": "bfloat16", "a": 1}}
    assert config_of(back) == config | named
    bare = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
    source = write(tmp_path / "bare", tensors, bare)
    assert main(["convert", str(source), str(tmp_path / "n"), "--dtype", "float16"]) == 0
    assert config_of(tmp_path / "n")["torch_dtype"] == "float16"
    assert main(["convert", str(source), str(tmp_path / "p")]) == 0
    assert config_of(tmp_path / "p") == bare


@pytest.mark.parametrize("scheme", ["fp8_block", "int8_channel"])
def test_config_lists_what_is_not_quantized(tmp_path, scheme):
    """Those of the source's own list that stay floats are in it, and no expert is."""
    source, _ = quantized_source(tmp_path)
    assert main(["convert", str(source), str(tmp_path / "m"), "--quantize", scheme]) == 0
    said = config_of(tmp_path / "m")["quantization_config"]
    listed = said["modules_to_not_convert" if scheme == "fp8_block" else "ignore"]
    found = Reader(tmp_path / "m")
    suffix = SCHEMES[scheme].suffix
    matrices = {n for n, v in found.items() if n.endswith(".weight") and v.ndim == 2}
    quantized = {name for name in matrices if name + suffix in found}
    assert quantized == {name for name in matrices if ".mlp.experts." in name}
    assert sorted(listed) == sorted(n.removesuffix(".weight") for n in matrices - quantized)
    assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.1.self_attn.o_proj"} <= set(listed)
    assert "model.layers.1.mlp.shared_experts.up_proj" in listed


def test_side_files_that_lead_outside(tmp_path, capsys):
    tensors, config = fixture("mixtral-plain")
    (tmp_path / "secret.json").write_text("{}")
    source = write(tmp_path / "source", tensors, config)
    link = source / "tokenizer.json"
    for where in (tmp_path / "secret.json", pathlib.Path("../secret.json")):
        link.symlink_to(where)
        assert main(["convert", str(source), str(tmp_path / "m")]) == 1
        assert f"{link}: is a link out of" in capsys.readouterr().err
        link.unlink()
    link.symlink_to(tmp_path / "absent.json")
    assert main(["convert", str(source), str(tmp_path / "m")]) == 1
    assert str(link) in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret.json", "source"]
    link.unlink()
    (source / "folder.json").mkdir()
    (source / "own.json").write_text("{}")
    link.symlink_to("own.json")
    assert main(["convert", str(source), str(tmp_path / "m")]) == 0
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "m" / "tokenizer.json").is_symlink()


def test_the_hubs_cache_keeps_working(tmp_path):
    """models--X/snapshots/Y/file -> ../../blobs/hash; another model's blobs are outside."""
    tensors, config = fixture("mixtral-plain")
    plain = write(tmp_path / "plain", tensors, config)
    (plain / "tokenizer.json").write_text('{"a": 1}')
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "y", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in plain.iterdir():
        (blobs / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert main(["convert", str(snapshot), str(tmp_path / "m")]) == 0
    assert (tmp_path / "m" / "tokenizer.json").read_text() == '{"a": 1}'
    other = tmp_path / "models--z" / "blobs"
    other.mkdir(parents=True)
    (other / "b").write_text("{}")
    (snapshot / "more.json").symlink_to("../../../models--z/blobs/b")
    assert main(["convert", str(snapshot), str(tmp_path / "n")]) == 1


def test_errors_of_a_cut_run_are_printed_too(tmp_path, capsys, monkeypatch):
    arguments = ["convert", str(DEEPSEEK), str(tmp_path / "m"), "--quantize", "int8_channel"]
    assert main([*arguments, "--shard-size", "2KB"]) == 0
    whole = capsys.readouterr().out
    assert "layer 1: relative error" in whole
    arguments[2] = str(tmp_path / "n")
    written = [0]

    def cutting(bar, n=1):
        written[0] += n
        if written[0] > 12_000:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tqdm.tqdm.update", cutting)
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, "--shard-size", "2KB"])
    assert len(list((tmp_path / "n.incomplete").glob("*.safetensors"))) > 3
    capsys.readouterr()
    assert main([*arguments, "--shard-size", "2KB"]) == 0
    assert capsys.readouterr().out == whole
    names = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "n").iterdir())
    for name in names:
        assert (tmp_path / "n" / name).read_bytes() == (tmp_path / "m" / name).read_bytes()


def test_errors_that_only_a_run_before_knew_are_said_to_be_unknown(tmp_path, capsys, monkeypatch):
    """Cut off after everything was written, between the last names."""
    arguments = ["convert", str(DEEPSEEK), str(tmp_path / "m"), "--quantize", "int8_channel"]

    def cutting(self):
        self.directory.rename(self._complete)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Building, "finish", cutting)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    assert main(arguments) == 0
    assert "relative errors are not known" in capsys.readouterr().out
    assert not list((tmp_path / "m").glob("*.note"))
