"""Law 7: BF16 stays near float64 over a long stream and does not get worse along it."""

import torch

from megamem.memory.base import Growing, state_tensors
from tests.contract.case import CHUNK
from tests.contract.choices import Choices
from tests.contract.driver import CPU, make, one_grid, within

CHUNKS = 96
ROWS = 4


def test_bfloat16_follows_float64_over_a_long_stream(case):
    """Both get the same BF16 weights and inputs, so that only the mixer's own arithmetic differs.

    What float64 chose (top-k) is chosen again: another choice is no rounding error. How often BF16 would have chosen
    otherwise is reported.
    """
    low = make(case, "mixer", torch.bfloat16)
    high = make(case, "mixer", torch.bfloat16).double()
    generator = torch.Generator().manual_seed(11)
    states = [s.initial_states(ROWS, CPU, d) for s, d in ((low, torch.bfloat16), (high, torch.float64))]
    errors, sizes, agreements = [], [], []
    for i in range(CHUNKS):
        x = torch.randn(CHUNK, ROWS, low.mixer.sizes["hidden"], generator=generator).bfloat16()
        where = one_grid(ROWS).chunk(i * CHUNK)
        with torch.no_grad():
            with Choices() as made:
                exact, states[1], _ = high(x.double(), states[1], where)
            with Choices(made.indices) as replayed:
                ours, states[0], _ = low(x, states[0], where)
        agreements += replayed.agreements
        assert ours.dtype == torch.bfloat16
        assert all(torch.isfinite(tensor).all() for tensor in (ours, *state_tensors(states[0])))
        errors.append((ours.double() - exact).norm().item())
        sizes.append(exact.norm().item())
    if agreements:
        # both compare products of rounded vectors: only keys within 2^-9 of the border of the choice change sides
        within("7 BF16: choices that differ", 1 - sum(agreements) / len(agreements), 1e-2)
    # BF16 rounds to 2^-9 = 2e-3 relative; query, key, value, weights and output each add about that much
    relative = [error / size for error, size in zip(errors, sizes, strict=True)]
    within("7 BF16: relative error, mean of the stream", sum(relative) / CHUNKS, 2e-2)
    # an output that averages hundreds of independent tokens cancels to a third of its size, its error less so
    within("7 BF16: relative error, worst chunk", max(relative), 4e-2)
    # no drift: rounding is made anew in each chunk and not accumulated; the rest is chance over 32 chunks. Absolute
    # errors, since sizes change along the stream
    third = CHUNKS // 3
    within("7 BF16: late over early error", sum(errors[-third:]) / sum(errors[1 : third + 1]), 1.25)


def test_declared_float32_tensors_stay_float32(case):
    low = make(case, "mixer", torch.bfloat16)
    states = low.initial_states(1, CPU, torch.bfloat16)
    x = torch.randn(2 * CHUNK, 1, low.mixer.sizes["hidden"], generator=torch.Generator().manual_seed(1)).bfloat16()
    for at in range(2 * CHUNK):
        _, states, _ = low(x[at : at + 1], states, one_grid(1).chunk(at))
        for name, spec in low.mixer.specs.items():
            if not isinstance(spec, Growing):
                assert states["layers.0"][name].dtype == spec.torch_dtype(torch.bfloat16), name
