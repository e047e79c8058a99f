"""SLURM: a batch script, which runs an agent on each node and requeues the job, handed to sbatch."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from launchers.commands import how_to_start
from launchers.config import ClusterConfig, Word
from launchers.job import Job
from launchers.node import TOKEN
from launchers.slurm_jobs import ENDED, SCRIPT, submit_job
from launchers.target import Report, Target, register
from megamem.config.run import RunConfig
from megamem.errors import FINAL, STOPPED, ConfigError
from megamem.training.checks import check_run

_RESERVED = {"nodes", "ntasks", "ntasks-per-node", "requeue", "no-requeue", "signal", "open-mode", "no-kill", "array"}
"""Options of sbatch that the script depends on."""
_REQUEUE_S = 60
"""Seconds that the script has to requeue its job, besides `stop_seconds`."""


@register
class SlurmTarget(Target):
    """A SLURM cluster."""

    name: ClassVar[str] = "slurm"
    restarts_stopped_jobs: ClassVar[bool] = True

    partition: Word | None = None
    """Partition; the cluster's default if not given."""
    account: Word | None = None
    """Account that is charged."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$", coerce_numbers_to_str=True)] | None = None
    """Time limit as SLURM reads it (`24:00:00`, `2-12`, minutes); the partition's if not given. A run goes on then."""
    sbatch: dict[Word, str | int | None] = {}
    """More options of sbatch by their long names, such as `gpus-per-node: 8`; null for one without a value."""
    modules: tuple[Word, ...] = ()
    """Environment modules to load."""
    venv: Path | None = None
    """Virtual environment to activate on the nodes."""
    container: Word | None = None
    """Image to run in; the nodes' own software if not given."""
    container_with: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs the image: `srun --container-image`, or `apptainer exec --nv`."""
    mounts: tuple[Annotated[str, Field(pattern=r"^/[^\s,:\x00-\x1f]*$")], ...] = ()
    """Folders that the container sees besides the working folder and the run folder, such as that of the data."""

    @field_validator("sbatch")
    @classmethod
    def _not_reserved(cls, options: dict[str, str | int | None]) -> dict[str, str | int | None]:
        for name, value in options.items():
            if name in _RESERVED or name in cls.__pydantic_fields__:
                raise ValueError(f"{name!r} is set by the launcher; use its own field, or leave it out")
            if not re.fullmatch(r"[a-z][a-z-]*", name):
                raise ValueError(f"{name!r} is no long option of sbatch; give it without dashes, as gpus-per-node")
            if isinstance(value, str) and re.search(r"[\x00-\x1f]", value):
                raise ValueError(f"{name!r}: the value has a line break")
        return options

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None if there is none, or the partition's."""
        if self.time is None:
            return None
        days, _, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if not days and len(parts) < 3:  # minutes, and seconds
            parts = [0, *parts]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or None

    def check(self, cluster: ClusterConfig) -> None:
        """See `Target.check`."""
        limit, signaled = self.time_s, signal_seconds(cluster)
        if limit is not None and signaled >= limit:
            raise ConfigError(
                f"slurm.time {self.time} is {limit} s, and a run would be stopped {signaled} s before "
                f"that (stop_seconds {cluster.stop_seconds} and {_REQUEUE_S}): at once; raise slurm.time"
            )

    def check_machine(self, config: RunConfig, processes: int) -> None:
        """See `Target.check_machine`. Kernels are not checked: this machine may have no device."""
        check_run(config, processes)

    def place(self, config: RunConfig, folder: Path) -> tuple[Path, Path]:
        """See `Target.place`."""
        for path in (folder.absolute(), Path.cwd()):
            if re.search(r"[\x00-\x1f]", str(path)):
                raise ConfigError(
                    f"{str(path)!r} has a line break, which sbatch would read as the next line; rename it"
                )
        return folder.absolute(), Path.cwd()

    def files(self, job: Job, config: str) -> dict[str, str]:
        """See `Target.files`."""
        return {SCRIPT: self.script(job)}

    def start(self, job: Job, submit: bool, report: Report) -> int:
        """See `Target.start`."""
        report(submit_job(job.folder) if submit else how_to_start(["sbatch", str(job.folder / SCRIPT)]))
        return 0

    def script(self, job: Job) -> str:
        """Return the batch script, for sbatch."""
        lines = ["#!/bin/bash", "# Written by `megamem launch`; sbatch takes it."]
        return "\n".join([*lines, *self._options(job), "", self._body(job)])

    def _options(self, job: Job) -> list[str]:
        """Return the #SBATCH lines; `sbatch` of the settings goes before what is set here."""
        cluster = job.cluster
        options: dict[str, str | int | None] = {
            "job-name": job.label(),
            "nodes": cluster.nodes,
            "ntasks-per-node": 1,
            "output": f"{job.folder}/slurm-%j.log",
            "open-mode": "append",
            "requeue": None,
            "signal": f"B:TERM@{signal_seconds(cluster)}",
            "time": self.time,
            "partition": self.partition,
            "account": self.account,
            **self.sbatch,
        }
        if cluster.fewest_nodes < cluster.nodes:
            options["no-kill"] = None  # the job outlives a node
        without_value = {"requeue", "no-kill"} | {name for name, value in self.sbatch.items() if value is None}
        return [
            f"#SBATCH --{name}" + ("" if name in without_value else f"={shlex.quote(str(value))}")
            for name, value in options.items()
            if value is not None or name in without_value
        ]

    def _body(self, job: Job) -> str:
        """Return the script's commands: prepare the nodes, run the agents, requeue the job where that may help."""
        srun = self._srun(job)
        # the shell of each task reads from SLURM's variables which node it is
        node = (
            ' --job "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --head "$MEGAMEM_HEAD" --port "$MEGAMEM_PORT"'
            ' --node-rank "$SLURM_NODEID" --address "$SLURMD_NODENAME" -- '
        )
        task = f"exec {shlex.join(job.agent_command())}{node}{shlex.join(job.train_arguments())}"
        follow_up, unless_done = "", ""
        if job.follow_up:
            alone = [srun[0], "--nodes=1", "--ntasks=1", *srun[1:], "python", "-m", "megamem", *job.follow_up]
            follow_up = _FOLLOW_UP.format(stopped=STOPPED, command=shlex.join(alone))
            unless_done = f"[ -e {shlex.quote(str(job.result))} ] || "
        newest, at_stop = "", '    echo "stopped as training.stop_after says"; exit "$code"'
        if job.resumes:
            checkpoints = f"{shlex.quote(f'{job.run_folder}/checkpoints')}/step-*[0-9]/COMPLETE"
            beat = shlex.quote(f"{job.run_folder}/heartbeat.json")
            newest, at_stop = (
                _NEWEST.format(checkpoints=checkpoints, beat=beat),
                _AT_STOP.format(unless_done=unless_done),
            )
        return _BODY.format(
            work=shlex.quote(str(job.work_folder)),
            prepare="\n".join(self._prepare(job)) or "# the environment is that of sbatch",
            folder=shlex.quote(str(job.folder)),
            port=job.cluster.port,
            token=TOKEN,
            newest=newest,
            ended=ENDED,
            unless_done=unless_done,
            srun=shlex.join(srun),
            task=shlex.quote(task),
            follow_up=follow_up,
            final="|".join(str(code) for code in sorted(FINAL)),
            stopped=STOPPED,
            at_stop=at_stop,
            restarts=job.cluster.max_restarts,
        )

    def _prepare(self, job: Job) -> list[str]:
        """Return the commands that set the environment: variables, modules, the virtual environment."""
        commands = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
        needed = [f"module load {shlex.quote(module)}" for module in self.modules]
        if self.venv:
            needed.append(f"source {shlex.quote(str(self.venv / 'bin' / 'activate'))}")
        if needed:
            # these may ask for variables that are not set
            commands += ["set +u", *(f"{command} || exit {ConfigError.exit_code}" for command in needed), "set -u"]
        return commands

    def _srun(self, job: Job) -> list[str]:
        """Return the words of srun, and of the container in which its tasks run."""
        srun = ["srun", "--kill-on-bad-exit=0", "--open-mode=append", f"--output={job.folder}/%n-%N.log"]
        if job.cluster.fewest_nodes < job.cluster.nodes:
            srun.append("--no-kill")
        run_folder = [] if job.folder.is_relative_to(job.work_folder) else [job.run_folder]
        folders = [job.work_folder, *run_folder, *self.mounts]
        if self.container and self.container_with == "pyxis":
            mounts = ",".join(f"{folder}:{folder}" for folder in folders)
            srun += [f"--container-image={self.container}", f"--container-mounts={mounts}"]
            srun += [f"--container-workdir={job.work_folder}"]
        if self.container and self.container_with == "apptainer":
            binds = [word for folder in folders for word in ("--bind", str(folder))]
            srun += ["apptainer", "exec", "--nv", *binds, "--pwd", str(job.work_folder), self.container]
        return srun


