"""One place where kernels are called, and what is known of the chip they are compiled for."""

import contextlib
import contextvars
import dataclasses
import functools
import re
import types
import typing as tp

import jax

from moe_flax.varying import varying

_target: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "moe_flax_target", default=None
)


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
        return self.capability == 90 and _count_worker_warps()


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


@functools.cache
def _count_worker_warps() -> bool:
    """Has jax-triton launch the warps that a warp-specialised kernel adds to ``num_warps``.

    jax-triton 0.4.1 launches ``num_warps`` warps, too few for such a kernel; the PTX names the
    right count. Returns whether this jax-triton could be corrected.
    """
    import jax_triton.triton_lib as triton_lib

    library: tp.Any = getattr(triton_lib, "triton_kernel_call_lib", None)
    if not hasattr(library, "TritonKernel"):
        return False

    def make_kernel(name, num_warps, num_ctas, shared_bytes, ptx, *rest):
        threads = re.search(r"\.reqntid\s+(\d+)", ptx)
        if threads:
            num_warps = int(threads.group(1)) // 32
        return library.TritonKernel(name, num_warps, num_ctas, shared_bytes, ptx, *rest)

    names = {n: getattr(library, n) for n in dir(library) if not n.startswith("__")}
    corrected = types.SimpleNamespace(**{**names, "TritonKernel": make_kernel})
    triton_lib.triton_kernel_call_lib = corrected
    return True


def call(kernel, *args, out_type, grid, name, num_warps=4, num_stages=2, **parameters):
    """`jax_triton.triton_call` with one fixed configuration for `chip()`."""
    import jax_triton

    outs = jax_triton.triton_call(
        *args, kernel=kernel, out_type=out_type, grid=grid, name=name, num_warps=num_warps,
        num_stages=num_stages, compute_capability=chip().capability,
        backend_options={"enable_fp_fusion": True}, **parameters,
    )  # fmt: skip
    # Inside jax.shard_map results vary over the axes that any operand varies over.
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))
    return varying(outs, axes)
