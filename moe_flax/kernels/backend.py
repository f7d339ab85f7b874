"""Which implementation runs: one rule for every kernel that has several."""

import importlib.util

import jax

BACKENDS = ("auto", "reference", "cpu", "triton", "tpu", "xla")


def check_backend(backend: str) -> str:
    """Returns a backend's name, or raises a ValueError that lists them."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; allowed: {BACKENDS}")
    return backend


def resolve_backend(backend: str = "auto", platform: str | None = None) -> str:
    """Turns "auto" into a backend's name, and checks any other name.

    Args:
      backend: one of `BACKENDS`. "auto" is "cpu" on CPU; "triton" on an NVIDIA GPU where Triton
        and jax-triton are installed; "tpu" on TPU; "xla" elsewhere.
      platform: "cpu", "gpu" or "tpu"; None takes that of JAX's default device.

    Raises:
      ValueError: an unknown backend (the message lists the known ones), or one asked for by name
        that cannot run here.
    """
    check_backend(backend)
    if backend == "triton":
        missing = _missing_for_triton(platform or _default_platform())
        if missing:
            raise ValueError(f"backend 'triton' cannot run here: {missing}; backend='auto' can")
    if backend != "auto":
        return backend
    platform = platform or _default_platform()
    if platform == "gpu":
        return "xla" if _missing_for_triton(platform) else "triton"
    return platform if platform in ("cpu", "tpu") else "xla"


def _default_platform() -> str:
    device = jax.config.jax_default_device
    if device is None:
        platform = jax.default_backend()
    else:
        platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform == "cuda" else platform


def _missing_for_triton(platform: str) -> str | None:
    """Says what keeps Triton from running, or None."""
    if platform != "gpu":
        return f"it needs an NVIDIA GPU, and the platform is {platform!r}"
    for module in ("triton", "jax_triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (pip install 'moe-flax[gpu]')"
    return None
