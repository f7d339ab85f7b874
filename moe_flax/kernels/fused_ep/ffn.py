"""The static sizes of a kernel's FFN, and what follows from them."""

import dataclasses

import jax.numpy as jnp

from moe_flax.activations import Activation
from moe_flax.kernels.fused_ep.rows import LANES, round_up, row_words

COLUMNS = 256  # output columns of one product: the width of an MXU


@dataclasses.dataclass(frozen=True)
class FFN:
    """The static side of a kernel.

    Args:
      features: D.
      hidden: F, of this device.
      branches: 2 with a gate, else 1.
      experts: local experts.
      dtype: of the rows and of the products, float32 or bfloat16.
      weight_dtype: as stored.
      activation: the Activation.
      rows: rows of a tile.
      hidden_block: hidden columns of one block of the first product, a multiple of 128.
      feature_block: columns of one block of the second product, in each half of a packed row; it
        divides the row's words.
      wi_window: features that share a scale, 0 where there is none, ``features`` per channel.
      wo_window: hidden columns that share a scale.
      wi_bias: whether the first product has a bias.
      wo_bias: whether the second one has.
    """

    features: int
    hidden: int
    branches: int
    experts: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    activation: Activation
    rows: int
    hidden_block: int
    feature_block: int
    wi_window: int = 0
    wo_window: int = 0
    wi_bias: bool = False
    wo_bias: bool = False

    @property
    def words(self) -> int:
        return row_words(self.features, self.dtype)

    @property
    def halves(self) -> int:
        return 1 if self.dtype.itemsize == 4 else 2

    @property
    def hidden_blocks(self) -> int:
        return -(-self.hidden // self.hidden_block)

    @property
    def feature_blocks(self) -> int:
        return self.words // self.feature_block

    @property
    def wi_scales(self) -> int:
        return -(-self.features // self.wi_window) if self.wi_window else 0

    @property
    def wo_scales(self) -> int:
        return -(-self.hidden // self.wo_window) if self.wo_window else 0

    @property
    def wi_depth(self) -> int:
        """Rows of a block of the first product: D, and zeros up to whole lanes and windows."""
        windows = self.wi_scales * self.wi_window if self.wi_scales > 1 else 0
        return round_up(max(self.features, windows), LANES)

    @property
    def wo_depth(self) -> int:
        windows = self.wo_scales * self.wo_window if self.wo_scales > 1 else 0
        return round_up(max(self.hidden, windows), LANES)

    @property
    def hidden_width(self) -> int:
        """Columns of the hidden rows' buffer."""
        return max(self.hidden_blocks * self.hidden_block, self.wo_depth)

    @property
    def row_variants(self) -> tuple[int, ...]:
        """Tile heights that have code of their own; a tile runs in the least that holds it."""
        return (*tuple(rows for rows in (32, 128, 256) if rows < self.rows), self.rows)


def chunks(width: int) -> list[tuple[int, int]]:
    """(start, width) of the products that cover ``width`` columns."""
    return [(start, min(COLUMNS, width - start)) for start in range(0, width, COLUMNS)]
