"""Which tile sizes a product runs with: a measured table, and a heuristic for what it lacks."""

import dataclasses
import math

from moe_flax.kernels.grouped_matmul.triton.launch import Chip
from moe_flax.kernels.grouped_matmul.triton.tuned import TABLE


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The fixed configuration of one kernel call.

    Attributes:
      rows, columns, depth: the tile; a fused product has as many columns in each branch.
      warps, stages: per program, and of the software pipeline.
      span: row tiles that share columns before the next columns come.
      programs: per multiprocessor.
      specialised: use the warp-specialised Hopper kernel.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    span: int = 8
    programs: int = 1
    specialised: bool = False

    def unspecialised(self) -> "Tiles":
        """The same tile for Triton's own pipeline, which also takes what is not of 16 bits."""
        return dataclasses.replace(self, warps=8, specialised=False) if self.specialised else self


KINDS = ("fused", "product", "transposed", "summed", "contraction")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A grouped product of operands of 16 or 32 bits, as far as its configuration depends on it.

    Attributes:
      kind: of ``KINDS``: with the activation behind it, plain, by matrices transposed in place, by
        such and summed over branches, or the contraction over rows.
      rows: of all groups.
      groups: G.
      k: summed over (rows of the result's matrices, for a contraction).
      n: columns, of each branch.
      itemsize: bytes of an element.
      branches: matrices a group has.
    """

    kind: str
    rows: int
    groups: int
    k: int
    n: int
    itemsize: int
    branches: int = 1


def shape_class(shape: Shape) -> tuple:
    """What shapes share an entry of the table: sizes within a factor of the square root of two."""
    average = max(shape.rows / max(shape.groups, 1), 1)
    sizes = (round(math.log2(max(size, 1))) for size in (average, shape.k, shape.n))
    return 8 * shape.itemsize, shape.kind, shape.branches, *sizes


def choose(chip: Chip, shape: Shape, height: int | None = None) -> tuple[Tiles, bool]:
    """Tiles, and whether a fused product's rows are gathered first: measured, or else guessed.

    Args:
      chip: the chip.
      shape: of the product.
      height: rows of a tile, where another product has settled them.
    """
    found = TABLE.get((chip.capability, *shape_class(shape)))
    if found is not None:
        tiles, gather_first = Tiles(*found[0]), found[1]
        settled = shape.kind == "contraction" or height in (None, tiles.rows)
        if settled and (not tiles.specialised or _specialised(chip, shape)):
            return tiles, gather_first
    return heuristic(chip, shape, height)


def heuristic(chip: Chip, shape: Shape, height: int | None = None) -> tuple[Tiles, bool]:
    """`choose` without the table."""
    if shape.kind == "contraction":
        return _contraction_tiles(chip, shape.itemsize), False
    height = height or rows_class(shape.rows, shape.groups)
    fused = shape.kind == "fused"
    parts = shape.branches if fused else 1
    depth = 128 // shape.itemsize
    if height < 128:
        return _small(chip, height, depth, parts), False
    if not chip.tma or shape.itemsize > 2:
        return Tiles(128, 128 // parts, depth // 2, 8, 3), False
    # Where a tile is soon done, loads that run ahead into the next one pay.
    soon = shape.rows <= shape.groups * 128
    if fused:
        soon = soon or shape.n < 1024
    elif shape.kind == "summed":
        soon = soon or (shape.n % 256 == 0 and rows_class(shape.rows, shape.groups) == 128)
    else:
        soon = soon or (shape.k < 1024 and shape.n % 256 == 0)
    if soon and _specialised(chip, shape):
        return Tiles(128, 256 // parts, 64, 4, 4, specialised=True), False
    return Tiles(128, 256 // parts, depth, 8, 4), fused


def rows_class(rows: int, groups: int) -> int:
    """The tile height that suits an average group: 16, 32, 64 or 128 rows."""
    average = rows / max(groups, 1)
    if average <= 10:
        return 16
    if average <= 20:
        return 32
    return 64 if average <= 40 else 128


def _small(chip: Chip, height: int, depth: int, branches: int) -> Tiles:
    if not chip.tma:
        return Tiles(height, 128 // branches, depth, 4, 3)
    return Tiles(height, 256 // branches, depth, 4, 4)


def _specialised(chip: Chip, shape: Shape) -> bool:
    """Whether the warp-specialised Hopper kernels take such operands."""
    fits = shape.k % 64 == 0 and shape.k > 64 and shape.n % 8 == 0
    return chip.wgmma and shape.itemsize == 2 and (fits or shape.kind == "contraction")


def _contraction_tiles(chip: Chip, itemsize: int) -> Tiles:
    """Tiles of a contraction: `rows` are summed, `depth` x `columns` are written."""
    if itemsize == 4:
        return Tiles(32, 64, 64, 4, 3)
    if chip.wgmma:
        return Tiles(64, 256, 128, 4, 4, specialised=True)
    if chip.tma:
        return Tiles(64, 256, 128, 8, 4)
    return Tiles(32, 128, 128, 8, 4)


def float8_tiles(chip: Chip, rows: int, groups: int, k: int, n: int, branches: int = 1) -> Tiles:
    """Tiles of a product of 8-bit operands; with branches, fused with the activation."""
    height = rows_class(rows, groups)
    if not chip.tma:
        return Tiles(height, 128 // branches, 64, 4 if height < 128 else 8, 3)
    if height < 128:
        return Tiles(height, 256 // branches, 128, 4, 4)
    if min(k, n) < 1024 and k > 128 and k % 16 == 0 and n % 8 == 0 and chip.wgmma:
        return Tiles(128, 256 // branches, 128, 4, 4, specialised=True)
    return Tiles(128, 256 // branches, 128, 8, 4)


def keeps(rows: int, groups: int) -> bool:
    """Whether quantised matrices are read as stored, not dequantised ahead of the products."""
    return rows <= groups * 128


def kept_tiles(
    chip: Chip, rows: int, groups: int, kinds: tuple[str, str], branches: int, hopper: bool
) -> tuple[Tiles, Tiles]:
    """Tiles of the two products with quantised matrices.

    Args:
      chip: the chip.
      rows: of all groups.
      groups: how many.
      kinds: how each product's scales lie.
      branches: of the first product, which share a tile.
      hopper: whether the operands suit the kernel laid out by hand.
    """
    average = rows / max(groups, 1)
    height = 16 if average <= 12 else 32 if average <= 24 else 64
    if hopper:
        return _kept_hopper(height, kinds[0], branches), _kept_hopper(height, kinds[1], 1)
    if not chip.tma:
        up = Tiles(min(height, 32), 128 // branches, 128, 8, 2)
    else:
        up = Tiles(height, 128 // branches, 128, 4, 4 if height < 64 else 3, programs=2)
    return up, dataclasses.replace(up, columns=128)


def _kept_hopper(height: int, kind: str, branches: int) -> Tiles:
    """Blocks of 128 threads that share a multiprocessor, each with 16 KiB of weights a stage."""
    stages = 2 if height == 64 or (height, kind) == (32, "mxfp4") else 3
    programs = 2 if height == 64 else 3
    return Tiles(height, 128 // branches, 128, 4, stages, programs=programs, specialised=True)
