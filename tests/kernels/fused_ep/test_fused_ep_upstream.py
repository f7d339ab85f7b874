"""The cases and the fixed bugs of the kernel that this one succeeds, at this one's tolerances.

Sizes are those of the cases, but for the two model-sized ones, which keep D, F and K with fewer
experts and tokens: the interpreter runs on CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_ep_case import SMALL, Case, check, interpreter, make_mesh, relative_error
from test_fused_ep_quantized import quantized_case

from moe_flax.config import RouterConfig
from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe, fused_ep_moe_reference
from moe_flax.routing import Routing, route

pytestmark = pytest.mark.slow
BLOCKS = BlockSizes(rows=32, hidden=512, features=256)


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def logits(case, seed=1234):
    """Ascending scores, and K experts a token far above them."""
    rng = np.random.default_rng(seed)
    shape = (case.tokens, case.experts)
    scores = rng.normal(size=shape) + np.arange(case.experts) / 100
    for row in scores:
        row[rng.permutation(case.experts)[: case.k]] += 30
    return jnp.asarray(scores, jnp.float32)


def routed(case, **router):
    return route(logits(case), RouterConfig(**router), case.k)


BASIC = Case(tokens=256, experts=128, k=8, features=1024, hidden=1024)
SMALLER = Case(tokens=256, experts=128, k=8, features=512, hidden=512)


@pytest.mark.parametrize(
    ("case", "router", "activation"),
    [
        (BASIC, {"renormalize": True}, "silu"),
        (SMALLER, {"renormalize": False}, "silu"),
        (SMALLER, {}, "gelu"),
        (SMALLER, {}, "gpt_oss"),
        (SMALLER, {"score": "sigmoid"}, "silu"),
        (Case(tokens=64, experts=8, k=8, features=4096, hidden=1536), {}, "silu"),
        (Case(tokens=64, experts=16, k=8, features=2048, hidden=768), {}, "silu"),
    ],
    ids=["basic", "no_renorm", "gelu", "gpt_oss", "sigmoid", "qwen_235b", "qwen_30b"],
)
def test_cases(case, router, activation):
    routing = routed(case, **router)
    inputs = case.inputs() | {"weights": routing.weights}
    check(
        case,
        make_mesh(expert=4),
        routing.expert_ids,
        inputs=inputs,
        activation=activation,
        blocks=BLOCKS,
    )


@pytest.mark.parametrize(
    ("dtype", "windows"),
    [("int8", (256, 256)), ("float8_e5m2", (256, 256)), ("int8", (None, None))],
)
def test_quantized_cases(dtype, windows):
    """B12: windows of D and of F are their own."""
    case = Case(tokens=256, experts=128, k=8, features=512, hidden=1024)
    inputs, extra = quantized_case(case, dtype, windows)
    routing = routed(case, renormalize=False)
    inputs["weights"] = routing.weights
    ids = routing.expert_ids
    mesh = make_mesh(expert=4)
    check(case, mesh, ids, inputs=inputs, extra=extra, blocks=BLOCKS, tolerance=2e-2)


def test_bias_case():
    routing = routed(SMALLER, renormalize=False)
    inputs = SMALLER.inputs() | {"weights": routing.weights}
    check(
        SMALLER,
        make_mesh(expert=4),
        routing.expert_ids,
        inputs=inputs,
        extra=SMALLER.biases(),
        blocks=BLOCKS,
    )


def test_scores_that_underflow_choose_no_padding_expert():
    """B1: one logit of 200 and zeros, experts no multiple of 128; no id twice or out of range."""
    for experts in (8, 32, 160):
        scores = jnp.zeros((16, experts)).at[:, 3].set(200.0)
        ids = np.asarray(route(scores, RouterConfig(), 4).expert_ids)
        assert (ids < experts).all()
        assert (ids >= 0).all()
        assert all(len(set(row)) == 4 for row in ids)


@pytest.mark.parametrize(
    ("tokens", "devices", "rows"),
    [(32, 4, 32), (48, 4, 16), (96, 8, 96), (64, 4, 16)],
    ids=["B3_block_above_tokens", "B3_block_does_not_divide", "B4", "B7"],
)
@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_blocks_and_barriers(tokens, devices, rows, mode):
    """B2, B3, B4, B7, B9, B10: any block against any token count, skewed, any order of copies."""
    case = Case(tokens=tokens, experts=8, k=2, dtype="float32")
    blocks = BlockSizes(rows=rows, hidden=128, features=128)
    for name in ("random", "first_device"):
        ids = case.routings(devices)[name]
        check(case, make_mesh(expert=devices), ids, blocks=blocks, mode=mode)


@pytest.mark.parametrize(
    ("devices", "experts", "k"), [(1, 8, 2), (2, 8, 2), (4, 16, 2), (8, 32, 4)]
)
def test_lazy_copies_with_many_local_experts(devices, experts, k):
    """R1, R2: results are not overwritten before they left; sends and returns wait apart."""
    case = Case(tokens=64, experts=experts, k=k, dtype="float32")
    check(case, make_mesh(expert=devices), case.routings(devices)["random"], mode="on_wait")


def test_weights_are_no_copy_of_padded_ones():
    """B6: whatever D and F are, no operation of the program makes an array of the weights' size."""
    case = Case(tokens=16, experts=4, features=360, hidden=200)
    inputs = case.inputs()
    routing = Routing(jnp.asarray(case.routings(2)["random"]), inputs["weights"])
    mesh = make_mesh(expert=2)
    jaxpr = jax.make_jaxpr(
        lambda x, wi, wo: fused_ep_moe(
            x, wi, wo, routing, mesh=mesh, block_sizes=SMALL, method="fused"
        )
    )(inputs["tokens"], inputs["wi"], inputs["wo"])

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                    yield from walk(inner)

    local = 2 * 360 * 200  # elements of the device's experts in wo, the smaller of both
    makers = {
        equation.primitive.name
        for equation in walk(jaxpr.jaxpr)
        for out in equation.outvars
        if np.prod(out.aval.shape) >= local
    }
    assert makers <= {"jit", "pjit", "shard_map", "custom_vjp_call", "pallas_call"}, makers


def test_sigmoid_scores_are_not_softmax():
    """B13."""
    case = Case(tokens=16, experts=8, dtype="float32")
    scores = jax.random.normal(jax.random.key(0), (16, 8))
    inputs = case.inputs()
    outs = []
    for score in ("sigmoid", "softmax"):
        routing = route(scores, RouterConfig(score=score, renormalize=False), 2)
        arrays = (inputs["tokens"], inputs["wi"], inputs["wo"], routing)
        out = fused_ep_moe(
            *arrays, mesh=make_mesh(expert=2), block_sizes=SMALL, interpret=interpreter()
        )
        assert relative_error(out, fused_ep_moe_reference(*arrays)) < 1e-5
        outs.append(out)
    assert relative_error(outs[0], outs[1]) > 0.1
