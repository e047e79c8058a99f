"""Imported once by the process that all ranks are forked from: what costs seconds to import."""

import gc

from megamem.hardware import avoid_broken_amx

avoid_broken_amx()

from megamem.parallel.libraries import prepare_libraries  # noqa: E402

prepare_libraries()

import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401  (by its engine)
import matplotlib.pyplot  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  (by torch's optimizers and checkpointing)

import megamem.cli.main  # noqa: E402
import megamem.training.train  # noqa: E402, F401
from megamem.config.model import ARCHITECTURES, MIXERS  # noqa: E402
from megamem.config.objective import OBJECTIVES  # noqa: E402

# the files of all kinds of mixers, architectures and objectives
for registry in (MIXERS, ARCHITECTURES, OBJECTIVES):
    registry.kinds()

# what was imported is never garbage: ranks need not search it, which would copy the pages they share
gc.collect()
gc.freeze()
