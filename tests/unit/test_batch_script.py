"""The batch script that `megamem launch` writes: its text, and what it does in a shell where functions play SLURM."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.launch import load_launch
from megamem.errors import FINAL, STOPPED, ConfigError, NodesMissingError
from tests.unit.launch_helpers import option, script, small_run


@pytest.fixture
def config(data, tmp_path):
    return small_run(data, tmp_path)


def options(text):
    """The #SBATCH lines of a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}


def srun_task(text):
    """Words of the srun command, and of the shell it runs on each node."""
    words = shlex.split(re.search(r"^run (srun .*)$", text, re.MULTILINE)[1])
    return words, shlex.split(words[-1])


class TestSlurm:
    def test_options(self, config, tmp_path):
        text = script(
            config, "slurm", "nodes=2", "processes_per_node=2", "stop_seconds=90", "slurm.partition=gpu",
            "slurm.account=me", "slurm.time=1-12", "slurm.sbatch={gpus-per-node: 2, exclusive: null, comment: a b}",
        )  # fmt: skip
        found = options(text)
        folder = str(tmp_path / "runs" / "run" / "launch")
        assert found.pop("output").startswith(folder)
        assert found == {
            "job-name": "run", "nodes": "2", "ntasks-per-node": "1", "open-mode": "append", "requeue": "",
            "signal": "B:TERM@150", "time": "1-12", "partition": "gpu", "account": "me", "gpus-per-node": "2",
            "exclusive": "", "comment": "a b",
        }  # fmt: skip
        assert "no-kill" in options(script(config, "slurm", "nodes=2", "min_nodes=1", "processes_per_node=1"))

    @pytest.mark.parametrize("key", ["runs_folder", "slurm.venv", "data.tokenizer", "training.init_from"])
    def test_a_line_break_is_no_command(self, config, key):
        """Behind #SBATCH the next line would be one."""
        with pytest.raises(ConfigError) as caught:
            script(config, "slurm", f'{key}="runs\\ntouch harm #"')
        assert f"{key}: " in str(caught.value)
        assert "has a line break or another control character" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_line_break_in_the_working_folder(self, config, tmp_path, monkeypatch):
        folder = tmp_path / "a\nb"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with pytest.raises(ConfigError, match=r"a\\nb' has a line break, which sbatch would read as the next line"):
            script(config, "slurm", "runs_folder=/tmp/runs")

    def test_each_node_runs_an_agent(self, config):
        text = script(config, "slurm", "nodes=2", "min_nodes=1", "processes_per_node=2", "max_restarts=5", "port=30000")
        words, task = srun_task(text)
        assert words[:2] == ["srun", "--kill-on-bad-exit=0"]
        assert words[-3:-1] == ["bash", "-c"]
        assert task[:5] == ["exec", "python", "-m", "megamem", "agent"]
        assert option(task, "--nodes") == "1,2"
        assert option(task, "--processes") == "2"
        assert option(task, "--max-restarts") == "5"
        assert option(task, "--node-rank") == "$SLURM_NODEID"
        assert task[task.index("--") + 1] == "train"
        assert task[-1].endswith("/config.yaml")
        assert "MEGAMEM_PORT=$((30000 + SLURM_JOB_ID % 1000))" in text

    @pytest.mark.parametrize(
        ("container", "words"),
        [
            (
                "pyxis",
                ["--container-mounts={work}:{work},{run}:{run},/scratch:/scratch", "--container-image=/i m.sqsh"],
            ),
            ("apptainer", ["apptainer", "exec", "--nv", "{work}", "{run}", "/scratch", "/i m.sqsh"]),
        ],
    )
    def test_modules_environment_and_containers(self, config, tmp_path, container, words):
        image = words[-1].rpartition("=")[2].replace(" ", "")
        words = [word.format(work=Path.cwd(), run=tmp_path / "runs" / "run") for word in words]
        text = script(
            config, "slurm", "slurm.modules=[cuda/12.8]", "slurm.venv=/opt/my env", "environment={A: 'b c', N: 3}",
            f"slurm.container={image}", f"slurm.container_with={container}", "slurm.mounts=[/scratch]",
        )  # fmt: skip
        assert "\nexport A='b c'\nexport N=3\nset +u\nmodule load cuda/12.8 || exit 2\n" in text
        assert "\nsource '/opt/my env/bin/activate' || exit 2\nset -u\n" in text
        assert {word.replace(" ", "") for word in words} <= set(srun_task(text)[0])

    @pytest.mark.parametrize("overrides", [(), ("training.stop_after=1",), ("slurm.container=a", "nodes=1")])
    def test_bash_reads_it(self, config, overrides):
        text = script(config, "slurm", *overrides)
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    def played(self, text, functions, **variables):
        """The script in a real shell, with SLURM's commands played by functions of it."""
        folder = Path(re.search(r"^folder=(.*)$", text, re.MULTILINE)[1])
        folder.mkdir(parents=True, exist_ok=True)
        played = 'scontrol() { [ "$1" = show ] && echo head-node; }; sleep() { :; }\n' + functions + "\n"
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "head-node", "PATH": "/usr/bin:/bin", **variables}
        done = subprocess.run(["bash"], input=played + text, env=variables, capture_output=True, text=True, check=False)
        return done, folder

    @pytest.mark.parametrize(
        ("code", "state", "overrides", "requeued", "ends_with"),
        [
            (0, "RUNNING", (), False, 0),
            (STOPPED, "RUNNING", (), True, STOPPED),
            (STOPPED, "CANCELLED", (), False, STOPPED),
            (STOPPED, "RUNNING", ("training.stop_after=1",), False, STOPPED),
            (6, "RUNNING", (), True, 6),
            (NodesMissingError.exit_code, "RUNNING", (), True, NodesMissingError.exit_code),
            (137, "RUNNING", (), True, 137),
            (6, "RUNNING", ("max_restarts=0",), False, 6),
            *((code, "RUNNING", (), False, code) for code in sorted(FINAL)),
        ],
    )
    def test_what_is_tried_again(self, config, tmp_path, code, state, overrides, requeued, ends_with):
        log = tmp_path / "scontrol"
        done, folder = self.played(
            script(config, "slurm", *overrides),
            f"{self.SAVES.format(runs=tmp_path / 'runs')}; saves 00000001\n"
            f"srun() {{ saves 00000002; return {code}; }}\n"
            f"squeue() {{ echo {state}; }}\n"
            f'scontrol() {{ [ "$1" = show ] && echo head-node || echo "$@" >> {log}; }}',
        )
        assert done.returncode == ends_with, done.stderr
        assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else "")
        failures = folder / "failures"
        counted = (requeued and code != STOPPED) or "max_restarts=0" in overrides
        assert (failures.read_text() if failures.exists() else "") == (f"{code}\n" if counted else "")

    @pytest.mark.parametrize("restarts", [1, 3])
    def test_the_last_requeue(self, config, tmp_path, restarts):
        """A job that goes on failing is started once, and again as often as `max_restarts` says."""
        log = tmp_path / "scontrol"
        text = script(config, "slurm", f"max_restarts={restarts}")
        fails = f'srun() {{ return 6; }}; squeue() {{ echo RUNNING; }}; scontrol() {{ echo "$1" >> {log}; }}'
        said = []
        for _ in range(restarts + 1):
            done, folder = self.played(text, fails)
            assert done.returncode == 6
            said.append(done.stdout.splitlines()[-1])
        requeued = "ended with 6; requeued, the run goes on from its newest checkpoint"
        assert said == [requeued] * restarts + [f"ended with 6 after {restarts} requeue(s) (max_restarts)"]
        assert log.read_text().split().count("requeue") == restarts
        assert (folder / "failures").read_text() == "6\n" * (restarts + 1)

    SAVES = 'saves() {{ mkdir -p "{runs}/run/checkpoints/step-$1"; : > "{runs}/run/checkpoints/step-$1/COMPLETE"; }}'

    def test_a_stop_without_a_checkpoint_counts(self, config, tmp_path):
        """Else a run whose time limit is shorter than its start would be requeued for ever."""
        saves = self.SAVES.format(runs=tmp_path / "runs")
        done, folder = self.played(
            script(config, "slurm", "max_restarts=0"),
            f"{saves}; srun() {{ return {STOPPED}; }}; squeue() {{ echo RUNNING; }}; saves 00000001",
        )
        assert done.returncode == STOPPED
        assert "stopped before it saved a checkpoint, which counts as a failure\n" in done.stdout
        assert (folder / "failures").read_text() == f"{STOPPED}\n"

    def test_a_busy_controller_is_asked_again(self, config, tmp_path):
        calls = tmp_path / "calls"
        busy = f'busy() {{ echo "$1" >> {calls}; [ "$(grep -c "$1" {calls})" -gt 3 ] || return 1; }}'
        done, _ = self.played(
            script(config, "slurm"),
            f"{busy}; srun() {{ return 6; }}; squeue() {{ busy squeue && echo RUNNING; }}\n"
            'scontrol() { [ "$1" = show ] && echo head-node || busy "$1"; }',
        )
        assert calls.read_text().split() == ["squeue"] * 4 + ["requeue"] * 4, done.stderr

    @pytest.mark.parametrize("silent", ["squeue", "scontrol"])
    def test_a_controller_that_does_not_answer_is_told(self, config, silent):
        scontrol = 'scontrol() { [ "$1" = show ] && echo head-node; }'
        squeue = "squeue() { return 1; }" if silent == "squeue" else "squeue() { echo RUNNING; }"
        done, folder = self.played(script(config, "slurm"), f"srun() {{ return 6; }}; {squeue}; {scontrol}")
        assert done.returncode == 6
        assert f"{silent} does not answer: the job is not requeued; to go on: sbatch {folder}/job.sh\n" in done.stderr

    @pytest.mark.parametrize(
        ("overrides", "functions"),
        [(["slurm.venv=/no/such/venv"], ""), (["slurm.modules=[none]"], "module() { return 1; }")],
    )
    def test_what_cannot_be_loaded_is_not_tried_again(self, config, tmp_path, overrides, functions):
        done, folder = self.played(
            script(config, "slurm", *overrides), f"{functions}\nsrun() {{ : > {tmp_path}/begun; }}"
        )
        assert done.returncode == ConfigError.exit_code
        assert (folder / "ended").read_text() == f"{ConfigError.exit_code}\n"
        assert not (tmp_path / "begun").exists()

    def test_ranks_get_the_cores_of_the_job(self, config):
        """srun takes them from another variable than sbatch sets."""
        asks = "srun() { bash -c 'echo \"cores ${SRUN_CPUS_PER_TASK:-none}\"'; }"
        text = script(config, "slurm")
        assert "cores 96\n" in self.played(text, asks, SLURM_CPUS_PER_TASK="96")[0].stdout
        assert "cores none\n" in self.played(script(config, "slurm", "name=other"), asks)[0].stdout

    @pytest.mark.parametrize(
        ("codes", "there", "calls", "ends_with"),
        [
            ([0, 0], False, ["ranks", "then"], 0),
            ([5], False, ["ranks"], 5),
            ([STOPPED], False, ["ranks"], STOPPED),
            ([0, 3], False, ["ranks", "then"], 3),
            ([0], True, ["then"], 0),
        ],
    )
    def test_what_follows_the_run(self, config, tmp_path, codes, there, calls, ends_with):
        """By one process of the first node, once the run is done, also if it was done before."""
        launch = load_launch(config, [], None, "slurm")
        result = tmp_path / "the result.json"
        job = replace(launch.job, follow_up=("study", "evaluate", "a b"), result=result)
        if there:
            result.touch()
        played = (
            f"codes=({' '.join(map(str, codes))}); squeue() {{ echo RUNNING; }}; scontrol() {{ :; }}\n"
            f'srun() {{ echo "$@" >> {tmp_path}/calls; return "${{codes[$(($(wc -l < {tmp_path}/calls) - 1))]}}"; }}\n'
        )
        job.folder.mkdir(parents=True)
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "head-node", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["bash"],
            input=played + launch.target.script(job),
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ends_with, done.stderr
        made = (tmp_path / "calls").read_text().splitlines()
        alone = [
            "--nodes=1 --ntasks=1" in call and call.endswith(" python -m megamem study evaluate a b") for call in made
        ]
        assert ["then" if one else "ranks" for one in alone] == calls
        assert (job.folder / "ended").read_text() == f"{ends_with}\n"
