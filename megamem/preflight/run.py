"""The preflight check as one rank runs it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megamem.costs.devices import device_name
from megamem.preflight.collect import SharedFolder, free_memory, matmul_rate, versions
from megamem.preflight.links import SETUP_S, measure_links, measure_reductions
from megamem.preflight.meeting import LateError, Meeting, within
from megamem.preflight.records import RankFacts, Record

ARRIVE_S = 120.0
"""Seconds by which others may come later than rank 0: many processes that import torch from one disk take minutes."""
FACTS_S = 120.0
"""Time limit of everything that a rank measures by itself; where all is well it takes seconds."""
GROUP_S = 3600.0
"""Time limit of the process group; a collective that gives up closes all connections, so it must not be reached."""


def preflight(folder: Path, device: str | None, limit_s: float, report: Callable[[Record], None]) -> Record:
    """Check this job and return the record. All ranks call it and get the same record, but for times of all-reduces.

    Args:
        folder: where runs are to be written.
        device: `cpu`, `cuda` or None for CUDA where there is one.
        limit_s: seconds that a pair of ranks, or an all-reduce, may take.
        report: called on rank 0 with the record. Nobody returns before: a launcher ends all ranks with the first.

    Raises: MegamemError if this rank was left out.
    """
    begun = time.monotonic()
    chosen = _device(device)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record, shared = Record(world=world, folder=str(folder), ranks=[]), SharedFolder(folder, rank)
    meeting = Meeting(_store() if world > 1 else HashStore(), rank, world)
    _check_job(record, meeting, chosen, shared, limit_s)
    record.seconds = time.monotonic() - begun
    if rank == 0:
        report(record)
    meeting.gather(None, FACTS_S)
    return record


def _device(wanted: str | None) -> torch.device | str:
    """Return this rank's device, or what is wrong with it, which a meeting reports: ranks that end report nothing."""
    if wanted == "cpu" or not (wanted or torch.cuda.is_available()):
        return torch.device("cpu")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        return (
            f"--device cuda: local rank {local} on a machine with {there} CUDA device(s); start at most one process "
            "per device, or use --device cpu"
        )
    try:
        torch.cuda.set_device(local)
    except Exception as error:  # of a device that is occupied or broken; torch raises what it likes
        return f"CUDA device {local} cannot be used: {_message(error)}"
    return torch.device("cuda", local)


def _store() -> Store:
    """Return the launcher's store."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=ARRIVE_S)))
    return store


def _check_job(
    record: Record, meeting: Meeting, device: torch.device | str, shared: SharedFolder, limit_s: float
) -> None:
    """Fill in the record, as far as all ranks answer. device: of this rank, or what is wrong with it."""
    # who is there
    hosts = meeting.gather(socket.gethostname(), ARRIVE_S)
    if _lost(record, meeting, hosts, f"did not come within {ARRIVE_S:g} s"):
        return
    # what each rank finds out by itself
    token = meeting.gather(secrets.token_hex(4), FACTS_S)[0]
    shared.offer(token)
    meeting.gather(None, FACTS_S)  # rank 0's file is there, and all compute at the same time
    found = device if isinstance(device, str) else _facts(meeting.rank, device, shared, token)
    reports = meeting.gather(found if isinstance(found, str) else found.model_dump(), FACTS_S)
    shared.clear(token)
    record.ranks = [
        RankFacts.model_validate(facts) for _, facts in sorted(reports.items()) if not isinstance(facts, str)
    ]
    record.errors += [f"rank {rank} ({hosts[rank]}): {line}" for rank, line in reports.items() if isinstance(line, str)]
    silent = _lost(record, meeting, hosts, f"did not say what it found within {FACTS_S:g} s")
    if silent or record.errors or record.world == 1 or isinstance(device, str):
        return
    # the process group, then every pair, then all ranks together
    problems = meeting.gather(_join(meeting, device), ARRIVE_S)
    record.errors += [f"rank {rank} ({hosts[rank]}): {problem}" for rank, problem in problems.items() if problem]
    if _lost(record, meeting, hosts, "did not join the process group") or record.errors:
        return
    limit_s += SETUP_S[device.type]
    record.links = measure_links(meeting, device, limit_s)
    if _lost(record, meeting, hosts, "fell silent while pairs exchanged tensors"):
        return
    if any(link.error for link in record.links):
        record.errors.append("all-reduce was not measured, since not all pairs of ranks can talk")
        return
    wrong: str | None = None
    try:
        record.reductions = measure_reductions(record.world, device, limit_s)
    except LateError as late:
        wrong = f"all-reduce over all ranks {late}"
    except RuntimeError as error:
        wrong = f"all-reduce over all ranks fails: {_message(error)}"
    failures = meeting.gather(wrong, limit_s * 4)
    record.errors += [f"rank {rank} ({hosts[rank]}): {line}" for rank, line in failures.items() if line]
    _lost(record, meeting, hosts, "fell silent in an all-reduce")


def _lost(record: Record, meeting: Meeting, hosts: Mapping[int, str], what: str) -> bool:
    """Return whether ranks are missing since the last meeting; each is an error. what: it did, in the message."""
    missing = [rank for rank in range(record.world) if rank not in meeting.present]
    record.errors += [f"rank {rank} ({hosts.get(rank, 'host unknown')}): {what}" for rank in missing]
    return bool(missing)


def _message(error: Exception) -> str:
    """Return an error's message as one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _facts(rank: int, device: torch.device, shared: SharedFolder, token: str) -> RankFacts | str:
    """Return the measurements of this rank, or the error that kept it from making them."""
    try:
        rates = [matmul_rate(device, dtype) for dtype in (torch.bfloat16, torch.float32)]
        return RankFacts(
            rank=rank,
            host=socket.gethostname(),
            device=device_name(device),
            versions=versions(device),
            bf16=rates[0],
            fp32=rates[1],
            folder=shared.problem(token),
            memory=free_memory(device),
            disk=shared.free(),
        )
    except Exception as error:  # no memory left on the device, an error of its memory; torch raises what it likes
        return f"computing, or looking at device and host, fails: {_message(error)}"


def _join(meeting: Meeting, device: torch.device) -> str | None:
    """Join the process group, and return what went wrong, or None."""
    # pairs connect when they first talk: one that cannot is found by its own time limit, not by everyone's
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=GROUP_S)

    def join() -> None:
        store = PrefixStore("group", meeting.store)
        dist.init_process_group(
            backend, store=store, rank=meeting.rank, world_size=len(meeting.present), timeout=timeout
        )

    try:
        within(ARRIVE_S / 2, join)
    except LateError as late:
        return f"joining the process group ({backend}) {late}"
    except Exception as error:  # torch and the backends raise what they like
        return f"joining the process group ({backend}) fails: {_message(error)}"
    return None
