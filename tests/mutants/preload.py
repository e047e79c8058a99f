"""Imported once by the process that tests are forked from: libraries, which are not mutated.

What it imports of the product is forgotten before a test runs (`run_pytest`).
"""

import gc

from megamem.hardware import avoid_broken_amx

avoid_broken_amx()

from megamem.parallel.libraries import prepare_libraries  # noqa: E402

prepare_libraries()

import hypothesis  # noqa: E402, F401
import matplotlib.pyplot  # noqa: E402, F401
import pytest  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import scipy.optimize  # noqa: E402, F401
import tokenizers  # noqa: E402, F401
import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402, F401
import transformers  # noqa: E402, F401
import typer.testing  # noqa: E402, F401

gc.collect()
gc.freeze()
