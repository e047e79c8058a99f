"""How Megatron-Core and DeepSpeed are imported."""

from __future__ import annotations

import torch

from megamem.parallel.libraries import quiet


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
