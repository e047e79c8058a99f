"""What a preflight finds in made-up records, and its parts that need no second process."""

from __future__ import annotations

import io
import itertools
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore

from megamem.errors import MegamemError
from megamem.preflight import collect, run
from megamem.preflight.collect import SharedFolder, driver, free_memory, matmul_rate, versions
from megamem.preflight.findings import LISTED, clock_offsets, disagreements, findings, healthy, slow_links
from megamem.preflight.links import HANGS, hanging, merged, rounds
from megamem.preflight.meeting import LateError, Meeting, within
from megamem.preflight.records import Link, RankFacts, Record, Reduction
from megamem.preflight.report import lines, tables

VERSIONS = {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8", "megamem": "0.1.0"}
CPU = torch.device("cpu")


def facts(rank: int, **changed) -> RankFacts:
    """Of a good rank; two ranks to a host."""
    base = {
        "rank": rank, "host": f"node{rank // 2}", "device": "cpu", "versions": VERSIONS, "bf16": 4e12 + rank * 1e10,
        "fp32": 1e12, "memory": 64 * 2**30, "disk": 100 * 2**30, "folder": None,
    }  # fmt: skip
    return RankFacts(**{**base, **changed})


def link(a: int, b: int, **changed) -> Link:
    """Of a good pair: 10 GB/s within a host, 1 GB/s between hosts."""
    near = a // 2 == b // 2
    return Link(**{"a": a, "b": b, "latency_s": 1e-5, "bandwidth": 1e10 if near else 1e9, **changed})


def record(world: int = 4, ranks: dict | None = None, links: dict | None = None, **changed) -> Record:
    """Of a good job; ranks and links: what is different, by rank and by pair."""
    base = {
        "world": world,
        "folder": "runs",
        "ranks": [facts(rank, **(ranks or {}).get(rank, {})) for rank in range(world)],
        "links": [link(a, b, **(links or {}).get((a, b), {})) for a, b in itertools.combinations(range(world), 2)],
        "reductions": [Reduction(bytes=2**20, seconds=1e-3, bandwidth=1.5e9)],
    }
    return Record(**{**base, **changed})


def told(found: Record) -> list[tuple[str, str]]:
    return [(finding.level, finding.line) for finding in findings(found)]


class TestFindings:
    def test_nothing_is_wrong_with_even_ranks(self):
        assert told(record()) == []
        assert told(record(64)) == []
        assert told(record(1)) == []
        assert healthy([])

    def test_noise_below_the_threshold_is_not_named(self):
        even = record(ranks={1: {"bf16": 3.4e12}}, links={(0, 2): {"bandwidth": 0.85e9}})
        assert told(even) == []

    def test_a_version_that_differs(self):
        ((level, line),) = told(record(ranks={2: {"versions": {**VERSIONS, "torch": "2.12.0"}}}))
        assert level == "error"
        assert line == "torch is 2.12.0 on rank 2 (node1), but 2.13.0 on 3 of 4"

    def test_a_package_that_is_absent(self):
        without = {name: version for name, version in VERSIONS.items() if name != "deepspeed"}
        ((_, line),) = told(record(ranks={3: {"versions": without}}))
        assert line == "deepspeed is absent on rank 3 (node1), but 0.19.8 on 3 of 4"

    def test_devices_may_differ_at_a_price(self):
        ((level, line),) = told(record(ranks={0: {"device": "NVIDIA A100"}}))
        assert (level, line) == ("warning", "device is NVIDIA A100 on rank 0 (node0), but cpu on 3 of 4")

    def test_what_one_host_cannot_say_is_a_warning(self):
        """A host without git."""
        known, unknown = ({"versions": {**VERSIONS, "revision": text}} for text in ("4013fc1", "unknown"))
        ((level, line),) = told(record(ranks={0: known, 1: known, 2: known, 3: unknown}))
        assert (level, line) == ("warning", "revision is unknown on rank 3 (node1), but 4013fc1 on 3 of 4")

    def test_many_that_differ_are_not_all_listed(self):
        other = {rank: {"versions": {**VERSIONS, "torch": "2.12.0"}} for rank in range(20)}
        (finding,) = disagreements(record(64, ranks=other).ranks)
        assert "rank 7 (node3) and 12 more, but 2.13.0 on 44 of 64" in finding.line
        assert "rank 8" not in finding.line

    @pytest.mark.parametrize(("share", "level"), [(0.7, "warning"), (0.4, "error")])
    def test_a_slow_rank(self, share, level):
        ((found, line),) = told(record(ranks={3: {"fp32": share * 1e12}}))
        assert (found, line) == (
            level,
            f"rank 3 (node1): fp32 matrix products run at {share:.0%} of the others' median",
        )

    def test_the_slower_of_two(self):
        """The rank itself is not part of what it is measured by."""
        ((level, line),) = told(record(2, ranks={0: {"bf16": 1e12}}))
        assert level == "error"
        assert "rank 0 (node0): bf16 matrix products run at 25%" in line

    def test_a_device_with_little_memory_left(self):
        ((level, line),) = told(record(ranks={1: {"memory": 20 * 2**30}}))
        assert (level, line) == ("warning", "rank 1 (node0): free memory is 31% of the others' median")

    def test_clocks(self):
        off = {(0, 2): {"clock_s": 3.0, "clock_error_s": 0.5}, (0, 3): {"clock_s": 2.9, "clock_error_s": 0.01}}
        found = record(links=off)
        assert told(found) == [("warning", "the clock of node1 is +2.90 s from that of node0 (to 0.010 s)")]
        assert clock_offsets(found.links, {r.rank: r for r in found.ranks}) == {"node1": (2.9, 0.01)}
        in_doubt = {(0, 2): {"clock_s": 3.0, "clock_error_s": 2.5}, (0, 3): {"clock_s": 3.0, "clock_error_s": 2.1}}
        assert told(record(links=in_doubt)) == []

    def test_folders(self):
        found = told(record(ranks={2: {"folder": "cannot be written (Permission denied)"}}))
        assert found == [("error", "runs: cannot be written (Permission denied) (rank 2 (node1))")]
        bad = {rank: {"folder": "does not show what rank 0 wrote there"} for rank in (1, 2, 3)}
        assert len(told(record(ranks=bad))) == 2, "once for each host"
        bad[0] = {"folder": "cannot be written (Read-only file system)"}
        assert told(record(ranks=bad)) == [
            ("error", "runs: cannot be written (Read-only file system) (rank 0 (node0))")
        ]
        full = record(ranks={2: {"disk": 2**30}, 3: {"disk": 2**30}})
        assert told(full) == [("warning", "runs: 1.0 GiB free on node1; checkpoints and shards need room")]

    def test_a_pair_that_hangs(self):
        hung = record(links={(1, 2): {"error": "send/recv did not end within 10 s", "bandwidth": 0}})
        assert told(hung) == [
            ("error", "rank 1 (node0) and rank 2 (node1): send/recv did not end within 10 s"),
        ]

    def test_a_slow_link_among_its_like(self):
        """A tenth of the speed within a host would be fast between hosts."""
        slow = record(8, links={(0, 1): {"bandwidth": 4e9}, (2, 7): {"bandwidth": 0.7e9}})
        assert told(slow) == [
            ("error", "rank 0 (node0) and rank 1 (node0): the link runs at 40% of the median within a host"),
            ("warning", "rank 2 (node1) and rank 7 (node3): the link runs at 70% of the median between hosts"),
        ]

    def test_a_rank_whose_links_are_slow_is_named_once(self):
        slow = {(min(5, b), max(5, b)): {"bandwidth": 0.3e9} for b in range(8) if b not in (4, 5)}
        ((level, line),) = told(record(8, links=slow))
        assert level == "error"
        assert line == "rank 5 (node2): 6 of its 6 links between hosts run at 30% of the others' median"

    @pytest.mark.parametrize("per_host", [3, 8])
    def test_ranks_of_a_host_that_are_slow_among_themselves_are_all_named(self, per_host):
        """Each link is explained by two ranks."""
        ranks = {rank: facts(rank, host=f"node{rank // per_host}") for rank in range(3 * per_host)}
        links = [
            link(a, b, bandwidth=3e9 if a // per_host == 1 else 1e10)
            for a, b in itertools.combinations(ranks, 2)
            if a // per_host == b // per_host
        ]
        count = per_host - 1
        assert sorted(finding.line for finding in slow_links(links, ranks, "within a host")) == sorted(
            f"rank {rank} (node1): {count} of its {count} links within a host run at 30% of the others' median"
            for rank in range(per_host, 2 * per_host)
        )

    def test_of_three_ranks_the_slow_link_does_not_tell_whose_fault_it_is(self):
        links = [link(0, 2), link(0, 4), link(2, 4, bandwidth=3e8)]
        ranks = {rank: facts(rank) for rank in (0, 2, 4)}
        (finding,) = slow_links(links, ranks, "between hosts")
        assert "rank 2 (node1) and rank 4 (node2): the link runs at 30%" in finding.line

    def test_many_slow_links_are_not_all_listed(self):
        pairs = [(a, b) for a, b in itertools.combinations(range(64), 2) if a // 2 != b // 2][::150]
        found = told(record(64, links={pair: {"bandwidth": 1e8} for pair in pairs}))
        assert len(pairs) > LISTED
        assert len(found) == LISTED + 1
        assert f"{len(pairs) - LISTED} more links between hosts" in found[-1][1]

    def test_what_kept_the_check_from_going_on_is_an_error(self):
        lost = Record(world=2, folder="runs", ranks=[], errors=["rank 1 (host unknown): did not come within 120 s"])
        assert told(lost) == [("error", "rank 1 (host unknown): did not come within 120 s")]
        assert not healthy(findings(lost))

    def test_errors_come_first(self):
        levels = [level for level, _ in told(record(ranks={0: {"bf16": 3e12}, 1: {"fp32": 1e11}}))]
        assert levels == ["error", "warning"]


class TestReport:
    def shown(self, found: Record) -> str:
        text = io.StringIO()
        for part in (*tables(found), *lines(found, findings(found))):
            Console(file=text, width=200).print(part)
        return text.getvalue()

    def test_a_good_job(self):
        text = self.shown(record(8, seconds=12.3))
        for words in (
            "8 of 8 ranks",
            "rank 5 (node2)",
            "4.05",
            "within a host",
            "between hosts",
            "1.5",
            "torch 2.13.0",
        ):
            assert words in text
        assert "nothing is wrong; the check took 12 s" in text

    def test_a_bad_job(self):
        text = self.shown(record(2, ranks={1: {"fp32": 1e11}}, links={(0, 1): {"error": "send/recv [hangs]"}}))
        assert "error: rank 0 (node0) and rank 1 (node0): send/recv [hangs]" in text
        assert "error: rank 1 (node0): fp32" in text
        assert "2 error(s), 0 warning(s)" in text

    def test_a_record_with_nothing_in_it(self):
        text = self.shown(Record(world=2, folder="runs", ranks=[], errors=["rank 1 (host unknown): did not come"]))
        assert text.splitlines()[0] == "error: rank 1 (host unknown): did not come"


class TestPairs:
    @pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 63, 64])
    def test_every_pair_meets_once_in_disjoint_rounds(self, world):
        found = rounds(world)
        assert len(found) == world - 1 + world % 2
        met = [tuple(sorted(pair)) for partners in found for pair in partners.items()]
        assert sorted(met) == sorted(2 * list(itertools.combinations(range(world), 2)))  # each side once
        assert all(partners[partners[rank]] == rank for partners in found for rank in partners)

    def test_the_first_one_s_figures_count_unless_one_finds_fault(self):
        mine, theirs, wrong = link(0, 1, bandwidth=5.0), link(0, 1, bandwidth=7.0), link(2, 3, error="hangs")
        partners = {0: 1, 1: 0, 2: 3, 3: 2}
        assert merged({0: mine, 1: theirs, 2: link(2, 3), 3: wrong}, partners) == [mine, wrong]
        assert merged({1: theirs, 2: wrong}, partners) == [wrong], "a rank that fell silent has no figures"

    def test_a_rank_is_left_out_once_two_pairs_have_hung(self):
        one = [link(0, 1, error="hangs"), link(2, 3)]
        assert hanging(one, HANGS["cpu"]) == set()
        assert hanging([*one, link(1, 2, error="hangs")], HANGS["cpu"]) == {1}

    def test_a_pair_that_hangs_keeps_both_devices_busy(self):
        """The next pair of either would hang for that reason, and be named."""
        assert hanging([link(0, 1, error="hangs"), link(2, 3)], HANGS["cuda"]) == {0, 1}


class TestMeeting:
    def meet(self, world: int, part) -> list:
        """What `part(meeting)` returns on each of `world` ranks, threads of this process."""
        store, results = HashStore(), [None] * world

        def rank(number: int) -> None:
            try:
                results[number] = part(Meeting(store, number, world))
            except MegamemError as error:
                results[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    def test_everybody_hears_everybody(self):
        def part(meeting):
            first = meeting.gather({"rank": meeting.rank}, 10)
            return first, meeting.gather([meeting.rank], 10)

        expected = {rank: {"rank": rank} for rank in range(3)}, {rank: [rank] for rank in range(3)}
        assert self.meet(3, part) == [expected] * 3

    def test_who_does_not_come_is_left_out(self):
        def part(meeting):
            if meeting.rank == 1:
                time.sleep(0.6)
            found = meeting.gather(meeting.rank, 0.2)
            return found, meeting.gather(meeting.rank, 0.2), sorted(meeting.present)

        first, late, last = self.meet(3, part)
        assert first == last == ({0: 0, 2: 2}, {0: 0, 2: 2}, [0, 2])
        assert str(late) == "rank 1 was too late: rank 0 went on without it after 0.2 s"

    def test_without_rank_0(self, monkeypatch):
        monkeypatch.setattr("megamem.preflight.meeting.MARGIN_S", 0.1)
        with pytest.raises(MegamemError, match="rank 0 does not answer for"):
            Meeting(HashStore(), 1, 2).gather(None, 0.1)

    def test_a_stranger_at_the_store_does_not_end_it(self):
        """Who writes in the place of a rank makes it absent; who writes in that of rank 0 is found out."""
        store = HashStore()
        store.set("1/1", b"\xff no JSON")
        assert Meeting(store, 0, 2).gather("here", 0.1) == {0: "here"}
        for raw in (b"\xff", "[]", '{"x": 1}'):
            store.set("1/all", raw)
            with pytest.raises(MegamemError, match="is not its: others reach the port"):
                Meeting(store, 1, 2).gather("here", 0.1)

    def test_time_limits(self):
        assert within(10, lambda: 3) == 3
        assert within(10, lambda: None) is None
        with pytest.raises(KeyError):
            within(10, lambda: {}["a"])
        with pytest.raises(LateError, match=r"did not end within 0\.1 s"):
            within(0.1, lambda: time.sleep(2))


class TestCollect:
    def test_versions(self):
        found = versions(CPU)
        assert {"python", "torch", "deepspeed", "megatron-core", "megamem", "revision"} <= found.keys()
        # of the distribution; the module's own names the build too (2.13.0+cu130) where the wheel does not
        assert torch.__version__.startswith(found["torch"])

    def test_the_driver_as_the_kernel_says_it(self, tmp_path):
        file = tmp_path / "version"
        for kind in ("x86_64", "Open Kernel Module for x86_64"):
            file.write_text(
                f"NVRM version: NVIDIA UNIX {kind} Kernel Module  570.86.15  Thu Jan\nGCC version:  gcc 12.2\n"
            )
            assert driver(file) == "570.86.15"
        assert driver(tmp_path / "none") == "unknown"

    def test_rates(self, monkeypatch):
        """A clock that ticks a millisecond a look: each product takes one."""
        monkeypatch.setattr(collect, "SIZES", {"cpu": 64})
        ticks = itertools.count()
        monkeypatch.setattr(collect.time, "perf_counter", lambda: next(ticks) / 1000)
        assert matmul_rate(CPU, torch.float32) == pytest.approx(2 * 64**3 / 1e-3)

    def test_memory(self):
        assert free_memory(CPU) > 2**20

    def test_a_folder_that_all_see(self, tmp_path):
        folder = tmp_path / "deep" / "runs"
        first, second = SharedFolder(folder, 0), SharedFolder(folder, 1)
        first.offer("t")
        assert first.problem("t") is None
        assert second.problem("t") is None
        first.clear("t")
        assert list(folder.iterdir()) == []
        assert second.free() > 0

    def test_a_folder_of_another_host(self, tmp_path, monkeypatch):
        monkeypatch.setattr(collect, "SEEN_S", 0.2)
        SharedFolder(tmp_path / "a", 0).offer("t")
        (tmp_path / "b").mkdir()
        assert "does not show what rank 0 wrote there" in SharedFolder(tmp_path / "b", 1).problem("t")
        assert "does not show" in SharedFolder(tmp_path / "none", 1).problem("t")
        assert SharedFolder(tmp_path / "none", 1).free() is None

    def test_a_folder_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        shared = SharedFolder(tmp_path / "file" / "runs", 0)
        shared.offer("t")
        assert shared.problem("t") == "cannot be written (Not a directory)"
        shared.clear("t")


def test_a_single_process_checks_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "SECONDS", 0.01)
    monkeypatch.setattr(collect, "SIZES", {"cpu": 64})
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    told: list[Record] = []
    found = run.preflight(tmp_path / "runs", "cpu", 5, told.append)
    assert told == [found]
    assert healthy(findings(found))
    assert (found.world, len(found.ranks), found.links, found.errors) == (1, 1, [], [])
    assert list(Path(tmp_path / "runs").iterdir()) == []


def test_a_device_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = run.preflight(tmp_path, "cuda", 5, lambda found: None)
    (line,) = found.errors
    assert re.match(r"rank 0 \(.+\): --device cuda: local rank 1 on a machine with 1 CUDA device\(s\); ", line)
    assert not healthy(findings(found))
    assert list(tmp_path.iterdir()) == []
