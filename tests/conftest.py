"""Eight CPU devices and quick compilation for every test, unless the environment differs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for flag in (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # tests compile far longer than they compute
):
    if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
