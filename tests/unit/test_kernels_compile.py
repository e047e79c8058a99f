"""The Triton kernels of deep memories compile for an H100, where there is none."""

import json
import os
import subprocess
import sys

import pytest

from tests.snippets import ROOT

SHARED = 227 * 1024
"""Bytes of shared memory that a program can have on an H100."""


@pytest.mark.timeout(600)
def test_each_kernel_compiles_and_fits(tmp_path):
    """The interpreter of the other tests takes programs that the compiler refuses, such as types that do not match."""
    output = tmp_path / "kernels.json"
    words = [sys.executable, "-m", "benchmarks.triton_kernels", "--models", "dla", "memora", "kept"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [*words, "--output", str(output)], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(output.read_text())["kernels"]
    # four of a memory's groups, twice, and six of kept and selected networks
    assert len({kernel["kernel"] for kernel in kernels}) == 14
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        # products run on the tensor cores
        assert kernel["wgmma"] + kernel["mma"] > 0, kernel
