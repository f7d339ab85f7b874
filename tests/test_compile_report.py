"""Compiling for TPUs that are not there: arguments, refusals, arithmetic, and real compiles."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from moe_flax import MoEConfig, compile_report
from moe_flax.cli import main
from moe_flax.kernels.fused_ep.blocks import CHIPS
from moe_flax.kernels.fused_ep.cost import (
    MXU_USE,
    Layer,
    explain_fused,
    fused_work,
    predict_fused,
    predict_replicated,
)


def run(*arguments):
    return main(["compile", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "expert"), "'expert' is no mesh; write axis=size"),
        (("--mesh", "expert=2,expert=2"), "each axis once"),
        (("--mesh", "expert=0"), "'0' is no positive number"),
        (("--mesh", "expert=4", "--tokens", "-3"), "'-3' is no positive number"),
        (("--mesh", ""), "is no mesh"),
    ],
)
def test_arguments_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run("tiny", "--topology", "v6e:2x2", *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nope --topology v6e:2x2 --mesh expert=4", r"no preset 'nope'; known presets: .*tiny"),
        ("tiny --topology v4:2x2 --mesh expert=4", r"start with one of \['tpu7x', .*got 'v4:2x2'"),
        ("tiny --topology v6e:2x2 --mesh data=4", r"needs an axis 'expert', got {'data': 4}"),
        ("tiny --topology v6e:2x2 --mesh expert=4 --dtype int3", r"weight_dtype must be one of"),
        ("tiny --topology v6e:2x2 --mesh expert=2,tensor=7", r"F=48 does not divide over tensor=7"),
        ("tiny --topology v6e:4x4 --mesh data=2,expert=4", r"8 devices in all, and v6e:4x4 has 16"),
    ],
)  # fmt: skip
def test_refusals(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(compile_report, "_topology_devices", lambda *_: [None] * 16)
    assert run(*arguments.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("moe-flax: ")
    assert re.search(message, error), error


def test_without_libtpu(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("tiny", "--topology", "v6e:2x2", "--mesh", "expert=4") == 1
    assert "pip install 'moe-flax[tpu]'" in capsys.readouterr().err


def test_part_and_tokens_of_the_function():
    tiny = MoEConfig.preset("tiny")
    with pytest.raises(ValueError, match=r"part must be one of .* got 'all'"):
        compile_report.compile_report(tiny, "v6e:2x2", {"expert": 4}, part="all")
    with pytest.raises(ValueError, match="the layer holds no int8 weights"):
        compile_report.compile_report(
            tiny, "v6e:2x2", {"expert": 4}, part="layer", weight_dtype="int8"
        )
    with pytest.raises(ValueError, match="tokens of a device must be 1 or more, got 0"):
        compile_report.layer_sizes(tiny, {"expert": 4}, 0)


def test_the_arithmetic_is_the_predictions():
    """Every line's own numbers give its result, and the last is the prediction."""
    layer = Layer(experts=128, k=8, features=2048, hidden=768, devices=4, tokens=1024)
    rows, products, hbm, ici, fixed, time = explain_fused(layer, "v6e", 256)
    work, prediction = fused_work(layer, 256), predict_fused(layer, "v6e", 256)
    assert "1024 tokens x K 8 = 8192 a device, 32.0 of 32 local experts" in rows
    assert "32.0 tiles of 256 rows" in rows
    assert "products: 2 x 32.0 x 256 x 3 x D 2048 x F 768 = 77.3 GFLOP at 79% of 918" in products
    assert work.flops == 2 * 32 * 256 * 3 * 2048 * 768
    assert "HBM: 8 x 8192 rows x 4096 B + 32.0 x 9.4 MB of weights = 570 MB at 1640 GB/s" in hbm
    assert work.hbm_bytes == 8 * 8192 * 4096 + 32 * 3 * 2048 * 768 * 2
    assert "ICI: 8192 rows x 4096 B x 3/4 = 25.2 MB each way at 448 GB/s = 56 us" in ici
    assert "12 us + 2 x E 128 x 60 cycles at 1.75 GHz = 21 us" in fixed
    seconds = work.hbm_bytes / CHIPS["v6e"].hbm_bytes_per_second + prediction.fixed
    assert prediction.seconds == pytest.approx(seconds)
    assert f"max(products, HBM, ICI) + not hidden = {1e6 * seconds:.0f} us" in time
    assert work.flops / (918e12 * MXU_USE[256]) == pytest.approx(prediction.products)


def test_float32_products_take_six_passes():
    sizes = {"experts": 8, "k": 2, "features": 256, "hidden": 256, "devices": 4, "tokens": 64}
    narrow, wide = Layer(**sizes), Layer(**sizes, weight_bytes=4, row_bytes=4)
    assert fused_work(wide).flops == 6 * fused_work(narrow).flops
    assert predict_replicated(wide, "v5e").seconds > predict_replicated(narrow, "v5e").seconds
    assert "products: 12 x" in explain_fused(wide, "v5e")[1]


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e:2x2", "expert=4"),
        ("v5p:2x2x1", "data=2,expert=2"),
        ("v6e:2x2", "tensor=2,expert=2"),
        ("v6e:4x4", "fsdp=2,expert=8"),
        ("tpu7x:2x2x1", "expert=8"),
    ],
)
def test_a_layer_compiles(topology, mesh, capsys):
    assert run("tiny", "--topology", topology, "--mesh", mesh, "--tokens", "16") == 0
    text = capsys.readouterr().out
    assert f"the layer compiles for {topology}, mesh {mesh}, 16 tokens a device" in text
    for name in ("VMEM", "HBM", "predicted", "fallback"):
        assert re.search(rf"^  {name} +.*\d", text, re.MULTILINE), text


@pytest.mark.tpu
def test_quantized_experts_compile_and_unknown_slices_do_not(capsys):
    arguments = ("--mesh", "expert=4", "--tokens", "16", "--dtype", "float8_e4m3fn")
    assert run("tiny", "--topology", "v6e:2x2", *arguments) == 0
    assert "its routed experts compile for v6e:2x2" in capsys.readouterr().out
    assert run("tiny", "--topology", "v6e:nine", *arguments) == 1
    assert "no slice 'v6e:nine', such as v5e:2x2" in capsys.readouterr().err


@pytest.mark.tpu
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "rematerialized"])
def test_the_gradient_compiles(remat):
    """With rematerialization the backward pass runs the forward kernel once more."""
    config = MoEConfig.preset("tiny")
    devices = compile_report._topology_devices("v6e:2x2", "v6e")
    mesh = jax.sharding.Mesh([devices[:2], devices[2:]], ("data", "expert"))
    _, sizes = compile_report.layer_sizes(config, {"expert": 2}, 16)
    forward, arguments = compile_report._layer_program(config, mesh, sizes, 16, "bfloat16", "v6e")

    def loss(parameters, tokens, mask):
        def layer(tokens):
            return forward(parameters, tokens, mask)

        layer = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jnp.sin(layer(layer(tokens)).astype(jnp.float32)))

    grad = jax.jit(jax.grad(loss, (0, 1)))
    lowered = grad.trace(*arguments).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes > 0
    assert lowered.as_text().count("moe_fused_ffn") == (2 if remat else 1)  # both layers share it
