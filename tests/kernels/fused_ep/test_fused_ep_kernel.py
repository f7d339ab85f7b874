"""The kernel in the TPU interpreter: values, races, skewed loads, any mesh and any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_ep_case import SMALL, Case, check, compiled, interpreter, make_mesh, relative_error
from jax.sharding import AxisType

from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe, fused_ep_moe_reference
from moe_flax.routing import Routing


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.interpret
def test_four_devices_any_load():
    case = Case()
    mesh = make_mesh(expert=4)
    for name, ids in case.routings(4).items():
        out = check(case, mesh, ids)
        if name == "nothing":
            assert not np.any(np.asarray(out, np.float32))


@pytest.mark.interpret
def test_uneven_sizes_in_passes_on_an_explicit_mesh():
    """D and F of no whole lanes, F split over a tensor axis, several passes, eager copies."""
    case = Case(tokens=37, experts=4, k=3, features=100, hidden=264, dtype="float32")
    mesh = make_mesh(AxisType.Explicit, tensor=2, expert=2)
    blocks = BlockSizes(rows=16, hidden=128, features=128, receive_rows=24)
    for name in ("random", "one_expert"):
        ids = case.routings(2)[name]
        check(case, mesh, ids, mode="eager", blocks=blocks, extra=case.biases())


SHORT = {(1, 4, "float32", "eager"), (2, 16, "bfloat16", "eager"), (4, 12, "float32", "on_wait")}


@pytest.mark.parametrize(
    ("devices", "experts", "dtype", "mode"),
    [
        pytest.param(*values, marks=pytest.mark.interpret if values in SHORT else pytest.mark.slow)
        for values in (
            (*sizes, dtype, mode)
            for sizes in ((1, 4), (2, 16), (4, 12), (8, 8))
            for dtype in ("float32", "bfloat16")
            for mode in ("eager", "on_wait")
        )
    ],
)
def test_devices_and_modes(devices, experts, dtype, mode):
    """1 to 8 local experts; several row tiles an expert."""
    case = Case(tokens=71, experts=experts, k=2, features=256, hidden=384, dtype=dtype)
    mesh = make_mesh(expert=devices)
    for ids in case.routings(devices).values():
        check(case, mesh, ids, mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "hidden", "blocks"),
    [
        (2880 // 8, 2880 // 8, SMALL),  # gpt-oss in small: 360
        (100, 100, BlockSizes(rows=32)),
        (384, 352, BlockSizes(rows=16, hidden=256, features=256)),
        (640, 1408 // 4, BlockSizes(rows=48, hidden=128, features=384)),
        (128, 128, BlockSizes(rows=256)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_that_are_multiples_of_nothing(features, hidden, blocks, dtype):
    words = -(-features // 128) * 128 if dtype == "float32" else -(-features // 256) * 128
    if blocks.features and words % blocks.features:
        blocks = BlockSizes(rows=blocks.rows, hidden=blocks.hidden)
    case = Case(tokens=29, experts=4, k=2, features=features, hidden=hidden, dtype=dtype)
    check(case, make_mesh(expert=2), case.routings(2)["random"], blocks=blocks)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.interpret),
    ],
)
def test_tiles_of_every_height(dtype):
    """A tall tile before a low one and after it: each has code of its own, packing included."""
    loads = [5, 70, 20, 64, 3, 33]  # tiles of 64 and 32 rows: 5, 64 + 6, 20, 64, 3, 33
    case = Case(tokens=sum(loads) + 1, experts=6, k=1, features=128, hidden=128, dtype=dtype)
    ids = np.append(np.repeat(np.arange(6), loads), 6)[:, None]
    ids = np.random.default_rng(0).permutation(ids)
    blocks = BlockSizes(rows=64, hidden=128, features=128)
    check(case, make_mesh(expert=2), ids, blocks=blocks)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
def test_few_tokens(tokens):
    """Fewer tokens than devices, and none on some."""
    case = Case(tokens=tokens, experts=8, k=4)
    check(case, make_mesh(expert=8), case.routings(8)["random"])


@pytest.mark.slow
def test_k_from_one_to_all():
    for k in (1, 8):
        case = Case(tokens=24, experts=8, k=k)
        check(case, make_mesh(expert=4), case.routings(4)["random"], mode="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "expert": 4}, {"expert": 2, "fsdp": 2}, {"tensor": 2, "data": 2, "expert": 2}],
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(sizes, kind):
    case = Case(tokens=64, experts=8)
    check(case, make_mesh(kind, **sizes), case.routings(2)["random"], extra=case.biases())


@pytest.mark.slow
def test_experts_over_two_axes_and_number_that_does_not_divide():
    case = Case(tokens=40, experts=6)
    mesh = make_mesh(a=2, b=2)
    inputs = case.inputs()
    ids = jnp.asarray(case.routings(2)["random"])
    routing = Routing(ids, inputs["weights"])
    out = fused_ep_moe(
        inputs["tokens"],
        inputs["wi"],
        inputs["wo"],
        routing,
        mesh=mesh,
        expert_axis=("a", "b"),
        block_sizes=SMALL,
        interpret=interpreter(),
    )
    wide = (inputs[name].astype(jnp.float32) for name in ("tokens", "wi", "wo"))
    assert relative_error(out, fused_ep_moe_reference(*wide, routing)) < 8e-3


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("eager", marks=pytest.mark.slow),
        pytest.param("on_wait", marks=pytest.mark.interpret),
    ],
)
def test_two_layers_in_one_jit(mode):
    """The second layer's barrier is not met by the first one's signals (B8)."""
    case = Case(tokens=32, experts=8)
    mesh = make_mesh(expert=4)
    first, second = case.inputs(1), case.inputs(2)
    one, two = (jnp.asarray(case.routings(4, seed)["random"]) for seed in (1, 2))
    layer = compiled(mesh, mode, SMALL, "silu", False)

    @jax.jit
    def both(x):
        x = layer(x, first["wi"], first["wo"], one, first["weights"], {})
        return layer(x, second["wi"], second["wo"], two, second["weights"], {})

    out = both(first["tokens"])
    ref = first["tokens"]
    for inputs, ids in ((first, one), (second, two)):
        ref = fused_ep_moe_reference(
            ref.astype(jnp.float32),
            inputs["wi"].astype(jnp.float32),
            inputs["wo"].astype(jnp.float32),
            Routing(ids, inputs["weights"]),
        )
    assert relative_error(out, ref) < 1.2e-2


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gpt_oss", "relu2"])
def test_activations(activation):
    branches = 1 if activation == "relu2" else 2
    case = Case(tokens=33, experts=4, branches=branches)
    mesh = make_mesh(expert=2)
    ids = case.routings(2)["random"]
    check(case, mesh, ids, activation=activation, extra=case.biases())


@pytest.mark.slow
def test_a_nan_token_stays_alone():
    case = Case(tokens=32, experts=8)
    inputs = case.inputs()
    ids = jnp.asarray(case.routings(4)["random"])
    bad = inputs | {"tokens": inputs["tokens"].at[5].set(jnp.nan)}
    run = compiled(make_mesh(expert=4), "on_wait", SMALL, "silu", False)
    clean, spoilt = (
        np.asarray(run(i["tokens"], i["wi"], i["wo"], ids, i["weights"], {}), np.float32)
        for i in (inputs, bad)
    )
    assert np.isnan(spoilt[5]).all()
    others = np.arange(32) != 5
    np.testing.assert_array_equal(spoilt[others], clean[others])


@pytest.mark.interpret
def test_weights_on_the_input():
    case = Case(tokens=32, experts=8, k=1, dtype="float32")
    inputs = case.inputs()
    weights = jax.nn.sigmoid(jax.random.normal(jax.random.key(3), (32, 1)))
    routing = Routing(jnp.asarray(case.routings(4)["random"]), weights, apply_to="input")
    arrays = (inputs["tokens"], inputs["wi"], inputs["wo"], routing)
    out = fused_ep_moe(
        *arrays, mesh=make_mesh(expert=4), block_sizes=SMALL, interpret=interpreter()
    )
    assert relative_error(out, fused_ep_moe_reference(*arrays)) < 1e-5
