"""Pallas' TPU interpreter blocks a thread a device; XLA's pool has one a core unless told."""

import os

os.environ["NPROC"] = "32"
