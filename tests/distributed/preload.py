"""Imported once by the process that ranks are forked from, for worlds that start a `Topology`."""

import gc

from megamem.parallel.libraries import prepare_libraries

prepare_libraries()

import torch._dynamo  # noqa: E402, F401  (by torch's optimizers and checkpointing)

import megamem.parallel.megatron  # noqa: E402
import megamem.parallel.topology  # noqa: E402, F401

# what was imported is never garbage: ranks need not search it, which would copy the pages they share
gc.collect()
gc.freeze()
