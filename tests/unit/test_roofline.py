"""Operations as a device sees them, and the seconds that the roofline gives them."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks import predicted_time, roofline
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.model.norm import rms_norm
from megamem.planning.activations import Activations
from megamem.planning.joined import as_one
from megamem.planning.ledger import Ledger
from megamem.planning.machines import machine
from megamem.planning.measured_part import Part, Share, measure_part
from megamem.planning.operations import Kind, Operation
from megamem.planning.roofline import Rates, Work, pass_time
from tests.contract.cases import CASES

RATES = Rates(
    matmul={"fp32": 100.0, "bf16": 400.0, "tf32": 200.0},
    attention=50.0,
    attention_backward=25.0,
    memory=10.0,
    kernel=0.5,
    launch=1.0,
)


def seen(run) -> list[Operation]:
    with Ledger() as ledger:
        run()
    return ledger.operations


class TestOperations:
    """By hand: arithmetic of products, bytes of everything, nothing of views."""

    def test_a_product(self):
        a, b = torch.ones(3, 4), torch.ones(4, 5)
        assert seen(lambda: a @ b) == [Operation(Kind.MATMUL_FP32, 2 * 3 * 4 * 5, (4 * 12, 4 * 20, 4 * 15), products=1)]
        a, b = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 4, 5, dtype=torch.bfloat16)
        product = Operation(Kind.MATMUL_BF16, 2 * 2 * 3 * 4 * 5, (2 * 24, 2 * 40, 2 * 30), products=2)
        assert seen(lambda: torch.bmm(a, b)) == [product]

    def test_views_take_time_of_the_host(self):
        a = torch.ones(3, 4)
        (found,) = seen(lambda: a.mT[1:].neg())
        assert found == Operation(Kind.ELEMENTWISE, 0, (4 * 9, 4 * 9), views=2)
        rates = RATES.model_copy(update={"view": 7.0})
        assert pass_time(Work.of([found]), rates).total == 1.0 + 2 * 7.0

    def test_functions_count_their_results(self):
        a = torch.ones(3, 4, requires_grad=True)
        b = torch.ones(3, 4)
        forward, backward, *_ = seen(lambda: F.silu(a).backward(b))
        assert forward == Operation(Kind.ELEMENTWISE, 0, (4 * 12,) * 2, functions=12)
        assert backward == Operation(Kind.ELEMENTWISE, 0, (4 * 12,) * 3, functions=12)
        b = torch.ones(6)
        assert seen(lambda: b.exp_()) == [Operation(Kind.ELEMENTWISE, 0, (4 * 6,) * 2, functions=6)]

    def test_views_and_memory_without_values_are_nothing(self):
        a = torch.ones(3, 4)
        assert seen(lambda: (a.mT, a[1:], a.view(12), a.expand(2, 3, 4), a.detach(), torch.empty(7))) == []

    def test_a_number_that_stands_for_many_moves_once(self):
        a, b = torch.ones(3, 4), torch.ones(4).expand(3, 4)
        assert seen(lambda: a * b) == [Operation(Kind.ELEMENTWISE, 0, (4 * 12, 4 * 4, 4 * 12))]

    def test_what_is_changed_in_place_is_read_and_written(self):
        a, b = torch.ones(6), torch.ones(6)
        assert seen(lambda: a.add_(b)) == [Operation(Kind.ELEMENTWISE, 0, (4 * 6,) * 3)]

    @pytest.mark.parametrize(("causal", "pairs"), [(False, 2 * 3 * 8 * 8), (True, 2 * 3 * 8 * 8 / 2)])
    def test_attention(self, causal, pairs):
        """Scores and sums of values; then scores anew, and gradients of values, shares, queries and keys."""
        q = torch.ones(2, 3, 8, 16, requires_grad=True)
        forward, *others = seen(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward())
        backward = next(operation for operation in others if operation.kind == Kind.ATTENTION_BACKWARD)
        assert (forward.kind, forward.flops) == (Kind.ATTENTION, 2 * pairs * 2 * 16)
        assert backward.flops == 2 * pairs * 5 * 16

    @pytest.mark.parametrize(("kernels", "of_norm"), [("separate", 6), ("cuda", 1), ("compiled", 1)])
    def test_what_a_device_runs_as_one_kernel(self, kernels, of_norm):
        """Norms on CUDA, rotations and gates where they are compiled: operands and results move once."""
        model = CASES[0].model()
        whole, one = (
            measure_part(Part(model, torch.float32, range(1), None, kind), 1, False, Share(2, 1))[0]
            for kind in ("separate", kernels)
        )
        norms, others = 2, 3 if kernels == "compiled" else 0  # rotations of queries and keys, a gate
        saved = norms * (6 - of_norm)
        assert len(whole.work.forward.kinds) - len(one.work.forward.kinds) >= saved
        assert (len(one.work.forward.kinds) < len(whole.work.forward.kinds) - saved) == bool(others)
        assert one.work.forward.flops.sum() == whole.work.forward.flops.sum()
        assert one.work.backward.flops.sum() == whole.work.backward.flops.sum()
        assert one.kept <= whole.kept

    @pytest.mark.parametrize(
        ("precision", "kind", "times"),
        [("tf32", Kind.MATMUL_TF32, 1), ("tf32x3", Kind.MATMUL_TF32, 3), ("ieee", Kind.MATMUL_FP32, 1)],
    )
    def test_deep_memories_by_kernels(self, precision, kind, times):
        """All products of 16 inner chunks of T = 16 tokens, D = 24 channels and I = 96 inner units, by kernel.

        Products T D I: to write z, W1 h, W1^T r, and the outer products of W's and S's two matrices; back through
        that, of W and S each, four through the outer products and two that the reads hand on, then through the tokens
        W1 _back, W1^T _y, W2^T _z and an outer product for each. To read, one with each matrix of W and S; back through
        that z anew, and one more with each. Products T T among the tokens of an inner chunk: to read D + I with each
        matrix, on the way back those of z anew, I for h h_i, and two of D + I for each matrix. 24 channels are filled
        up to 32.
        """
        model = ModelConfig.model_validate(
            {
                "layers": 1, "hidden_size": 48, "heads": 2, "vocab_size": 32, "chunk_size": 256,
                "mixer": {"kind": "titans", "inner_chunk": 16},
                "deep_memory_kernel": "triton", "deep_memory_precision": precision,
            }
        )  # fmt: skip
        (found,) = measure_part(Part(model, torch.float32, range(1), None, "cuda"), 1, False, Share(2, 1))
        rows_heads, chunks = 2 * 2, 16
        product, scores = 16 * 24 * 96, 16 * 16
        write, read = 7 * product, 4 * product + scores * 2 * (24 + 96)
        back = 6 * product + scores * (5 * 24 + 6 * 96)
        for work, kernels in (
            (found.work.forward, [(write, 1), (read, chunks)]),
            (found.work.backward, [(write, 1), (back, chunks), (18 * product, 1)]),
        ):
            ours = work.programs > 0
            assert set(work.kinds[ours]) == {kind}
            assert list(work.programs[ours]) == [rows_heads * many for _, many in kernels]
            one = 2 * times * 32 / 24 * rows_heads * chunks
            assert list(work.flops[ours] / one) == pytest.approx([each for each, _ in kernels])
            # 96 inner units are three blocks, which programs that write may share; they meet once an inner chunk
            assert list(work.divisible[ours]) == [1 if many > 1 else 3 for _, many in kernels]
            assert list(work.meetings[ours]) == [0 if many > 1 else chunks for _, many in kernels]
        # the gradients of keys and of the shares that a token's step and momentum have, and of an inner chunk's
        (terms,) = work.terms[work.terms > 0]
        assert terms == 4 * rows_heads * chunks * (16 * (24 + 2) + 3)

    @pytest.mark.parametrize(("products", "kind"), [("bf16", Kind.MATMUL_BF16_BLOCKS), ("fp32", Kind.MATMUL_TF32)])
    @pytest.mark.parametrize("combine", ["grm", "ssc"])
    def test_kept_networks_by_kernels(self, combine, products, kind):
        """Of each pair of a query and a kept network two products of D I to answer, five and four on the way back.

        Four segments of 128 tokens are written and read at the same time; segment i reads the i before it: 0 + 1 + 2
        + 3 blocks of queries. With `ssc` there is room for one network of each query, and half a block of
        each of the four networks. 24 channels are filled up to 32, I = 96.
        """
        dtype = torch.bfloat16 if products == "bf16" else torch.float32
        memory = {"kind": "dla", "inner_chunk": 16}
        model = ModelConfig.model_validate(
            {
                "layers": 1, "hidden_size": 48, "heads": 2, "vocab_size": 32, "chunk_size": 512,
                "mixer": {"kind": "memory_caching", "memory": memory, "segment": 128, "combine": combine, "top_k": 1},
                "deep_memory_kernel": "triton",
            }
        )  # fmt: skip
        (found,) = measure_part(Part(model, dtype, range(1), None, "cuda"), 1, False, Share(2, 1))
        # FP32 queries are answered by the half of them
        queries = (0 + 1 + 2 + 3) * 128 if combine == "grm" else 512 + 4 * (128 if products == "bf16" else 64) / 2
        one = 2 * 2 * 2 * queries * 32 * 96
        forward, backward = found.work
        # kept networks answer last, and come first on the way back
        last, first = np.flatnonzero(forward.programs)[-1:], np.flatnonzero(backward.programs)[:2]
        assert {*forward.kinds[last], *backward.kinds[first]} == {kind}
        assert [*forward.flops[last] / one, *backward.flops[first] / one] == pytest.approx([2, 5, 4])
        if combine == "grm":
            # the last kernel reads queries, what the other one has left for each network, and matrices, whose
            # gradients it writes
            vectors, matrices = (1 + 4) * 512 * 24 * dtype.itemsize, 2 * 4 * 96 * 24 * 4
            assert backward.moved[first[1]] == 2 * 2 * (vectors + 2 * matrices)

    def test_gradients_of_joined_kernels_are_the_functions(self):
        x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
        exact = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), (x, weight))
        found = torch.autograd.grad(as_one(rms_norm)(x, weight, 1e-5).square().sum(), (x, weight))
        for here, there in zip(found, exact, strict=True):
            assert torch.equal(here, there)


class TestRoofline:
    """Seconds by hand."""

    def test_the_slowest_of_three(self):
        work = Work.of(
            [
                Operation(Kind.MATMUL_FP32, 300.0, (10.0,)),  # 3 s of arithmetic, 1 s of bytes
                Operation(Kind.MATMUL_BF16, 300.0, (10.0,)),  # 0.75 and 1
                Operation(Kind.ATTENTION, 100.0, (5.0,)),  # 2 and 0.5
                Operation(Kind.ATTENTION_BACKWARD, 100.0, (5.0,)),  # 4 and 0.5
                Operation(Kind.ELEMENTWISE, 0.0, (1.0,)),  # 0.1 of bytes: the smallest kernel
            ]
        )
        assert asdict(pass_time(work, RATES)) == {"products": 3.0, "attention": 6.0, "memory": 1.0, "launches": 0.5}

    def test_a_host_that_is_late(self):
        """Ten small operations: 5 s of the device, 10 s of the host, which a device waits for."""
        work = Work.of([Operation(Kind.ELEMENTWISE, 0.0, (1.0,))] * 10)
        assert pass_time(work, RATES).total == pytest.approx(10.0)

    def test_a_core_does_one_after_the_other(self):
        """It adds up launches, bytes and arithmetic; functions have a rate, and small products less than large ones.

        300 of 100 a second take 3 s, and twice that for matrices of the side at which half the rate is reached.
        """
        rates = RATES.model_copy(update={"ahead": False, "kernel": 0.0, "functions": 20.0, "half_rate_side": 16.0})
        work = Work.of(
            [
                Operation(Kind.MATMUL_FP32, 300.0, (10.0,)),  # 3 s of arithmetic, 1 s of bytes
                Operation(Kind.MATMUL_FP32, 300.0, (10.0,), products=300 / 2 / 16**3),  # 6 and 1
                # 1 and 1: its rate has no such side
                Operation(Kind.MATMUL_BF16, 400.0, (10.0,), products=400 / 2 / 16**3),
                Operation(Kind.ATTENTION, 100.0, (5.0,)),  # 2 and 0.5
                Operation(Kind.ELEMENTWISE, 0.0, (5.0,), functions=10.0),  # 0.5 and 0.5
            ]
        )
        assert asdict(pass_time(work, rates)) == {"products": 10.0, "attention": 2.0, "memory": 4.5, "launches": 5.0}

    def test_a_kernel_of_few_programs(self):
        """300 of 200 a second take 1.5 s; on 2 of 4 multiprocessors 3 s, and 5 programs take two turns of 4."""
        rates = RATES.model_copy(update={"multiprocessors": 4})
        for programs, seconds in ((0, 1.5), (4, 1.5), (2, 3.0), (5, 1.5 * 8 / 5)):
            work = Work.of([Operation(Kind.MATMUL_TF32, 300.0, (1.0,), programs)])
            assert pass_time(work, rates).products == pytest.approx(seconds)

    def test_programs_that_share_what_one_could_do(self):
        """On 4 multiprocessors one program of 4 blocks is four, one of 6 blocks three, as they have as many each.

        300 of 200 a second take 1.5 s with all, and 4 meetings four times 0.25 s. Each of four parts writes terms of 8
        bytes, which are read, and written once more as sums: 72 bytes, where one alone would write 8.
        """
        rates = RATES.model_copy(update={"multiprocessors": 4, "kernel": 0.25, "launch": 0.0})
        shared = Operation(Kind.MATMUL_TF32, 300.0, (1.0,), 1.0, divisible=4.0, meetings=4.0)
        assert pass_time(Work.of([shared]), rates).total == pytest.approx(1.5 + 4 * 0.25)
        in_three = shared._replace(divisible=6.0)
        assert pass_time(Work.of([in_three]), rates).total == pytest.approx(1.5 * 4 / 3 + 4 * 0.25)
        whole = shared._replace(divisible=1.0, terms=8.0)
        assert pass_time(Work.of([whole]), rates).total == pytest.approx(6.0)
        terms = shared._replace(terms=8.0, flops=0.0)
        assert pass_time(Work.of([terms]), rates).total == pytest.approx((1 + 2 * 4 * 8) / RATES.memory + 4 * 0.25)

    def test_nothing_takes_no_time(self):
        assert pass_time(Work.of([]), RATES).total == 0.0


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.kind in ("local_attention", "delta_net", "memory_caching")],
    ids=lambda c: c.id,
)
def test_other_shares_are_interpolated(case):
    """All heads and 7 rows, from a half of the heads with 2 rows and a quarter with 5: within a hundredth."""
    model = case.model(heads=8 * case.queries_per_key)
    share = Share(7, 1)
    predicted = Activations(model, "fp32", 2).layer_work(0, share)
    measured = [chunk.work for chunk in measure_part(Part(model, torch.float32, range(1), None), 2, False, share)]
    for here, there in zip(predicted, measured, strict=True):
        for work, exact in zip(here, there, strict=True):
            assert len(work.kinds) == len(exact.kinds)
            assert work.flops.sum() == pytest.approx(exact.flops.sum(), rel=0.01)
            assert work.moved.sum() == pytest.approx(exact.moved.sum(), rel=0.01)


def test_devices_are_known_by_name_or_file(tmp_path: Path):
    h100 = machine("h100", 8)
    assert np.array_equal(
        h100.reached.flops()[[Kind.MATMUL_FP32, Kind.MATMUL_BF16]],
        [h100.reached.matmul["fp32"], h100.reached.matmul["bf16"]],
    )
    own = tmp_path / "own.yaml"
    own.write_text(f"{h100.model_dump_json()}")
    assert machine(str(own), 8) == h100
    own.write_text(h100.model_copy(update={"memory": -1.0}).model_dump_json())
    with pytest.raises(ConfigError, match=r"own\.yaml: memory: .*greater than 0"):
        machine(str(own), 8)
    own.write_text(h100.model_dump_json().replace('"fp32":', '"fp64":'))
    with pytest.raises(ConfigError, match=r"own\.yaml: reached\.matmul\.fp32: "):
        machine(str(own), 8)
    with pytest.raises(
        ConfigError, match=r"--device .h1000. is not known; one of h100, h200, a100, cpu, or FILE\.yaml"
    ):
        machine("h1000", 8)


class TestBenchmarks:
    """They run; their shares are shares."""

    def test_predicted_and_measured_time(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        threads = torch.get_num_threads()
        options = ["--quick", "--turns", "1", "--only", "local attention", "DLA"]
        predicted_time.main([*options, "--output", str(tmp_path / "found.json")])
        torch.set_num_threads(threads)
        found = json.loads((tmp_path / "found.json").read_text())["models"]
        assert list(found) == ["local attention", "DLA"]
        for one in found.values():
            assert sum(one["parts"].values()) == pytest.approx(one["predicted"])
            assert one["measured"]["mean"] > 0
        assert "| DLA |" in capsys.readouterr().out

    def test_the_table_of_models(self, tmp_path: Path):
        output = tmp_path / "found.json"
        roofline.main(["--models", "transformer-760m", "--rows", "1", "--compile", "--output", str(output)])
        (one,) = json.loads(output.read_text())["models"].values()
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert 0 < one["mfu"] < 1
