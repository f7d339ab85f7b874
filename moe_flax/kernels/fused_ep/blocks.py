"""Block sizes: what a kernel's buffers take of VMEM, and the largest blocks that fit a chip."""

import dataclasses
import typing as tp

import jax.numpy as jnp

from moe_flax.kernels.fused_ep.ffn import FFN
from moe_flax.kernels.fused_ep.rows import LANES, round_up
from moe_flax.kernels.fused_ep.scratch import vmem_shapes

MIB = 2**20
RESERVED = 6 * MIB  # the compiler's own: spills, the arguments of scalar memory, semaphores
ROWS = (512, 384, 256, 192, 128, 64, 32, 16)
SPREAD = 1.25  # rows of a tile over an expert's mean: random loads vary, a second tile reads again
RECEIVE_BYTES = 1024 * MIB  # HBM that one pass' receive buffer may take, by default


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU core's limits and rates, as the vendor states them.

    Args:
      vmem_bytes: VMEM of a core.
      hbm_bytes_per_second: HBM reads of a core.
      ici_bytes_per_second: what a core sends to all its neighbours together, one way.
      clock: cycles a second.
      bf16_flops: FLOP a second of its MXUs.
      cores: cores that one JAX device stands for; a kernel runs on one of them.
    """

    vmem_bytes: int
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    clock: float
    bf16_flops: float
    cores: int = 1


CHIPS: dict[str, Chip] = {
    "v5e": Chip(128 * MIB, 819e9, 200e9, 1.5e9, 197e12),
    "v5p": Chip(64 * MIB, 2765e9, 600e9, 1.75e9, 229.5e12, cores=2),
    "v6e": Chip(128 * MIB, 1640e9, 448e9, 1.75e9, 918e12),
    "tpu7x": Chip(64 * MIB, 3690e9, 600e9, 2.2e9, 1153e12),
}
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7x": "tpu7x",
    "TPU7": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The sizes that trade VMEM and HBM for speed; None lets the model choose.

    Args:
      rows: rows of an expert that meet one reading of its weights, a multiple of 16.
      hidden: hidden columns of a weight block of the first product, a multiple of 128.
      features: feature columns of a weight block of the second product in each half of a packed
        row, a multiple of 128 that divides the row's words.
      receive_rows: rows of the receive buffer; more rows than it holds take several passes.
    """

    rows: int | None = None
    hidden: int | None = None
    features: int | None = None
    receive_rows: int | None = None


def chip_of(device_kind: str | None) -> str:
    """A device kind as JAX reports it to a name of ``CHIPS``; the smallest core where unknown."""
    return _KINDS.get(device_kind or "", "v5p")


