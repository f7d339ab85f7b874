"""Whether the Triton kernels can run here, and what to install where they cannot."""

import functools
import importlib.metadata
import importlib.util
import re

WORKING = "jax >=0.11.2,<0.12, jax-triton ==0.4.1, triton >=3.8,<3.9 (Python 3.12 or newer)"
_NEEDED = {
    "jax": ((0, 11), (0, 12)),
    "jax-triton": ((0, 4, 1), (0, 5)),
    "triton": ((3, 8), (3, 9)),
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:3])


@functools.cache
def problem() -> str | None:
    """Says which of jax, jax-triton and triton is missing or does not fit, or returns None."""
    for name, (low, high) in _NEEDED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if importlib.util.find_spec(name.replace("-", "_")) is None:
                return (
                    f"{name} is not installed; working set: {WORKING}: pip install 'moe-flax[gpu]'"
                )
            continue
        if not low <= _version(found) < high:
            return (
                f"{name} {found} does not fit; working set: {WORKING}: pip install 'moe-flax[gpu]'"
            )
    return None


def capability_problem(compute_capability: str) -> str | None:
    """Says that a GPU is too old, or returns None."""
    if float(compute_capability) >= 8.0:
        return None
    return f"the GPU has compute capability {compute_capability}; the Triton kernels need 8.0"
