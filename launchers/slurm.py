"""The batch script of a job on SLURM."""

from __future__ import annotations

import shlex

from launchers.job import Job
from megamem.errors import FINAL, STOPPED, ConfigError

ENDED = "ended"
"""File in the job's folder with the exit code of the script's last start; none while it runs, or if it was killed."""

_START = """\
set -uo pipefail
folder={folder}
rm -f "$folder/{ended}"
trap 'echo "$?" > "$folder/{ended}"' EXIT
cd {work} || exit 1
{prepare}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MEGAMEM_HEAD="$head" MEGAMEM_PORT=$(({port} + SLURM_JOB_ID % 1000))

# srun does not take this one from the job by itself
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

{newest}
# SLURM signals this shell before the time limit and at preemption; the ranks save a checkpoint and end
code=0 stopping=
trap 'asked=1; stopping=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
run() {{
  "$@" &
  step=$!
  asked=1
  while [ -n "$asked" ]; do  # a signal interrupts the wait
    asked=
    wait "$step"
    code=$?
  done
}}
# one task per node; its shell learns from SLURM which node it is
# shellcheck disable=SC2016
{unless}run {srun} bash -c {task}
{then}
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
newest() {{ printf '%s\n' {checkpoints} | tail -n 1; }}
before=$(newest)
"""
_AT_STOP = """\
    if {unless}[ "$(newest)" != "$before" ]; then
      counts=
    else
      echo "stopped before it saved a checkpoint, which counts as a failure"
    fi"""
_THEN = """\
if [ "$code" = 0 ] && [ -n "$stopping" ]; then
  code={stopped}  # what is left is for the next start
elif [ "$code" = 0 ]; then
  run {command}
fi
"""


def batch_script(job: Job) -> str:
    """The script, for sbatch."""
    return "\n".join(["#!/bin/bash", "# Written by `megamem launch`; sbatch takes it.", *_options(job), "", _body(job)])


def _options(job: Job) -> list[str]:
    cluster, slurm = job.cluster, job.cluster.slurm
    options: dict[str, str | int | None] = {
        "job-name": job.label(),
        "nodes": cluster.nodes,
        "ntasks-per-node": 1,
        "output": f"{job.folder}/slurm-%j.log",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:TERM@{cluster.signal_seconds}",
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        **slurm.sbatch,
    }
    if cluster.fewest_nodes < cluster.nodes:
        options["no-kill"] = None  # the job outlives a node
    without = {"requeue", "no-kill"} | {name for name, value in slurm.sbatch.items() if value is None}
    return [
        f"#SBATCH --{name}" + ("" if name in without else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None or name in without
    ]


def _body(job: Job) -> str:
    slurm, cluster = job.cluster.slurm, job.cluster
    prepare = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    needed = [f"module load {shlex.quote(module)}" for module in slurm.modules]
    if slurm.venv:
        needed.append(f"source {shlex.quote(str(slurm.venv / 'bin' / 'activate'))}")
    if needed:
        # these may ask for variables that are not set
        prepare += ["set +u", *(f"{command} || exit {ConfigError.exit_code}" for command in needed), "set -u"]
    srun = ["srun", "--kill-on-bad-exit=0", "--open-mode=append", f"--output={job.folder}/%n-%N.log"]
    if cluster.fewest_nodes < cluster.nodes:
        srun.append("--no-kill")
    seen = [job.work, *([] if job.folder.is_relative_to(job.work) else [job.run_folder]), *slurm.mounts]
    if slurm.container and slurm.container_with == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in seen)
        srun += [f"--container-image={slurm.container}", f"--container-mounts={mounts}"]
        srun += [f"--container-workdir={job.work}"]
    if slurm.container and slurm.container_with == "apptainer":
        binds = [word for folder in seen for word in ("--bind", str(folder))]
        srun += ["apptainer", "exec", "--nv", *binds, "--pwd", str(job.work), slurm.container]
    node = (
        ' --job "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --head "$MEGAMEM_HEAD" --port "$MEGAMEM_PORT"'
        ' --node-rank "$SLURM_NODEID" --address "$SLURMD_NODENAME" -- '
    )
    task = f"exec {shlex.join(job.agent())}{node}{shlex.join(job.train())}"
    alone = [srun[0], "--nodes=1", "--ntasks=1", *srun[1:], "python", "-m", "megamem", *job.then]
    then = _THEN.format(stopped=STOPPED, command=shlex.join(alone)) if job.then else ""
    unless = f"[ -e {shlex.quote(str(job.result))} ] || " if job.then else ""
    newest, at_stop = "", '    echo "stopped as training.stop_after says"; exit "$code"'
    if job.again:
        checkpoints = f"{shlex.quote(f'{job.run_folder}/checkpoints')}/step-*[0-9]/COMPLETE"
        newest, at_stop = _NEWEST.format(checkpoints=checkpoints), _AT_STOP.format(unless=unless)
    return _START.format(
        work=shlex.quote(str(job.work)),
        prepare="\n".join(prepare) or "# the environment is that of sbatch",
        folder=shlex.quote(str(job.folder)),
        port=cluster.port,
        newest=newest,
        ended=ENDED,
        unless=unless,
        srun=shlex.join(srun),
        task=shlex.quote(task),
        then=then,
        final="|".join(str(code) for code in sorted(FINAL)),
        stopped=STOPPED,
        at_stop=at_stop,
        restarts=cluster.max_restarts,
    )