def padded_bytes(shape: tuple[int, ...], dtype: tp.Any) -> int:
    """Bytes of an array in VMEM, where the last two dimensions are filled up to whole tiles."""
    itemsize = jnp.dtype(dtype).itemsize
    *batch, sublanes, lanes = shape
    sublanes = sublanes if sublanes == 1 else round_up(sublanes, 32 // itemsize)
    size = itemsize * sublanes * round_up(lanes, LANES)
    for extent in batch:
        size *= extent
    return size


def vmem_table(ffn: FFN) -> dict[str, int]:
    """Bytes of VMEM, by what takes them; "compiler" is a reserve for the compiler's own."""
    table = {}
    shapes = vmem_shapes(ffn)
    for name, buffer in zip(shapes._fields, shapes, strict=True):
        if buffer is None:
            continue
        buffers = buffer if name in ("wi", "wo") else [buffer]
        table[name] = sum(padded_bytes(*each) for each in buffers if each is not None)
    table["compiler"] = RESERVED
    return table


def vmem_bytes(ffn: FFN) -> int:
    """Bytes of VMEM that the model foresees; the compiler may take the chip's whole."""
    return sum(vmem_table(ffn).values())


def _multiples(total: int, divides: bool) -> list[int]:
    """Block widths worth trying for ``total`` columns, widest first."""
    whole = round_up(total, LANES)
    widths = list(range(LANES, min(whole, 1024) + 1, LANES))
    if divides:
        widths = [width for width in widths if whole % width == 0]
    else:  # no more than a twentieth of the last block's columns beyond the end
        widths = [w for w in widths if round_up(whole, w) <= 1.05 * whole or w == LANES]
    wide = [width for width in widths if width % (2 * LANES) == 0 or width == whole]
    return sorted(wide or widths, reverse=True) + ([LANES] if LANES not in wide and wide else [])


def choose_blocks(
    ffn: FFN,
    given: BlockSizes | None,
    *,
    rows_per_expert: float,
    chip: str,
    max_received: int,
    receive_bytes: int = RECEIVE_BYTES,
) -> tuple[FFN, int]:
    """Fills in rows, hidden_block and feature_block of ``ffn``, and the receive buffer's rows.

    Tiles first: a tile as high as an expert's expected rows reads the weights once. Then the
    widest weight blocks that fit, up to about 8 MiB, past which a copy gains nothing.

    Args:
      ffn: sizes; its blocks are not looked at.
      given: sizes to keep.
      rows_per_expert: rows that an expert gets on average.
      chip: a name of ``CHIPS``.
      max_received: most rows that a device can receive.
      receive_bytes: HBM for the receive buffer.

    Raises:
      ValueError: sizes given that the kernel cannot take, or nothing fits; with the arithmetic.
    """
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} is not known; allowed: {sorted(CHIPS)}")
    given = given or BlockSizes()
    _check_given(ffn, given)
    budget = CHIPS[chip].vmem_bytes
    wanted = min((r for r in ROWS if r >= SPREAD * rows_per_expert), default=ROWS[0])
    heights = [given.rows] if given.rows else [r for r in ROWS if r <= max(wanted, 32)]
    hidden = [given.hidden] if given.hidden else _multiples(ffn.hidden, divides=False)
    features = [given.features] if given.features else _multiples(ffn.words, divides=True)
    tried = []
    for rows in heights:
        fits = []
        for hidden_block in hidden:
            for feature_block in features:
                sized = dataclasses.replace(
                    ffn, rows=rows, hidden_block=hidden_block, feature_block=feature_block
                )
                size = vmem_bytes(sized)
                tried.append((size, sized))
                if size <= budget:
                    fits.append(sized)
        if fits:
            best = max(fits, key=_block_score)
            return best, _receive_rows(best, given, max_received, receive_bytes)
    size, least = min(tried, key=lambda each: each[0])
    parts = ", ".join(f"{name} {part / MIB:.1f}" for name, part in vmem_table(least).items())
    raise ValueError(
        f"fused_ep_moe does not fit VMEM of {chip}: {size / MIB:.1f} MiB at the smallest blocks"
        f" tried (rows {least.rows}, hidden {least.hidden_block}, features {least.feature_block})"
        f" of {budget / MIB:.0f} MiB: {parts} MiB; D={ffn.features}, F={ffn.hidden},"
        f" weights {ffn.weight_dtype}. Shard F over a tensor axis, or give smaller block_sizes"
    )


def _block_score(ffn: FFN) -> tuple[float, ...]:
    """Prefers full MXU columns and blocks up to 8 MiB, then fewer products in one body."""
    shapes = vmem_shapes(ffn)
    wi, wo = (padded_bytes(each.weight[0][1:], ffn.weight_dtype) for each in (shapes.wi, shapes.wo))
    return (
        min(ffn.hidden_block, 256) + min(ffn.halves * ffn.feature_block, 256),
        min(wi, 8 * MIB) + min(wo, 8 * MIB),
        -(wi + wo),
    )


def _receive_rows(ffn: FFN, given: BlockSizes, max_received: int, receive_bytes: int) -> int:
    rows = given.receive_rows or max(receive_bytes // (4 * ffn.words), 1)
    if rows * ffn.words * 4 >= 2**31:
        raise ValueError(
            f"receive_rows={rows} rows of {ffn.words * 4} bytes pass 2**31 bytes, the most that a"
            " semaphore counts; take fewer: the rest goes in further passes"
        )
    return min(rows, max(max_received, 1))


def _check_given(ffn: FFN, given: BlockSizes) -> None:
    for name, value, unit in (
        ("rows", given.rows, 16),
        ("hidden", given.hidden, LANES),
        ("features", given.features, LANES),
        ("receive_rows", given.receive_rows, 1),
    ):
        if value is not None and (value < 1 or value % unit):
            raise ValueError(
                f"block_sizes.{name} must be a positive multiple of {unit}, got {value}"
            )
    if given.features and ffn.words % given.features:
        raise ValueError(
            f"block_sizes.features={given.features} must divide the {ffn.words} words of a packed"
            f" row (D={ffn.features} in {ffn.dtype}); allowed:"
            f" {[w for w in range(LANES, ffn.words + 1, LANES) if ffn.words % w == 0]}"
        )


def scratch_bytes(capacity: int, words: int) -> int:
    """HBM of a pass' receive buffer."""
    return 4 * capacity * words
