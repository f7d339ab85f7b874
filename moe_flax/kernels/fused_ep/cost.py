"""How long a pass takes, from the compiler's schedule and the chip's rates; and what that decides.

The kernel overlaps products, weights, rows and links, so a pass takes as long as the slowest of
them, and what nothing hides: barriers, the first rows' way and the last rows'. Shares of the
MXUs' rate come from the scheduled bundles of both FFN loops (docs/performance_tpu.md).
"""

import dataclasses
import math

from moe_flax.kernels.fused_ep.blocks import CHIPS
from moe_flax.kernels.fused_ep.rows import LANES, round_up

# Rows of a tile to the share of the MXUs' rate that its schedule reaches on full rows: read off at
# 32, 128 and 256 rows (docs/performance_tpu.md), estimated between and beyond.
MXU_USE = {16: 0.13, 32: 0.26, 64: 0.45, 128: 0.72, 256: 0.79, 512: 0.80}
FUSED_FIXED = 12e-6  # two barriers, sort and gather, the first rows' way: not hidden
BLOCK_CYCLES = 60  # scalar work to start one (source, expert) block's copy, there and back
FLOAT32_PASSES = 6  # of bf16, that a float32 product takes at the highest precision
REPLICATED_FIXED = 15e-6  # two collectives and three kernels, one after another


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a prediction needs to know of a layer and its mesh.

    Args:
      experts: E.
      k: experts of a token.
      features: D.
      hidden: F of one device.
      devices: P, on the expert axis.
      tokens: tokens of one device.
      weight_bytes: bytes of one stored weight.
      branches: 2 with a gate.
      row_bytes: bytes of one feature of a row; 4 means products in float32.
    """

    experts: int
    k: int
    features: int
    hidden: int
    devices: int
    tokens: int
    weight_bytes: int = 2
    branches: int = 2
    row_bytes: int = 2

    @property
    def local_experts(self) -> int:
        return self.experts // self.devices

    @property
    def active_experts(self) -> float:
        """Local experts with rows, expected of even random routing."""
        total = self.tokens * self.devices
        return self.local_experts * (1 - (1 - self.k / self.experts) ** total)

    @property
    def passes(self) -> int:
        """bf16 products that one product takes."""
        return FLOAT32_PASSES if self.row_bytes == 4 else 1

    @property
    def expert_bytes(self) -> int:
        return (self.branches + 1) * self.features * self.hidden * self.weight_bytes


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one pass by what takes them; they overlap but for ``fixed``."""

    products: float
    hbm: float
    ici: float
    fixed: float

    @property
    def seconds(self) -> float:
        return max(self.products, self.hbm, self.ici) + self.fixed


def tile_height(rows: float, limit: int = 512) -> int:
    """The tile that holds ``rows`` rows of an expert."""
    return min((height for height in MXU_USE if height >= min(rows, limit)), default=limit)


@dataclasses.dataclass(frozen=True)
class FusedWork:
    """What one device has to do in one pass of the fused kernel, under even routing.

    Attributes:
      tiles: row tiles, over all active experts.
      run: rows that the code of a tile runs on: the least height that holds its rows.
      flops: of both products, on full tiles, in bf16.
      hbm_bytes: weights once a tile, and rows: gathered, sent, received, read, written, returned,
        received and combined.
      ici_bytes: rows to other devices, one way.
    """

    tiles: float
    run: int
    flops: float
    hbm_bytes: float
    ici_bytes: float


def fused_work(layer: Layer, rows: int | None = None) -> FusedWork:
    """The work of one pass; ``rows`` is the height of a tile, None the one that fits."""
    total = layer.tokens * layer.k
    mean = total / max(layer.active_experts, 1e-9)
    height = rows or tile_height(mean)
    tiles = layer.active_experts * math.ceil(mean / height)
    run = tile_height(mean / math.ceil(mean / height), height)
    wide = round_up(layer.features, 2 * LANES) * layer.row_bytes
    return FusedWork(
        tiles=tiles,
        run=run,
        flops=2 * layer.passes * tiles * run * (layer.branches + 1) * layer.features * layer.hidden,
        hbm_bytes=8 * total * wide + tiles * layer.expert_bytes,
        ici_bytes=total * wide * (layer.devices - 1) / layer.devices,
    )


