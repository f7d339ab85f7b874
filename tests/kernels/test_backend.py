"""Which backend is chosen where."""

import importlib.metadata
import importlib.util
import types
import warnings

import jax
import pytest

from moe_flax.kernels import backend as module
from moe_flax.kernels.backend import resolve_backend
from moe_flax.kernels.grouped_matmul.triton import availability

WORKING = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.8.0"}


@pytest.fixture
def installed(monkeypatch):
    """Versions of what is installed, on a machine with a GPU that is new enough."""
    versions = dict(WORKING)

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    availability.problem.cache_clear()
    module._warn_once.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in versions else None
    )
    monkeypatch.setattr(
        jax, "local_devices", lambda backend: [types.SimpleNamespace(compute_capability="9.0")]
    )
    yield versions
    availability.problem.cache_clear()


def test_auto_takes_the_platforms_own(installed):
    assert [resolve_backend("auto", p) for p in ("cpu", "gpu", "tpu", "metal")] == [
        "cpu",
        "triton",
        "tpu",
        "xla",
    ]
    assert resolve_backend() == "cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"triton": None}, "triton is not installed"),
        ({"jax-triton": None}, "jax-triton is not installed"),
        ({"jax": "0.12.0.1"}, r"jax 0.12.0.1 does not fit; working set: jax >=0.11.2"),
        ({"triton": "3.9.0"}, r"triton 3.9.0 does not fit.*moe-flax\[gpu\]"),
        ({"jax-triton": "0.3.1"}, "jax-triton 0.3.1 does not fit"),
    ],
)
def test_a_gpu_without_a_working_set_takes_xla_and_says_so_once(installed, change, message):
    for name, version in change.items():
        installed.pop(name)
        if version:
            installed[name] = version
    with pytest.warns(UserWarning, match=message):
        assert resolve_backend("auto", "gpu") == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend("auto", "gpu") == "xla"
    with pytest.raises(ValueError, match=f"'triton' cannot run here: {message}"):
        resolve_backend("triton", "gpu")


def test_a_gpu_that_is_too_old_is_named(installed, monkeypatch):
    old = types.SimpleNamespace(compute_capability="7.5")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [old])
    with pytest.raises(ValueError, match=r"capability 7\.5; the Triton kernels need 8\.0"):
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
