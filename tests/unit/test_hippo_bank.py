"""The bank of HiPPO matrices: what it shares, keeps in memory and on disk, and refuses."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamem.errors import ConfigError
from megamem.memory.continuous import hippo_bank, matrix_cache
from megamem.memory.continuous.elastic_memory import ElasticMemoryConfig
from megamem.memory.continuous.hippo import kernel, reconstruction, sample_points, transition
from megamem.memory.continuous.hippo_bank import HippoBank, LowerTriangular, MatrixStore, bands, store_bound
from megamem.memory.continuous.hippo_rules import RULES, legs, stepped

CPU = torch.device("cpu")
DOUBLE = {"dtype": torch.float64}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bank(order=6, block=5, samples=4, sampling="uniform", offset=0.5, *, max_bytes=1 << 30, **options):
    return HippoBank(order, block, samples, sampling, offset, store=MatrixStore(max_bytes), **options)


# --- sharing ---


def test_rows_that_stand_together_share_one_matrix():
    made = bank(**DOUBLE)
    P, K = made.update_matrices((10, 10, 10), CPU)
    R = made.reconstruction((10, 10, 10), CPU)
    assert (P.dense().shape, K.shape, R.shape) == ((1, 6, 6), (1, 6, 5), (1, 4, 6))
    assert torch.equal(P.dense()[0], transition(6, 10, 15))
    assert torch.equal(K[0], kernel(6, 10, 15))
    assert torch.equal(R[0], reconstruction(6, 10, sample_points(10, 4, "uniform", 0.5)))
    assert made.update_matrices((10,), CPU)[1] is K


def test_rows_at_different_positions_are_gathered():
    made = bank(**DOUBLE)
    starts = (10, 0, 7, 10)
    P, K = made.update_matrices(starts, CPU)
    R = made.reconstruction(starts, CPU)
    assert (P.dense().shape, K.shape, R.shape) == ((4, 6, 6), (4, 6, 5), (4, 4, 6))
    for row, start in enumerate(starts):
        assert torch.equal(P.dense()[row], transition(6, start, start + 5))
        assert torch.equal(K[row], kernel(6, start, start + 5))
    assert torch.equal(R[0], R[3])
    assert not R[1].any()
    assert not P.dense()[1].any()


def test_transitions_are_shared_by_ratio():
    """Blocks 2 of 5 tokens and of 10 tokens: 10/15 = 20/30. Layers with other samples share both matrices."""
    store = MatrixStore(1 << 30)
    small, large = (HippoBank(6, block, 4, "uniform", 0.5, store=store, **DOUBLE) for block in (5, 10))
    other = HippoBank(6, 5, 3, "exponential", 0.0, store=store, **DOUBLE)
    (P,), K = small.update_matrices((10,), CPU)[0].bands, small.update_matrices((10,), CPU)[1]
    assert large.update_matrices((20,), CPU)[0].bands[0] is P
    assert other.update_matrices((10,), CPU)[0].bands[0] is P
    assert other.update_matrices((10,), CPU)[1] is K
    assert len(store) == 3  # P, and K of both blocks


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"sampling": "uniform", "offset": 0.0}, True),
        ({"sampling": "exponential", "offset": 0.0, "alpha": 0.5}, True),
        ({"sampling": "custom", "offset": 0.0, "samples": 2, "points": (0.3, 0.9)}, True),
        ({"sampling": "exponential", "offset": 0.0}, False),
        ({"sampling": "uniform", "offset": 0.5}, False),
    ],
)
def test_points_at_fixed_fractions_are_one_matrix(options, shared):
    made = bank(**options, **DOUBLE)
    early, late = (made.reconstruction((start,), CPU) for start in (10, 35))
    assert (early is late) is shared
    at = sample_points(35, made.samples, made.sampling, made.offset, made.alpha, made.points)
    torch.testing.assert_close(late[0], reconstruction(6, 35, at), rtol=0, atol=1e-13)
    assert not made.reconstruction((0,), CPU).any()


# --- triangular products ---


@pytest.mark.parametrize("order", [7, 1100, 2070])
def test_bands_multiply_as_the_whole_matrix(order):
    matrix = transition(order, 3, 4)
    cut = LowerTriangular(tuple(band[None] for band in bands(matrix)))
    assert len(cut.bands) == max(1, order // hippo_bank.BAND)
    assert torch.equal(cut.dense()[0], matrix)
    x = random(2, order, 3).requires_grad_()
    weight = random(2, order, 3, seed=1)
    product = cut @ x
    (gradient,) = torch.autograd.grad((product * weight).sum(), x)
    # sums of up to `order` terms in another order
    torch.testing.assert_close(product, matrix @ x, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, matrix.T @ weight, rtol=0, atol=1e-12)


def test_bands_hold_little_more_than_half():
    assert sum(band.numel() for band in bands(torch.empty(4096, 4096))) == 4096**2 * 9 // 16


# --- bounds ---


def test_the_store_keeps_within_its_bytes_and_drops_the_oldest():
    made = bank(max_bytes=2 * 6 * 5 * 8, **DOUBLE)  # two kernels
    kernels = {start: made._kernel(start, CPU)[0] for start in (5, 10)}
    assert made._kernel(5, CPU)[0] is kernels[5]  # now the most recent of the two
    made._kernel(15, CPU)
    assert made.store.nbytes == 2 * 6 * 5 * 8
    assert made._kernel(5, CPU)[0] is kernels[5]
    again = made._kernel(10, CPU)[0]
    assert again is not kernels[10]
    assert torch.equal(again, kernels[10])


def test_a_store_smaller_than_one_matrix_still_answers():
    made, reference = bank(max_bytes=1), bank()
    for starts in [(5, 10, 0), (10,), (5, 10, 0)]:
        (P, K), (P0, K0) = (one.update_matrices(starts, CPU) for one in (made, reference))
        assert torch.equal(P.dense(), P0.dense())
        assert torch.equal(K, K0)
    assert len(made.store) == 1


def test_the_bound_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("MEGAMEM_BANK_GIB", "0.5")
    assert store_bound() == 2**29
    for wrong in ("0", "much", "nan"):
        monkeypatch.setenv("MEGAMEM_BANK_GIB", wrong)
        with pytest.raises(ConfigError, match=f"MEGAMEM_BANK_GIB={wrong}"):
            store_bound()


# --- precision, devices, modes ---


def test_matrices_have_the_working_precision():
    made = bank()
    P, K = made.update_matrices((10,), CPU)
    assert {P.dense().dtype, K.dtype, made.reconstruction((10,), CPU).dtype} == {torch.float32}
    assert torch.equal(K[0], kernel(6, 10, 15).float())


def test_matrices_built_in_inference_mode_can_be_trained_through():
    made = bank(**DOUBLE)
    with torch.inference_mode():
        made.update_matrices((5, 10), CPU)
    P, K = made.update_matrices((5, 10), CPU)
    state = torch.ones(2, 6, 3, dtype=torch.float64, requires_grad=True)
    (P @ state + K @ random(2, 5, 3)).sum().backward()
    assert state.grad is not None


def test_matrices_do_not_follow_the_default_device():
    with torch.device("meta"):
        made = bank(discretization="bilinear")
        assert made.update_matrices((10,), CPU)[1].device == CPU
        assert made.reconstruction((10,), CPU).device == CPU
        assert made.reconstruction((10, 0), torch.device("meta")).is_meta


@pytest.mark.parametrize("sampling", ["uniform", "exponential"])
@pytest.mark.parametrize("start", [0, 1, 2048, 30720])
def test_the_papers_size_is_finite(sampling, start):
    made = bank(540, 2048, 512, sampling)
    P, K = made.update_matrices((start,), CPU)
    R = made.reconstruction((start,), CPU)
    assert (P.dense().shape, K.shape, R.shape) == ((1, 540, 540), (1, 540, 2048), (1, 512, 540))
    assert all(matrix.isfinite().all() for matrix in (*P.bands, K, R))
    assert K.abs().sum() > 0


# --- the time of the first token ---


@pytest.mark.parametrize("rule", ["zoh", *RULES])
@pytest.mark.parametrize("sampling", ["uniform", "exponential"])
def test_a_leading_token_of_zeros_turns_one_time_frame_into_the_other(rule, sampling):
    """Blocks of 5 after one token of zeros at time 0, against `first_token` 1: the same states and samples."""
    of_zeros = {"discretization": rule, **DOUBLE}
    made, first = bank(sampling=sampling, first_token=1, **of_zeros), bank(block=1, **of_zeros)
    shifted = bank(sampling=sampling, **of_zeros)
    zeros, signal = torch.zeros(1, 1, 2, dtype=torch.float64), random(1, 15, 2)
    state, expected = torch.zeros(1, 6, 2, dtype=torch.float64), first.update_matrices((0,), CPU)[1] @ zeros
    for start in range(0, 15, 5):
        block = signal[:, start : start + 5]
        (P, K), (late_P, late_K) = made.update_matrices((start,), CPU), shifted.update_matrices((start + 1,), CPU)
        state, expected = P @ state + K @ block, late_P @ expected + late_K @ block
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        read, late_read = made.reconstruction((start + 5,), CPU), shifted.reconstruction((start + 6,), CPU)
        torch.testing.assert_close(read @ state, late_read @ expected, rtol=0, atol=0)
    without = bank(sampling=sampling, **of_zeros).update_matrices((0,), CPU)[1] @ signal[:, :5]
    assert (without - made.update_matrices((0,), CPU)[1] @ signal[:, :5]).abs().max() > 0.01


def test_a_row_without_a_history_is_read_as_zeros_at_either_time():
    assert not bank(first_token=1).reconstruction((0,), CPU).any()
    assert bank(first_token=1).reconstruction((5,), CPU).any()


# --- approximate rules ---


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("start", "stop"), [(0, 9), (1, 7), (40, 57)])
def test_stepped_matrices_are_the_recurrence(rule, start, stop):
    order = 6
    P, K = stepped(rule, order, start, stop)
    A, B = legs(order)
    state, signal = random(order, 2), random(stop - start, 2, seed=1)
    expected = state
    for k in range(start, stop):
        if k == 0:
            expected = torch.zeros(order, 2, dtype=torch.float64)
            expected[0] = signal[0]
        else:
            expected = RULES[rule](A / k, expected, B / k * signal[k - start])
    scale = max(P.abs().max().item(), K.abs().max().item(), 1.0)
    torch.testing.assert_close(P @ state + K @ signal, expected, rtol=0, atol=1e-12 * scale)
    assert torch.equal(P, P.tril())


@pytest.mark.parametrize("rule", ["backward", "bilinear"])
def test_rules_approach_zero_order_hold_as_time_goes_on(rule):
    """Late in a history a token is a small step: the rules' matrices then differ by its first or second order."""
    errors = [(stepped(rule, 8, t, t + t // 4)[0] - transition(8, t, t + t // 4)).abs().max().item() for t in (64, 256)]
    assert errors[1] < errors[0] / 3.5  # a quarter of the step
    assert errors[1] < 0.1


def test_rules_are_told_apart_in_the_store():
    store = MatrixStore(1 << 30)
    made = {
        rule: HippoBank(6, 5, 4, "uniform", 0.5, discretization=rule, store=store, **DOUBLE).update_matrices((10,), CPU)
        for rule in ("zoh", "backward", "bilinear", "forward")
    }
    assert len({P.dense().sum().item() for P, _ in made.values()}) == 4
    assert torch.equal(made["bilinear"][1][0], stepped("bilinear", 6, 10, 15)[1])


# --- on disk ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMEM_CACHE", str(tmp_path))
    return tmp_path / "matrices"


def test_large_banks_are_built_once(folder, monkeypatch):
    made = bank(1100, 32)
    P, K = made.update_matrices((64,), CPU)
    assert sorted(file.name for file in folder.iterdir()) == [
        "hippo-zoh-K-1100-64-96.safetensors",
        "hippo-zoh-P-1100-2-3.safetensors",
    ]
    monkeypatch.setattr(hippo_bank, "transition", None)
    monkeypatch.setattr(hippo_bank, "kernel", None)
    P1, K1 = bank(1100, 32).update_matrices((64,), CPU)
    assert torch.equal(P.dense(), P1.dense())
    assert torch.equal(K, K1)


def test_places_nobody_asks_for_again_have_no_files(folder):
    made = bank(1024, 8)
    for start in (4, 64 * 8):
        made.update_matrices((start,), CPU)
    assert not folder.exists()
    made.update_matrices((63 * 8,), CPU)
    assert len(list(folder.iterdir())) == 2


def test_small_banks_are_not_written(folder):
    bank().update_matrices((10,), CPU)
    assert not folder.exists()


def test_damaged_files_are_built_again(folder):
    def build():
        return [torch.arange(6.0).view(2, 3)]

    assert torch.equal(matrix_cache.cached("m", build)[0], build()[0])
    path = folder / "m.safetensors"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    stale = load_file(path)
    for damaged in (whole[:-5], bytes(flipped), b"nothing"):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="m.safetensors.*built again"):
            assert torch.equal(matrix_cache.cached("m", build)[0], build()[0])
        assert torch.equal(load_file(path)["0"], build()[0])
    save_file(stale, path)  # as another program would have written it
    with pytest.warns(UserWarning, match="version"):
        matrix_cache.cached("m", build)
    assert [file.name for file in folder.iterdir()] == ["m.safetensors"]


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path, monkeypatch):
    (tmp_path / "matrices").write_text("a file")
    monkeypatch.setenv("MEGAMEM_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="MEGAMEM_CACHE"):
        assert matrix_cache.cached("m", lambda: [torch.ones(1)])[0].item() == 1


def test_no_folder_means_no_files(monkeypatch):
    monkeypatch.setenv("MEGAMEM_CACHE", "")
    assert matrix_cache.cache_folder() is None
    assert matrix_cache.cached("m", lambda: [torch.ones(1)])[0].item() == 1
    monkeypatch.delenv("MEGAMEM_CACHE")
    assert matrix_cache.cache_folder().name == "matrices"


# --- configuration ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": "custom"}, "custom takes points"),
        ({"points": [0.5]}, "others none"),
        ({"sampling": "custom", "points": [0.5, 1.5]}, "less than or equal to 1"),
        ({"sampling": "custom", "points": [0.5], "samples": 2}, "leave samples out"),
    ],
)
def test_bad_points_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ElasticMemoryConfig(**options)