def signal_seconds(cluster: ClusterConfig) -> int:
    """Return how many seconds before its time limit SLURM signals a job."""
    return cluster.stop_seconds + _REQUEUE_S


_BODY = """\
set -uo pipefail
folder={folder}
rm -f "$folder/{ended}"
trap 'echo "$?" > "$folder/{ended}"' EXIT
cd {work} || exit 1
{prepare}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MEGAMEM_HEAD="$head" MEGAMEM_PORT=$(({port} + SLURM_JOB_ID % 1000))
# what the nodes tell one another is signed with it; srun passes it on
{token}=$(od -A n -t x1 -N 32 /dev/urandom | tr -d ' \n')
export {token}

# srun does not take this one from the job by itself
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

{newest}
# SLURM signals this shell before the time limit and at preemption; the ranks save a checkpoint and end
code=0 stopping=
trap 'signaled=1; stopping=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
run() {{
  "$@" &
  step=$!
  signaled=1
  while [ -n "$signaled" ]; do  # a signal interrupts the wait
    signaled=
    wait "$step"
    code=$?
  done
}}
# one task per node; its shell learns from SLURM which node it is
# shellcheck disable=SC2016
{unless_done}run {srun} bash -c {task}
{follow_up}
# an agent that had not begun yet is killed by the signal
if [ -n "$stopping" ] && [ "$code" = 143 ]; then code={stopped}; fi

# see docs/exit_codes.md
counts=1
case $code in
  0) exit 0 ;;
  {final}) echo "ended with $code, which trying again does not mend"; exit "$code" ;;
  {stopped})
{at_stop} ;;
esac

patiently() {{  # the controller may be busy
  for _ in 1 2 3 4 5; do
    "$@" && return
    sleep 5
  done
  echo "$1 does not answer: the job is not requeued; to go on: sbatch $folder/job.sh" >&2
  return 1
}}
state=$(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
# a job that was cancelled, or that SLURM requeues itself, is not RUNNING any more
[ "$state" = RUNNING ] || exit "$code"
if [ -n "$counts" ]; then
  echo "$code" >> "$folder/failures"
  if [ "$(wc -l < "$folder/failures")" -gt {restarts} ]; then
    echo "ended with $code after {restarts} requeue(s) (max_restarts)"
    exit "$code"
  fi
fi
echo "ended with $code; requeued, the run goes on from its newest checkpoint"
patiently scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


_NEWEST = """\
newest() {{
  printf '%s\n' {checkpoints} | tail -n 1
  grep -so '"checkpoint_step": [0-9]*' {beat}  # those in an object store
}}
before=$(newest)
"""
_AT_STOP = """\
    if {unless_done}[ "$(newest)" != "$before" ]; then
      counts=
    else
      echo "stopped before it saved a checkpoint, which counts as a failure"
    fi"""
_FOLLOW_UP = """\
if [ "$code" = 0 ] && [ -n "$stopping" ]; then
  code={stopped}  # what is left is for the next start
elif [ "$code" = 0 ]; then
  run {command}
fi
"""
