"""One place where kernels are called, and what is known of the chip they are compiled for."""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import re
import typing as tp

import jax

from moe_flax.varying import varying

_target: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "moe_flax_target", default=None
)


GLUON = (  # in hopper.py, hopper_contraction.py and kept_hopper.py
    "specialised_product_kernel",
    "specialised_contraction_kernel",
    "kept_hopper_kernel",
)
_CORRECTED = ("0.4.1",)  # the releases of jax-triton that `_corrected_jax_triton` knows


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
    def float8(self) -> bool:
        """Whether float8 operands are multiplied as they are."""
        return self.capability >= 89

    @property
    def wgmma(self) -> bool:
        """Whether the warp-specialised Hopper kernels apply."""
        return self.capability == 90 and _corrected_jax_triton()


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


class _CountingLibrary:
    """jax-triton's launcher library, with the warps of `GLUON` kernels counted from their PTX."""

    def __init__(self, library: tp.Any):
        self._library = library

    def __getattr__(self, name: str) -> tp.Any:
        return getattr(self._library, name)

    def TritonKernel(self, name, num_warps, num_ctas, shared_bytes, ptx, *rest):
        if name in GLUON:
            num_warps = int(re.findall(r"\.reqntid\s+(\d+)", ptx)[0]) // 32
        return self._library.TritonKernel(name, num_warps, num_ctas, shared_bytes, ptx, *rest)


class _GluonPasses:
    """A compiler whose passes up to Triton's GPU dialect are those for Gluon."""

    def __init__(self, backend: tp.Any):
        self._backend = backend

    def __getattr__(self, name: str) -> tp.Any:
        return getattr(self._backend, name)

    def make_ttir(self, module, metadata, options, capability):
        return module  # `gluon_to_ttgir` starts from it

    def make_ttgir(self, module, metadata, options, capability):
        return self._backend.gluon_to_ttgir(module, metadata, options, capability)


@functools.cache
def _corrected_jax_triton() -> bool:
    """Has jax-triton compile and launch `GLUON` kernels rightly; returns whether it will.

    jax-triton 0.4.1 sends Gluon kernels through the passes for Triton's own language, which move
    their waits, and takes a launch's threads from ``num_warps``, without the partitions beside the
    first one: these would never start, and the first wait for them for ever. Two names in it are
    replaced by ones that do otherwise for the kernels of these names: its compile function, and
    its reference to the library that makes launches, which reads the threads from the PTX. With
    another jax-triton nothing is touched, and the kernels not used.
    """
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version not in _CORRECTED:
        return False
    import jax_triton.triton_lib as triton_lib

    library: tp.Any = triton_lib.triton_kernel_call_lib
    if not hasattr(library, "TritonKernel"):  # no GPU plugin
        return False
    triton_lib.triton_kernel_call_lib = _CountingLibrary(library)
    compile_ttir = triton_lib.compile_ttir_to_ptx_inplace

    def compile_module(module, backend, options, capability):
        if module.get_entry_func_name() in GLUON:
            backend = _GluonPasses(backend)
        return compile_ttir(module, backend, options, capability)

    triton_lib.compile_ttir_to_ptx_inplace = compile_module
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
