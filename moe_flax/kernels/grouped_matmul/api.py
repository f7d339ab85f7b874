"""`grouped_matmul`: the public function, its checks, its gradients and its choice of backend."""

import contextlib
import dataclasses
import functools
import importlib
import types
import typing as tp

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moe_flax.kernels.backend import resolve_backend
from moe_flax.kernels.batching import one_by_one
from moe_flax.kernels.grouped_matmul.scaled import check_scales, scale_product, scaled_product
from moe_flax.varying import align_varying

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_MAX_ROWS = 2**31 - 1  # row offsets are int32

_MODULES = {
    name: f"moe_flax.kernels.grouped_matmul.{name}"
    for name in ("reference", "cpu", "triton", "tpu", "xla")
}


class Backend(tp.Protocol):
    """What a backend's module defines.

    A branch axis J may stand ahead of the last two axes of the matrices. It stands then also on
    exactly one of the row operands, and is summed where it stands on ``lhs``:

        mk, gkn -> mn        mk, gjkn -> mjn        mjk, gjkn -> mn

    These three are closed under differentiation, so two functions are all that gradients need.
    Both operands have one dtype, ``group_sizes`` is int32 and sums to M at most; sums are float32
    (float64 for float64). Rows past the end are 0 in the product and ignored in the contraction,
    whatever they hold; the contraction of an empty group is exactly 0.

    A module may also define ``expert_ffn`` with the operands of `moe_flax.experts.expert_ffn`
    (checked, ``activation`` resolved, without ``backend``): the whole FFN, gradients included.
    And ``scaled_product``, the product of float8 rows: the operands of `scaled.scale_product` but
    its first.
    """

    def grouped_product(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        transpose_rhs: bool,
        preferred_element_type: DTypeLike,
    ) -> jax.Array:
        """[M, K] x [G, K, N] -> [M, N]; with ``transpose_rhs`` the matrices are [G, N, K]."""
        ...

    def row_contraction(
        self,
        lhs: jax.Array,
        grad: jax.Array,
        group_sizes: jax.Array,
        preferred_element_type: DTypeLike = jnp.float32,
    ) -> jax.Array:
        """[M, K] x [M, N] -> [G, K, N], summed over each group's rows."""
        ...


def load_backend(name: str) -> types.ModuleType:
    """Imports the module of a backend that `resolve_backend` returned.

    Raises:
      ValueError: the module or something it needs is not installed.
    """
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ValueError(f"backend {name!r} cannot run here: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is fixed when a product is traced."""

    backend: str
    transpose_rhs: bool
    out_dtype: tp.Any
    precision: str | None

    def matmul_precision(self) -> tp.ContextManager[None]:
        """The precision asked for, or what the caller's context says."""
        if self.precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.precision)

    def scaled(self, lhs, rhs, group_sizes, lhs_scale, rhs_scale) -> jax.Array:
        """The product of float8 rows; see `scaled.scaled_product`."""
        backend = load_backend(self.backend)
        own = getattr(backend, "scaled_product", None)
        run = own or functools.partial(scale_product, backend.grouped_product)
        with self.matmul_precision():
            return run(
                lhs, rhs, group_sizes, lhs_scale, rhs_scale, self.transpose_rhs, self.out_dtype
            )


def grouped_matmul(
    lhs: Float[Array, "M K"] | Float[Array, "M J K"],
    rhs: Float[Array, "G K N"] | Float[Array, "G J K N"],
    group_sizes: Int[Array, " G"],
    *,
    transpose_rhs: bool = False,
    lhs_scale: Float[Array, "M 1"] | None = None,
    rhs_scale: Float[Array, "..."] | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
) -> Float[Array, "M N"] | Float[Array, "M J N"]:
    """Multiplies each group of consecutive rows by the group's own matrix.

    Rows ``[sum(group_sizes[:g]), sum(group_sizes[:g + 1]))`` of ``lhs`` meet ``rhs[g]``. Rows past
    ``sum(group_sizes)`` give 0 and get a zero gradient, even where they hold NaN; a group without
    rows has an exactly zero gradient. Differentiable in ``lhs`` and ``rhs``, any number of times;
    ``jax.vmap`` runs the batch one after another.

    With four axes ``rhs`` holds J matrices a group: they share an ``lhs`` of two axes and give
    [M, J, N] (gate and up of a gated FFN), or meet an ``lhs`` [M, J, K] and are summed: [M, N].

    With scales the operands are float8_e4m3fn (`moe_flax.quantize.quantize_rows`) and the product
    is that of ``lhs * lhs_scale`` and ``rhs * rhs_scale``, forward only. NVIDIA GPUs from compute
    capability 8.9 multiply float8 as it is where ``transpose_rhs``. Hopper's tensor cores sum in
    fewer bits than float32 has: a relative error of 1.5e-3 at K = 5120, below that of a bfloat16
    result. Elsewhere the values are multiplied as bfloat16, which holds them exactly.

    Args:
      lhs: rows sorted by group, [M, K] or [M, J, K].
      rhs: one matrix a group, [G, K, N] or [G, J, K, N]; the last two axes swapped where
        ``transpose_rhs``.
      group_sizes: rows of each group, [G], any integer dtype; at most M in all.
      transpose_rhs: the matrices are stored [.., N, K].
      lhs_scale: [M, 1] float32, where lhs is float8_e4m3fn.
      rhs_scale: one a column of the product, float32: [G, (J,) 1, N], or [G, (J,) N, 1] where
        ``transpose_rhs``.
      preferred_element_type: dtype of the result; None is the operands' own, bfloat16 for float8.
        Products are summed in float32 (float64 for float64) whatever it is.
      precision: as in ``jax.numpy.matmul``, for float32 on chips that would round it.
      backend: "auto", "reference", "cpu", "triton", "tpu" or "xla"; see `resolve_backend`.

    Returns:
      [M, N], or [M, J, N] where J matrices share the rows.

    Raises:
      ValueError: ranks or sizes that do not fit, or a backend that is unknown or cannot run.
      TypeError: operands or sizes of another dtype than those allowed.
    """
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    scaled = lhs_scale is not None or rhs_scale is not None
    if scaled:
        check_scales(lhs, rhs, lhs_scale, rhs_scale, transpose_rhs)
    dtype = _check(lhs, rhs, group_sizes, transpose_rhs, ("float8_e4m3fn",) if scaled else _DTYPES)
    dtype = jnp.dtype(jnp.bfloat16) if scaled else dtype
    out_dtype = jnp.dtype(dtype if preferred_element_type is None else preferred_element_type)
    if out_dtype.name not in _DTYPES:
        raise TypeError(f"preferred_element_type must be one of {_DTYPES}, got {out_dtype.name}")
    call = _Call(resolve_backend(backend), transpose_rhs, out_dtype, _precision_name(precision))
    load_backend(call.backend)
    if lhs_scale is not None and rhs_scale is not None:
        scales = (lhs_scale.astype(jnp.float32), rhs_scale.astype(jnp.float32))
        operands = align_varying(lhs, rhs, group_sizes.astype(jnp.int32), *scales)
        return scaled_product(call, *operands)
    operands = align_varying(lhs.astype(dtype), rhs.astype(dtype), group_sizes.astype(jnp.int32))
    return _product(call, *operands)


