"""Which backend is chosen where."""

import importlib.util

import jax
import pytest

from moe_flax.kernels import backend as module
from moe_flax.kernels.backend import resolve_backend


@pytest.fixture
def installed(monkeypatch):
    """A set of modules that are there; the others are not."""
    names = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)
    return names


def test_auto_takes_the_platforms_own(installed):
    installed.update(*module._NEEDS.values())
    assert [resolve_backend("auto", p) for p in ("cpu", "gpu", "tpu", "metal")] == [
        "cpu",
        "triton",
        "tpu",
        "xla",
    ]
    assert resolve_backend() == "cpu"


@pytest.mark.parametrize("absent", ["triton", "jax_triton"])
def test_auto_on_a_gpu_without_triton_is_xla(installed, absent):
    installed.update(*module._NEEDS.values())
    installed.discard(absent)
    assert resolve_backend("auto", "gpu") == "xla"
    with pytest.raises(ValueError, match=f"'triton' cannot run here: module {absent}"):
        resolve_backend("triton", "gpu")


def test_a_named_backend_stays_or_is_refused():
    for name in ("reference", "cpu", "xla"):
        assert resolve_backend(name, "gpu") == name
    with pytest.raises(
        ValueError, match=r"'triton' cannot run here: it needs an NVIDIA GPU.*'cpu'"
    ):
        resolve_backend("triton")
    with pytest.raises(ValueError, match=r"'cuda' is not known; allowed: .*'auto', 'reference'"):
        resolve_backend("cuda")


def test_the_default_device_counts():
    with jax.default_device(jax.devices("cpu")[0]):
        assert resolve_backend() == "cpu"
