"""Grouped matrix products: rows sorted by group, each group times a matrix of its own."""

from moe_flax.kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
