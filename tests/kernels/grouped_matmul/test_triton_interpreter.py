"""The Triton kernels' numbers on a CPU, in Triton's interpreter (float32: it gets bf16 wrong)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
HERE = pathlib.Path(__file__).parent


def run(case: str) -> list[float]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])]),
        "JAX_PLATFORMS": "cpu",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, str(HERE / "triton_interpreter_cases.py"), case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", ["gated", "clamped", "no gate", "batched", "float8", "sorting"])
def test_numbers(case):
    errors = run(case)
    assert len(errors) in (5, 7, 13, 16)
    assert max(errors) < 2e-6


@pytest.mark.triton
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", ["kept int8", "kept blocks", "kept no gate"])
def test_quantised_weights(case):
    """In float16."""
    errors = run(case)
    assert len(errors) in (5, 7)
    assert max(errors) < 2e-3
