"""Mixture-of-experts layers for Flax."""

__version__ = "0.1.0"