def _check(lhs, rhs, group_sizes, transpose_rhs: bool, dtypes: tuple[str, ...]) -> tp.Any:
    """Raises where the operands do not fit; returns their common dtype."""
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if jnp.dtype(operand.dtype).name not in dtypes:
            raise TypeError(
                f"{name} must have a dtype of {dtypes}, got {operand.dtype}; float8_e4m3fn needs"
                " lhs_scale and rhs_scale"
            )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must have an integer dtype, got {group_sizes.dtype}")
    shapes = f"lhs {lhs.shape}, rhs {rhs.shape}, group_sizes {group_sizes.shape}"
    if (lhs.ndim, rhs.ndim) not in ((2, 3), (2, 4), (3, 4)):
        raise ValueError(
            "grouped_matmul takes [M, K] x [G, K, N], [M, K] x [G, J, K, N] or"
            f" [M, J, K] x [G, J, K, N]; got {shapes}"
        )
    contracted = rhs.shape[-1] if transpose_rhs else rhs.shape[-2]
    if lhs.shape[-1] != contracted:
        axis = -1 if transpose_rhs else -2
        raise ValueError(
            f"axis -1 of lhs ({lhs.shape[-1]}) must equal axis {axis} of rhs ({contracted})"
            f" with transpose_rhs={transpose_rhs}; got {shapes}"
        )
    if lhs.ndim == 3 and lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"axis 1 of lhs and rhs, the branches, must be equal; got {shapes}")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"group_sizes must have shape {rhs.shape[:1]}, one a matrix; got {shapes}")
    if rhs.shape[0] == 0:
        raise ValueError(f"rhs must hold one group or more; got {shapes}")
    if lhs.shape[0] > _MAX_ROWS:
        raise ValueError(f"grouped_matmul takes up to 2**31 - 1 rows, got {shapes}: split the rows")
    return jnp.result_type(lhs, rhs)


def _precision_name(precision: jax.lax.PrecisionLike) -> str | None:
    if precision is None or isinstance(precision, str):
        return precision
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    raise ValueError(f"precision must be None, a string or a jax.lax.Precision, got {precision!r}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)  # outside a jit, a loop would compile at every call
def _product(call: _Call, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    def run(lhs, rhs, group_sizes):
        with call.matmul_precision():
            return load_backend(call.backend).grouped_product(
                lhs, rhs, group_sizes, call.transpose_rhs, call.out_dtype
            )

    return one_by_one(run)(lhs, rhs, group_sizes)


def _product_forward(call, lhs, rhs, group_sizes):
    return _product(call, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _product_backward(call, residuals, grad):
    lhs, rhs, group_sizes = residuals
    grad = grad.astype(lhs.dtype)
    flipped = dataclasses.replace(
        call, transpose_rhs=not call.transpose_rhs, out_dtype=jnp.dtype(lhs.dtype)
    )
    lhs_grad = _product(flipped, grad, rhs, group_sizes)
    first, second = (grad, lhs) if call.transpose_rhs else (lhs, grad)
    rhs_grad = _contraction(flipped, first, second, group_sizes)
    return lhs_grad, rhs_grad, None


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _contraction(call: _Call, lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    def run(lhs, grad, group_sizes):
        with call.matmul_precision():
            return load_backend(call.backend).row_contraction(
                lhs, grad, group_sizes, call.out_dtype
            )

    return one_by_one(run)(lhs, grad, group_sizes)


def _contraction_forward(call, lhs, grad, group_sizes):
    return _contraction(call, lhs, grad, group_sizes), (lhs, grad, group_sizes)


def _contraction_backward(call, residuals, matrices):
    lhs, grad, group_sizes = residuals
    plain = dataclasses.replace(call, transpose_rhs=False)
    flipped = dataclasses.replace(call, transpose_rhs=True)
    return (
        _product(flipped, grad, matrices, group_sizes),
        _product(plain, lhs, matrices, group_sizes),
        None,
    )


_contraction.defvjp(_contraction_forward, _contraction_backward)
