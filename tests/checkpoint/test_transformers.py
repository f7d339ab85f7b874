"""transformers itself next to us, on fresh weights and inputs: the slower parity suite."""

import sys
import zlib

import numpy as np
import pytest
from flax import nnx
from golden import FIXTURES, relative_error, tensors_of

from moe_flax import checkpoint

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(FIXTURES))
recipes = pytest.importorskip("make_fixtures")


def written(name, case, path):
    """A recipe's model with fresh weights, saved; inputs and outputs of its MoE blocks."""
    recipe = recipes.RECIPES[name]
    model = recipes.build(recipe, case)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{case}".encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    inputs = torch.randn(1, recipes.TOKENS, recipes.WIDTHS[case][0], generator=generator)
    outputs = recipes.block_outputs(model, recipe, inputs * recipe.scale)
    model.save_pretrained(path, save_original_format=case != "double")
    return model, (inputs * recipe.scale)[0].numpy(), {i: o.numpy() for i, o in outputs.items()}


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n, r in recipes.RECIPES.items() for c in r.cases if c != "square"]
)
def test_outputs_and_files(tmp_path, name, case):
    _, inputs, outputs = written(name, case, tmp_path / "theirs")
    loaded = checkpoint.load(tmp_path / "theirs")
    index = max(outputs)
    layer = loaded.layers[index]
    layer.backend = "reference"
    got = nnx.jit(lambda layer, x: layer(x))(layer, inputs)
    assert relative_error(got, outputs[index]) < 1e-5
    checkpoint.save(tmp_path / "ours", loaded)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_transformers_loads_what_we_save(tmp_path, name):
    model, _, _ = written(name, "plain", tmp_path / "theirs")
    checkpoint.save(tmp_path / "ours", checkpoint.load(tmp_path / "theirs"))
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
