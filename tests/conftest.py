"""Eight CPU devices, quick compilation and the same random cases for every run.

`--hypothesis-profile=explore` draws new cases; `XLA_FLAGS` and `JAX_PLATFORMS` are kept where set.
"""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag in (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # tests compile far longer than they compute
):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

settings.register_profile("repeat", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeat")
