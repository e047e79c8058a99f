"""How Megatron-Core and DeepSpeed are imported."""

from __future__ import annotations

import logging

import torch

from megamem.parallel.libraries import prepare_libraries, quiet


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
