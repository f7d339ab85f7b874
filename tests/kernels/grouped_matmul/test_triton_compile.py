"""The Triton kernels compile for GPUs that are not there, within the chips' limits.

Needs the gpu extra's jax-triton and triton and the GPU plugin's wheel, no GPU:
``pip install jax-triton triton`` and ``pip install --no-deps jax-cuda13-plugin``.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("jax_triton")
ROOT = pathlib.Path(__file__).parents[3]
LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}


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
    assert len(products) > 10
    for row in rows:
        assert row["shared"] <= LIMIT[capability], row
        assert row["threads_launched"] == row["threads"], row
    for row in products:
        if row["case"] not in ("float32", "odd widths"):  # element-wise loads may spill there
            assert row["spills"] == 0, row
            assert not row["serialised"], row
    specialised = {r["case"] for r in rows if r["kernel"] == "specialised_product_kernel"}
    if capability == 90:
        long = [r for r in products if r["case"] == "long groups"]
        assert all(r["wgmma"] and r["wgmma_in_flight"] and r["tma_loads"] for r in long)
        assert specialised == {"long groups", "short hidden axis", "groups of about 64"}
    else:
        assert not specialised
    if capability == 80:
        assert all(r["mma"] and not r["tma_loads"] for r in products)