def predict_fused(layer: Layer, chip: str, rows: int | None = None) -> Prediction:
    """The fused kernel under even routing."""
    rates, work = CHIPS[chip], fused_work(layer, rows)
    return Prediction(
        work.flops / (rates.bf16_flops * MXU_USE[work.run]),
        work.hbm_bytes / rates.hbm_bytes_per_second,
        work.ici_bytes / rates.ici_bytes_per_second,
        FUSED_FIXED + 2 * layer.experts * BLOCK_CYCLES / rates.clock,
    )


def explain_fused(layer: Layer, chip: str, rows: int | None = None) -> list[str]:
    """The arithmetic of `predict_fused`, a line for each of its parts."""
    rates, work, time = CHIPS[chip], fused_work(layer, rows), predict_fused(layer, chip, rows)
    wide = round_up(layer.features, 2 * LANES) * layer.row_bytes
    total = layer.tokens * layer.k
    return [
        f"rows: {layer.tokens} tokens x K {layer.k} = {total} a device,"
        f" {layer.active_experts:.1f} of {layer.local_experts} local experts active,"
        f" {work.tiles:.1f} tiles of {work.run} rows",
        f"products: {2 * layer.passes} x {work.tiles:.1f} x {work.run} x {layer.branches + 1}"
        f" x D {layer.features} x F {layer.hidden} = {work.flops / 1e9:.1f} GFLOP at"
        f" {MXU_USE[work.run]:.0%} of {rates.bf16_flops / 1e12:.0f} TFLOP/s"
        f" = {1e6 * time.products:.0f} us",
        f"HBM: 8 x {total} rows x {wide} B + {work.tiles:.1f} x {layer.expert_bytes / 1e6:.1f} MB"
        f" of weights = {work.hbm_bytes / 1e6:.0f} MB at"
        f" {rates.hbm_bytes_per_second / 1e9:.0f} GB/s = {1e6 * time.hbm:.0f} us",
        f"ICI: {total} rows x {wide} B x {layer.devices - 1}/{layer.devices} ="
        f" {work.ici_bytes / 1e6:.1f} MB each way at {rates.ici_bytes_per_second / 1e9:.0f} GB/s"
        f" = {1e6 * time.ici:.0f} us",
        f"not hidden: {1e6 * FUSED_FIXED:.0f} us + 2 x E {layer.experts} x {BLOCK_CYCLES} cycles"
        f" at {rates.clock / 1e9:g} GHz = {1e6 * time.fixed:.0f} us",
        f"time: max(products, HBM, ICI) + not hidden = {1e6 * time.seconds:.0f} us",
    ]


def predict_replicated(layer: Layer, chip: str) -> Prediction:
    """All tokens on every device, its own experts' products there, and one reduce-scatter.

    Nothing overlaps: the parts' sum is given as ``fixed``.
    """
    rates = CHIPS[chip]
    everyone = layer.tokens * layer.devices
    total = layer.tokens * layer.k
    mean = total / max(layer.active_experts, 1e-9)
    run = tile_height(mean)
    tiles = layer.active_experts * math.ceil(mean / run)
    flops = 2 * layer.passes * tiles * run * (layer.branches + 1) * layer.features * layer.hidden
    row = layer.features * layer.row_bytes
    slots = everyone * min(layer.k, layer.local_experts)  # rows in the grouped products' operands
    products = max(
        flops / (rates.bf16_flops * MXU_USE[run]),
        (tiles * layer.expert_bytes + 6 * slots * row) / rates.hbm_bytes_per_second,
    )
    away = (
        (layer.devices - 1) * layer.tokens * (row + 4 * layer.features)
    )  # float32 on its way back
    return Prediction(
        0.0, 0.0, 0.0, products + away / rates.ici_bytes_per_second + REPLICATED_FIXED
    )


def choose_method(layer: Layer, chip: str) -> str:
    """ "fused" or "replicated", whichever is predicted to be faster."""
    fused, replicated = predict_fused(layer, chip), predict_replicated(layer, chip)
    return "fused" if fused.seconds <= replicated.seconds else "replicated"
