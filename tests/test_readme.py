"""What the README and the layer's docstring show runs as it stands."""

import doctest
import pathlib
import re

from flax import nnx

import moe_flax
from moe_flax import layers

ROOT = pathlib.Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "qwen3_moe-plain"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_ten_lines():
    found = {}
    exec(BLOCKS[0], found)
    assert found["y"].shape == (4, 128, 256)
    assert int(found["aux"].tokens_per_expert.sum()) == 2 * 4 * 128
    assert found["moe"].experts.wi[...].sharding.spec[0] == "expert"


def test_named_models_and_checkpoints(tmp_path, monkeypatch):
    """On a small checkpoint, and without the memory of a large model."""
    build = moe_flax.MoE.from_config
    monkeypatch.setattr(
        moe_flax.MoE,
        "from_config",
        lambda *a, **k: nnx.eval_shape(lambda: build(*a, **{**k, "rngs": nnx.Rngs(0)})),
    )
    code = BLOCKS[1].replace("path/to/model", str(FIXTURE)).replace("layer=3", "layer=2")
    building, _, loading = code.partition("\n\n")
    found = {"moe_flax": moe_flax, "nnx": nnx, "jnp": layers.jnp}
    exec(building, found)
    assert found["moe"].experts.wi.shape == (128, 2, 2048, 768)
    monkeypatch.undo()
    exec(loading.replace("path/to/copy", str(tmp_path / "copy")), found)
    assert found["moe"].config.family == "qwen3_moe"
    assert (tmp_path / "copy" / "config.json").exists()


def test_docstring_of_the_layer():
    (test,) = doctest.DocTestFinder(recurse=False).find(layers.MoE, "MoE")
    result = doctest.DocTestRunner().run(test)
    assert result.attempted >= 5
    assert result.failed == 0
