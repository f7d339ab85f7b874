"""One place where kernels are called, and what is known of the chip they are compiled for."""

import contextlib
import contextvars
import dataclasses
import functools
import typing as tp

import jax

_target: contextvars.ContextVar[int | None] = contextvars.ContextVar("moe_flax_target", default=None)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a configuration depends on: compute capability (90 for 9.0) and multiprocessors."""

    capability: int
    multiprocessors: int

    @property
    def tma(self) -> bool:
        """Whether tiles can be loaded by the tensor memory accelerator."""
        return self.capability >= 90

    @property
    def wgmma(self) -> bool:
        """Whether the warp-specialised Hopper kernels apply."""
        return self.capability == 90


_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 170}


@contextlib.contextmanager
def compile_for(capability: int) -> tp.Iterator[None]:
    """Lowers the kernels traced inside for a compute capability, with or without such a GPU."""
    token = _target.set(capability)
    try:
        yield
    finally:
        _target.reset(token)


@functools.cache
def _local_chip() -> Chip:
    device = jax.local_devices(backend="cuda")[0]
    capability = int(float(device.compute_capability) * 10 + 0.5)
    cores = getattr(device, "core_count", None) or _MULTIPROCESSORS.get(capability, 132)
    return Chip(capability, int(cores))


def chip() -> Chip:
    """The chip that kernels are compiled for: `compile_for`'s, else the first local GPU."""
    capability = _target.get()
    if capability is None:
        return _local_chip()
    return Chip(capability, _MULTIPROCESSORS.get(capability, 132))


def call(kernel, *args, out_type, grid, name, num_warps=4, num_stages=2, **parameters):
    """`jax_triton.triton_call` with one fixed configuration for `chip()`."""
    import jax_triton

    return jax_triton.triton_call(
        *args, kernel=kernel, out_type=out_type, grid=grid, name=name, num_warps=num_warps,
        num_stages=num_stages, compute_capability=chip().capability,
        backend_options={"enable_fp_fusion": True}, **parameters,
    )  # fmt: skip
