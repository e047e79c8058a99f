"""How Megatron-Core and DeepSpeed are imported."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch

from megamem.parallel.libraries import load_kernels_at_once, prepare_libraries, quiet


def test_functions_decorated_meanwhile_are_compiled_when_called(monkeypatch) -> None:
    made = []

    def compiler(function, **options):
        made.append((function.__name__, options))
        return lambda x: function(x) + 1

    monkeypatch.setattr(torch, "compile", compiler)
    with quiet():

        @torch.compile
        def plain(x: int) -> int:
            return 2 * x

        @torch.compile(dynamic=True)
        def with_options(x: int) -> int:
            return 3 * x

    assert torch.compile is compiler
    assert made == []
    assert [plain(5), plain(6), with_options(5)] == [11, 13, 16]
    assert made == [("plain", {}), ("with_options", {"dynamic": True})]


def test_what_torch_says_of_a_missing_device_is_left_out_meanwhile(caplog) -> None:
    """Its CUDA builds do, at an import, where nvcc is installed; afterwards its words on extensions count."""
    extensions = logging.getLogger("torch.utils.cpp_extension")
    with quiet():
        extensions.warning("No CUDA runtime is found")
    extensions.warning("later")
    assert caplog.messages == ["later"]


def test_a_bf16_engine_prints_nothing_of_the_memory_it_finds(capsys) -> None:
    """DeepSpeed's optimizer calls this with `force` before and after each group of parameters, on every start."""
    prepare_libraries()
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage("before initializing group 0", force=True)
    assert capsys.readouterr().out == ""


def test_kernels_are_loaded_at_once_unless_the_environment_says_otherwise(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    load_kernels_at_once()
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    load_kernels_at_once()
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


@pytest.mark.parametrize("loaded", [False, True])
def test_wandb_cannot_be_imported_by_others(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is there already; afterwards it can be as before."""
    module = type(sys)("wandb")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "wandb", module)
    with quiet():
        if loaded:
            import wandb

            assert wandb is module
        else:
            with pytest.raises(ImportError):
                import wandb
        with quiet():  # within one another too
            pass
    assert sys.modules.get("wandb") is (module if loaded else None)
