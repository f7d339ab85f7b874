"""The Triton kernels compile for GPUs that are not there, within the chips' limits.

Needs the gpu extra's jax-triton and triton and the GPU plugin's wheel, no GPU:
``pip install jax-triton triton`` and ``pip install --no-deps jax-cuda13-plugin``.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton")
ROOT = pathlib.Path(__file__).parents[3]
LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}


# Cases whose loads may spill: element by element.
ELEMENTWISE = (
    "float32",
    "odd widths",
    "float8, odd widths",
    "a branch off 16 bytes",
    "blocks, odd widths",
)


@pytest.mark.triton
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("capability", LIMIT)
def test_kernels_compile_within_the_chips_limits(capability, tmp_path):
    table = tmp_path / "kernels.json"
    command = [sys.executable, str(ROOT / "benchmarks/compile_kernels.py"), "--json", str(table)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [*command, str(capability)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(table.read_text())
    products = [r for r in rows if "product_kernel" in r["kernel"] or "contr" in r["kernel"]]
    kept = [r for r in rows if r["kernel"].startswith("kept")]
    products += [r for r in kept if r not in products]
    assert len(products) > 20
    assert len(kept) >= 10
    for row in rows:
        assert row["shared"] <= LIMIT[capability], row
        assert row["threads_launched"] == row["threads"], row
    for row in products:
        if row["case"] not in ELEMENTWISE:
            assert row["spills"] == 0, row
            assert not row["serialised"], row
    specialised = {r["case"] for r in rows if r["kernel"] == "specialised_product_kernel"}
    if capability == 90:
        long = [r for r in products if r["case"] == "long groups"]
        assert all(r["wgmma"] and r["wgmma_in_flight"] and r["tma_loads"] for r in long)
        plain = {"long groups", "short hidden axis", "groups of about 64"}
        assert specialised == plain | {"float8, short hidden axis"}
        contracted = {r["case"] for r in rows if r["kernel"] == "specialised_contraction_kernel"}
        assert contracted == {"long groups", "no gate"}
        by_hand = {r["case"] for r in kept if r["kernel"] == "kept_hopper_kernel"}
        assert by_hand == {r["case"] for r in kept} - {"blocks, odd widths"}
        assert all(r["wgmma"] for r in kept)
    else:
        assert not specialised
    float8 = [r for r in products if r["case"].startswith("float8")]
    assert bool(float8) == (capability >= 89)
    if capability == 90:
        for row in (r for r in float8 if r["case"] in ("float8", "float8, activation apart")):
            assert row["float8_products"] == row["wgmma"] > 0, row
            assert min(row["wgmma_in_flight"], row["tma_loads"]) > 0, row
    if capability == 100:
        assert all(r["tcgen05"] for r in float8 if "about" not in r["case"])
    off = [r for r in products if r["case"] == "a branch off 16 bytes"]
    assert not any(r["tma_loads"] for r in off if "contraction" in r["kernel"])
    if capability == 80:
        assert all(r["mma"] and not r["tma_loads"] for r in products)


@pytest.mark.triton
def test_vmap_runs_the_kernels_in_a_loop():
    """jax-triton itself refuses vmap."""
    from moe_flax.activations import Activation
    from moe_flax.kernels.grouped_matmul import api
    from moe_flax.kernels.grouped_matmul.triton import ffn, launch

    def layer(x, wi, wo, ids, weights):
        call = ffn.make_call(Activation(), x, wi, ids)
        return ffn.routed_ffn(call, x, wi, wo, None, None, ids, weights)

    def product(x, wi, sizes):
        return api._product(api._Call("triton", False, x.dtype, None), x, wi, sizes)

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    x, wi, wo = shaped(3, 20, 64), shaped(4, 2, 64, 32), shaped(4, 32, 64)
    ids, weights = shaped(3, 20, 2, dtype=jnp.int32), shaped(3, 20, 2, dtype=jnp.float32)
    calls = {
        layer: ((x, wi, wo, ids, weights), (0, None, None, 0, 0)),
        product: ((x, wi, shaped(3, 4, dtype=jnp.int32)), (0, None, 0)),
    }
    for function, (given, axes) in calls.items():
        with launch.compile_for(90):
            traced = jax.jit(jax.vmap(function, in_axes=axes)).trace(*given)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.while" in text
        assert 1 < text.count("triton_kernel_call") < 6
