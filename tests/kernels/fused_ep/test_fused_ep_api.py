"""What `fused_ep_moe` refuses, and the numbers that its messages give."""

import jax
import jax.numpy as jnp
import pytest
from fused_ep_case import make_mesh

from moe_flax.kernels.fused_ep import BlockSizes, fused_ep_moe
from moe_flax.routing import Routing

SIZES = {
    "tokens": (4, 8),
    "wi": (4, 2, 8, 24),
    "wo": (4, 24, 8),
    "ids": (4, 2),
    "weights": (4, 2),
}


def call(shapes=(), dtypes=(), mesh=None, **options):
    """Traces a call on arrays of the shapes given, all else as in SIZES."""
    shapes, dtypes = SIZES | dict(shapes), {"ids": "int32"} | dict(dtypes)
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtypes.get(name, "float32"))
        for name, shape in shapes.items()
    }

    def run(tokens, wi, wo, ids, weights, **extra):
        routing = Routing(ids, weights)
        chosen = mesh or make_mesh(expert=2)
        return fused_ep_moe(tokens, wi, wo, routing, mesh=chosen, **extra, **options)

    return jax.eval_shape(run, **arrays)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"tokens": (4, 2, 8)}, r"takes tokens \[T, D\], got shape \(4, 2, 8\)"),
        ({"wi": (4, 8, 24)}, r"takes wi \[E, J, D, F\], got shape \(4, 8, 24\)"),
        ({"wo": (4, 8)}, r"takes wo \[E, F, D\], got shape \(4, 8\)"),
        ({"wi": (4, 2, 9, 24)}, r"wi must have shape \(4, 2, 8, 24\), got \(4, 2, 9, 24\) "),
        ({"wo": (4, 23, 8)}, r"wo must have shape \(4, 24, 8\), got \(4, 23, 8\)"),
        ({"wi": (4, 3, 8, 24)}, r"axis 1 of wi must be 2 .* or 1 .*, got \(4, 3, 8, 24\)"),
        ({"ids": (4,)}, r"expert_ids must be \[T, K\] with K >= 1, got shape \(4,\)"),
        ({"ids": (4, 0)}, r"K >= 1, got shape \(4, 0\)"),
        ({"ids": (5, 2), "weights": (5, 2)}, r"expert_ids must have shape \(4, 2\), got \(5, 2\)"),
        ({"weights": (4, 3)}, r"weights must have shape \(4, 2\), got \(4, 3\)"),
        ({"wi_bias": (4, 24)}, r"wi_bias must have shape \(4, 2, 24\), got \(4, 24\)"),
        ({"wo_bias": (4, 24)}, r"wo_bias must have shape \(4, 8\), got \(4, 24\)"),
        ({"wi_scale": (3, 2, 1, 24)}, r"wi_scale must have 4 axes and 4 experts, got \(3, 2, 1"),
        ({"wo_scale": (4, 8)}, r"wo_scale must have 3 axes and 4 experts, got \(4, 8\)"),
        (
            {"tokens": (2**28, 8), "ids": (2**28, 8), "weights": (2**28, 8)},
            r"up to 2\*\*31 - 1 slots, got T=268435456 times K=8: split the tokens",
        ),
    ],
)  # fmt: skip
def test_wrong_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        call(shapes)


@pytest.mark.parametrize(
    ("dtypes", "error", "message"),
    [
        ({"tokens": "float16"}, TypeError, r"tokens must have a dtype of .*bfloat16.*got float16"),
        ({"wi": "float16"}, TypeError, r"wi must have a dtype of .*int8.*, got float16"),
        ({"wo": "int32"}, TypeError, r"wo must have a dtype of .*, got int32"),
        ({"wi": "int8"}, ValueError, r"wi of int8 needs wi_scale"),
        ({"wo": "float8_e5m2"}, ValueError, r"wo of float8_e5m2 needs wo_scale"),
    ],
)
def test_wrong_dtypes(dtypes, error, message):
    with pytest.raises(error, match=message):
        call(dtypes=dtypes)


def test_wrong_meshes():
    with pytest.raises(ValueError, match=r"'ep' is no axis of the mesh, which has {'expert': 2}"):
        call(expert_axis="ep")
    with pytest.raises(ValueError, match=r"F=24 does not divide over mesh axis 'tensor' of 5"):
        call(mesh=make_mesh(expert=1, tensor=5))
    with pytest.raises(ValueError, match=r"expert_axis 'expert' is no axis of the mesh, .*'data'"):
        call(mesh=make_mesh(data=2))


def test_wrong_options():
    with pytest.raises(ValueError, match=r"method must be 'auto', 'fused' or 'replicated', got"):
        call(method="magic")
    with pytest.raises(ValueError, match=r"chip 'v4' is not known; allowed: \['tpu7x', 'v5e'"):
        call(method="fused", chip="v4")
    with pytest.raises(ValueError, match=r"offsets the up branch of a gated FFN: .*got \(4, 1, 8"):
        call({"wi": (4, 1, 8, 24)}, activation="gpt_oss")
    with pytest.raises(ValueError, match=r"activation 'swish'"):
        call(activation="swish")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (BlockSizes(rows=24), r"rows must be a positive multiple of 16, got 24"),
        (BlockSizes(hidden=-128), r"hidden must be a positive multiple of 128, got -128"),
        (BlockSizes(features=256), r"features=256 must divide the 128 words .*allowed: \[128\]"),
        (BlockSizes(receive_rows=0), r"receive_rows must be a positive multiple of 1, got 0"),
    ],
)
def test_wrong_block_sizes(blocks, message):
    with pytest.raises(ValueError, match=message):
        call(method="fused", block_sizes=blocks)


def test_scales_that_no_split_or_window_covers():
    eight = {"wi": "int8", "wo": "int8"}
    scales = {"wi_scale": (4, 2, 1, 24), "wo_scale": (4, 3, 8)}
    mesh = make_mesh(expert=2, tensor=2)
    with pytest.raises(ValueError, match=r"wo_scale .*: 3 scales do not divide over .* of 2"):
        call(scales, eight, mesh=mesh)
    with pytest.raises(ValueError, match=r"5 scales do not cover 24 weights: .*divides 24"):
        call(scales | {"wo_scale": (4, 5, 8)}, eight, method="fused")


def test_right_ones_are_taken():
    assert call(method="fused").shape == (4, 8)
    assert call(dtypes={"tokens": jnp.bfloat16}, method="replicated").dtype == jnp.bfloat16
