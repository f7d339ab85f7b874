"""Which implementation runs: one rule for every kernel that has several."""

import functools
import warnings

import jax

BACKENDS = ("auto", "reference", "cpu", "triton", "tpu", "xla")
_OWN = {"cpu": "cpu", "gpu": "triton", "tpu": "tpu"}


def check_backend(backend: str) -> str:
    """Returns a backend's name, or raises a ValueError that lists them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; allowed: {BACKENDS}")
    return backend


def resolve_backend(backend: str = "auto", platform: str | None = None) -> str:
    """Turns "auto" into a backend's name, and checks any other name.

    Args:
      backend: one of `BACKENDS`. "auto" is "cpu" on CPU, "tpu" on TPU, "triton" on a GPU where
        what it needs is installed, and "xla" elsewhere.
      platform: "cpu", "gpu" or "tpu"; None takes that of JAX's default device.

    Raises:
      ValueError: an unknown backend (the message lists the known ones), or one asked for by name
        that cannot run here.
    """
    check_backend(backend)
    platform = platform or default_platform()
    if backend == "auto":
        own = _OWN.get(platform, "xla")
        missing = _missing_for_triton(platform) if own == "triton" else None
        if missing:
            _warn_once(f"running on XLA's own products instead of Triton kernels: {missing}")
        return "xla" if missing else own
    missing = _missing_for_triton(platform) if backend == "triton" else None
    if missing:
        raise ValueError(f"backend 'triton' cannot run here: {missing}; backend='auto' can")
    return backend


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


def default_platform() -> str:
    """The platform of JAX's default device: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None:
        platform = jax.default_backend()
    else:
        platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform == "cuda" else platform


def _missing_for_triton(platform: str) -> str | None:
    """Says what keeps the Triton kernels from running, or None."""
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {platform!r}"
    from moe_flax.kernels.grouped_matmul.triton import availability

    return availability.problem() or availability.capability_problem(
        getattr(jax.local_devices(backend="gpu")[0], "compute_capability", "8.0")
    )
