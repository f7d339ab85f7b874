"""transformers itself next to us, on fresh weights and inputs: the slower parity suite."""

import sys
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import FIXTURES, relative_error, tensors_of

from moe_flax import MoE, MoEConfig, checkpoint
from moe_flax.forward import route_tokens
from moe_flax.parallel.mesh import DeviceAxes

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


def test_switch_drops_the_same_tokens():
    """In each sequence, 2 places an expert."""
    from transformers.models.switch_transformers import modeling_switch_transformers as theirs

    config = transformers.SwitchTransformersConfig(
        d_model=16, d_ff=32, num_experts=4, expert_capacity=2, num_layers=2
    )
    block = theirs.SwitchTransformersSparseMLP(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        x = torch.randn(3, 9, 16, generator=generator)
        expected = block(x).numpy()
    layer = MoE.from_config(MoEConfig.from_hf(config.to_dict()), rngs=nnx.Rngs(0))
    state = {name: value.numpy() for name, value in block.state_dict().items()}
    layer.router.kernel[...] = state["router.classifier.weight"].T
    for e in range(4):
        for name in ("wi", "wo"):
            weight = getattr(layer.experts, name)
            matrix = state[f"experts.expert_{e}.{name}.weight"].T
            weight[...] = weight[...].at[e].set(matrix.reshape(weight.shape[1:]))
    got = layer(x.numpy())
    assert 0 < (expected == 0).all(-1).mean() < 1
    assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("by_probability", [False, True])
def test_nllb_drops_the_same_tokens(by_probability, before):
    """Their router alone: their block is wrong, see ``tests/fixtures/make_by_hand.py``."""
    from transformers.models.nllb_moe import modeling_nllb_moe as theirs

    config = transformers.NllbMoeConfig(
        d_model=16, num_experts=6, moe_eval_capacity_token_fraction=0.3, moe_token_dropout=0.0,
        batch_prioritized_routing=by_probability, normalize_router_prob_before_dropping=before,
    )  # fmt: skip
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + torch.arange(6) / 3
    with torch.no_grad():
        router = theirs.NllbMoeTop2Router(config).eval()
        _, expected = router.route_tokens(logits.clone())
    mask = jnp.ones(40, bool)
    ours = MoEConfig.from_hf(config.to_dict())
    routing, _ = route_tokens({}, jnp.asarray(logits.numpy()), mask, DeviceAxes(), 40, ours)
    got = np.zeros((40, 7))
    np.put_along_axis(got, np.asarray(routing.expert_ids), np.asarray(routing.weights), -1)
    assert (expected.numpy().sum(-1) == 0).any()
    np.testing.assert_allclose(got[:, :6], expected.numpy(), rtol=1e-5, atol=1e-7)
