"""Shared set-up of all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MEGAMEM_CACHE", "")  # tests leave no files behind

from megamem.hardware import avoid_broken_amx

avoid_broken_amx()
