"""Shared set-up of all tests."""

import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MEGAMEM_CACHE", "")  # tests leave no files behind

from megamem.hardware import avoid_broken_amx

avoid_broken_amx()


@pytest.fixture
def interruptible():
    """SIGINT is heard in this test and by what it starts: a script has its background jobs ignore it, tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
