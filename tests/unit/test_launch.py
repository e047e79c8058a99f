"""What `megamem launch` writes for each target, what it refuses, and what it keeps of a job."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml

from launchers import ssh
from launchers.config import LaunchConfig
from launchers.slurm import batch_script
from launchers.snapshot import environment
from megamem.cli_launch import _job, _load, _script, launch
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.errors import FINAL, STOPPED, ConfigError, DependencyError, MegamemError, NodesMissingError
from megamem.ops import attention
from tests.integration.commands import run_tree, write_config

CLUSTERS = sorted((Path(__file__).resolve().parents[2] / "configs" / "clusters").glob("*.yaml"))


@pytest.fixture
def config(data, tmp_path):
    """A run of 8 sequences a step, two rows at once."""
    training = {"batch_tokens": 1024, "micro_batch_size": 2}
    return write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", training=training))


def script(config, on, *overrides, cluster=None):
    """Text of what is written for a target."""
    settings, nodes = _load(config, list(overrides), cluster)
    files = _script(_job(settings, nodes, on), settings, on)
    (text,) = files.values()
    return text


def options(text):
    """The #SBATCH lines of a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}


def srun_task(text):
    """Words of the srun command, and of the shell it runs on each node."""
    words = shlex.split(re.search(r"^run (srun .*)$", text, re.MULTILINE)[1])
    return words, shlex.split(words[-1])


def option(words, name):
    return words[words.index(name) + 1]


class TestConfiguration:
    @pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
    def test_shipped_files_load_and_explain_every_value(self, path, config):
        assert path.stem in {"slurm", "kubernetes", "ssh"}
        cluster = load_config(LaunchConfig, path)
        section = getattr(cluster, path.stem)
        for line in path.read_text().splitlines():
            assert "#" in line or re.fullmatch(r"\w+:", line), f"{line}: no comment"
        given = yaml.safe_load(path.read_text())
        assert set(given[path.stem]) == set(section.__pydantic_fields__), "every field of the target is shown"
        ranks = cluster.nodes * cluster.processes_per_node
        fitting = ("parallel.tp=4", f"training.batch_tokens={128 * ranks}", "training.micro_batch_size=1")
        assert script(config, path.stem, *fitting, cluster=path)

    def test_overrides_find_the_run_or_the_cluster(self, config):
        overrides = ["slurm.partition=gpu", "training.steps=7", "nodes=2", "optimizer.lr=1e-3"]
        settings, cluster = _load(config, overrides, None)
        assert (settings.steps, settings.optimizer.lr) == (7, 1e-3)
        assert (cluster.nodes, cluster.slurm.partition) == (2, "gpu")
        assert not set(LaunchConfig.__pydantic_fields__) & set(RunConfig.__pydantic_fields__), "a key has one owner"

    @pytest.mark.parametrize(
        ("on", "overrides", "line"),
        [
            ("slurm", ["slurm.partion=gpu"], r"slurm\.partion: unknown key; did you mean 'partition'\?"),
            ("slurm", ["min_nodes=3", "nodes=2"], "min_nodes 3 is more than nodes 2"),
            ("slurm", ["slurm.time=tomorrow"], r"slurm\.time: .*\(got 'tomorrow'\)"),
            (
                "slurm",
                ["slurm.time=10:00", "stop_seconds=540"],
                r"slurm\.time 10:00 is 600 s, and a run would be stopped 600 s before that \(stop_seconds 540 and 60\)",
            ),
            ("slurm", ["slurm.mounts=[a]"], r"slurm\.mounts\.0: "),
            ("slurm", ["slurm.sbatch={nodes: 3}"], r"slurm\.sbatch: 'nodes' is set by the launcher"),
            ("slurm", ["slurm.sbatch={-N: 3}"], r"slurm\.sbatch: '-N' is no long option of sbatch"),
            ("slurm", ["slurm.partition=a b"], r"slurm\.partition: "),
            ("slurm", ["environment.WANDB_API_KEY=1"], "environment: WANDB_API_KEY looks like a secret"),
            (
                "slurm",
                ["nodes=3"],
                "processes_per_node: not given, and PP 1 x TP 1 x DP 1 = 1 ranks cannot be spread over",
            ),
            (
                "slurm",
                ["nodes=3", "processes_per_node=1"],
                "nodes 3 x processes_per_node 1: training.batch_tokens: 8 sequences .* use a multiple of 6",
            ),
            (
                "slurm",
                ["nodes=2", "processes_per_node=1", "parallel.dp=1"],
                r"nodes 2 x processes_per_node 1: parallel\.dp: 1 .* needs 1 processes",
            ),
            (
                "slurm",
                ["nodes=2", "min_nodes=1", "processes_per_node=1", "parallel.pp=2"],
                "min_nodes 1 x processes_per_node 1: parallel: 1 processes cannot be split",
            ),
            ("local", ["nodes=2", "processes_per_node=1"], "nodes: 2 do not go with --on local"),
            ("ssh", ["processes_per_node=1"], r"ssh\.hosts: 0 given, but nodes is 1"),
            ("ssh", ["nodes=2", "processes_per_node=1", "ssh.hosts=[a, a]"], r"ssh\.hosts: a, a names a host twice"),
            ("ssh", ["ssh.hosts=['-oProxyCommand=x']"], r"ssh\.hosts\.0: "),
            (
                "ssh",
                ["ssh.hosts=[a]", "ssh.folder=/there", "runs_folder=runs"],
                "runs_folder: runs is another folder on the hosts, where ssh.folder is /there",
            ),
            ("kubernetes", [], r"kubernetes\.image: required"),
        ],
    )
    def test_what_cannot_be_is_one_line_that_names_the_field(self, config, tmp_path, on, overrides, line):
        with pytest.raises(ConfigError, match=line) as caught:
            launch(config, overrides, on=on)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "runs").exists(), "nothing was written"

    @pytest.mark.parametrize(
        ("given", "text", "seconds"),
        [
            ("24:00:00", "24:00:00", 86_400),  # YAML 1.1 has numbers to the base 60
            ("'24:00:00'", "24:00:00", 86_400),
            ("10", "10", 600),
            ("1:30", "1:30", 90),
            ("2-12", "2-12", 216_000),
            ("1-0:30", "1-0:30", 88_200),
            ("0", "0", None),  # SLURM's word for no limit
        ],
    )
    def test_a_time_limit_is_read_as_slurm_does(self, config, given, text, seconds):
        slurm = _load(config, [f"slurm.time={given}", "stop_seconds=1"], None)[1].slurm
        assert (slurm.time, slurm.time_s) == (text, seconds)

    def test_kernels_are_those_of_the_machine_that_runs(self, config, monkeypatch):
        """Not of the one that submits, which may have no device."""
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
        launch(config, ["model.attention=flash_attn"], on="slurm", dry_run=True)
        with pytest.raises(typer.Exit):
            launch(config, ["model.attention=flash_attn", "logging.wandb.mode=disabled"], on="slurm")
        with pytest.raises(ConfigError, match=r"model\.attention: flash_attn is not installed"):
            launch(config, ["model.attention=flash_attn"], on="local")

    def test_node_counts_that_batch_and_layout_fit(self, config):
        def fits(*overrides):
            return _job(*_load(config, ["nodes=4", "processes_per_node=1", *overrides], None), "slurm").fits

        assert fits() == (4,)
        assert fits("min_nodes=1") == (1, 2, 4)  # 3 x 2 rows do not divide 8
        assert fits("min_nodes=2", "parallel.pp=2") == (2, 4)


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
        folder.mkdir(parents=True)
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
            f"{self.SAVES.format(runs=tmp_path / 'runs')}; srun() {{ saves 00000002; return {code}; }}; saves 00000001\n"
            f"squeue() {{ echo {state}; }}\n"
            f'scontrol() {{ [ "$1" = show ] && echo head-node || echo "$@" >> {log}; }}',
        )
        assert done.returncode == ends_with, done.stderr
        assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else "")
        failures = folder / "failures"
        counted = (requeued and code != STOPPED) or "max_restarts=0" in overrides
        assert (failures.read_text() if failures.exists() else "") == (f"{code}\n" if counted else "")

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
        settings, nodes = _load(config, [], None)
        result = tmp_path / "the result.json"
        job = replace(_job(settings, nodes, "slurm"), then=("study", "read", "a b"), result=result)
        if there:
            result.touch()
        played = (
            f"codes=({' '.join(map(str, codes))}); squeue() {{ echo RUNNING; }}; scontrol() {{ :; }}\n"
            f'srun() {{ echo "$@" >> {tmp_path}/calls; return "${{codes[$(($(wc -l < {tmp_path}/calls) - 1))]}}"; }}\n'
        )
        job.folder.mkdir(parents=True)
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "head-node", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["bash"], input=played + batch_script(job), env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == ends_with, done.stderr
        made = (tmp_path / "calls").read_text().splitlines()
        alone = ["--nodes=1 --ntasks=1" in call and call.endswith(" python -m megamem study read a b") for call in made]
        assert ["then" if one else "ranks" for one in alone] == calls
        assert (job.folder / "ended").read_text() == f"{ends_with}\n"


class TestSsh:
    OVERRIDES = ("nodes=2", "processes_per_node=1", "ssh.hosts=[node-a, 10.0.0.2]", "ssh.user=me", "ssh.port=2222")

    def test_commands(self, config):
        text = script(config, "ssh", *self.OVERRIDES, 'environment={A: "it\'s $HOME"}', "ssh.folder=/my work")
        first, second = (shlex.split(line) for line in text.splitlines())
        assert first[:3] == ["ssh", "-p", "2222"]
        assert "BatchMode=yes" in first
        assert (first[-2], second[-2]) == ("me@node-a", "me@10.0.0.2")
        there = shlex.split(second[-1])
        assert there[:6] == ["cd", "/my work", "&&", "exec", "env", "A=it's $HOME"]
        assert option(there, "--head") == "node-a"
        assert option(there, "--node-rank") == "1"
        assert option(there, "--address") == "10.0.0.2"
        assert "--listen" in there

    @pytest.mark.parametrize(
        ("scripts", "code"),
        [
            (["exit 0", "exit 0"], 0),
            (["exit 1", "exit 3"], 3),
            (["exit 75", "exit 75"], STOPPED),
            (["exit 137", "exit 1"], 137),
        ],
    )
    def test_one_code_and_output_by_host(self, config, monkeypatch, capfd, scripts, code):
        assert self.run(config, monkeypatch, [f"echo to out; echo to err >&2; {last}" for last in scripts]) == code
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["[10.0.0.2] to out", "[node-a] to out"]
        assert sorted(err.splitlines()) == ["[10.0.0.2] to err", "[node-a] to err"]

    def test_a_host_that_cannot_be_reached_ends_the_others(self, config, monkeypatch):
        """Those see the end of their input."""
        with pytest.raises(NodesMissingError, match=r"ssh\.hosts: node-a: ssh could not connect"):
            self.run(config, monkeypatch, ["exit 255", "cat; exit 75"])

    def run(self, config, monkeypatch, scripts):
        job = _job(*_load(config, list(self.OVERRIDES), None), "ssh")
        played = {host: ["sh", "-c", text] for host, text in zip(job.cluster.ssh.hosts, scripts, strict=True)}
        monkeypatch.setattr(ssh, "commands", lambda job, token: played)
        return ssh.run_ssh(job)


class TestKubernetes:
    FULL = ("kubernetes.image=i", "nodes=2", "processes_per_node=2")

    def test_an_indexed_job(self, config):
        settings, service, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "max_restarts=2"))
        assert RunConfig.model_validate(yaml.safe_load(settings["data"]["config.yaml"])).name == "run"
        spec, pod = job["spec"], job["spec"]["template"]["spec"]
        name = job["metadata"]["name"]
        assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
        assert spec["backoffLimit"] == 4
        assert pod["subdomain"] == service["metadata"]["name"] == name
        (container,) = pod["containers"]
        assert option(container["command"], "--head") == f"{name}-0.{name}"
        assert option(container["command"], "--node-rank") == "$(JOB_COMPLETION_INDEX)"
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
        fails = spec["podFailurePolicy"]["rules"][0]
        assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", sorted(FINAL))

    def test_a_service_begins_with_a_letter(self, config):
        _, service, _ = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, f"name=760m-{'elastic' * 6}"))
        name = service["metadata"]["name"]
        assert re.fullmatch(r"run-760m-[-a-z0-9]*[a-z0-9]", name)
        assert len(name) <= 60

    def test_a_run_that_stops_itself_is_not_started_again(self, config):
        *_, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "training.stop_after=1"))
        rules = job["spec"]["podFailurePolicy"]["rules"]
        assert STOPPED in rules[0]["onExitCodes"]["values"]
        assert all(STOPPED not in rule.get("onExitCodes", {}).get("values", []) for rule in rules[1:])

    def test_a_pytorch_job(self, config):
        _, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "kubernetes.kind=PyTorchJob"))
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 1}
        (container,) = replicas["Worker"]["template"]["spec"]["containers"]
        assert option(container["command"], "--head") == f"{job['metadata']['name']}-master-0"
        assert option(container["command"], "--node-rank") == "$(RANK)"


class TestSnapshot:
    def test_a_dry_run_prints_and_writes_nothing(self, config, tmp_path, capsys):
        launch(config, ["nodes=1"], on="slurm", dry_run=True)
        out = capsys.readouterr().out
        for name in ("config.yaml", "cluster.yaml", "job.sh"):
            assert re.search(rf"^# .*/launch/\d{{8}}T\d{{6}}Z/{name}$", out, re.MULTILINE)
        assert "#!/bin/bash" in out
        assert not (tmp_path / "runs").exists()

    def test_what_is_kept(self, config, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        value = secrets.token_hex(8)  # in no file that changes.diff may quote
        for name in ("SLURM_JWT", "MEGAMEM_TOKEN", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, value)
        with pytest.raises(typer.Exit) as ended:
            launch(config, ["training.steps=9"], on="slurm")
        assert ended.value.exit_code == 0
        (folder,) = (tmp_path / "runs" / "run" / "launch").iterdir()
        assert f"to start it: sbatch {folder}/job.sh" in capsys.readouterr().out
        assert load_config(RunConfig, folder / "config.yaml").steps == 9
        assert load_config(LaunchConfig, folder / "cluster.yaml") == LaunchConfig()
        facts = json.loads((folder / "snapshot.json").read_text())
        assert {"command", "megamem", "revision", "changed", "python", "environment"} <= set(facts)
        assert re.fullmatch(r"[0-9a-f]{40}", facts["revision"])
        assert facts["environment"]["NCCL_DEBUG"] == "INFO"
        assert not [path for path in folder.iterdir() if value in path.read_text()]
        packages = dict(line.split("==", 1) for line in (folder / "packages.txt").read_text().splitlines())
        assert {"torch", "deepspeed", "megamem"} <= set(packages)

    def test_environment_is_an_allow_list(self):
        given = {"NCCL_A": "1", "OMP_NUM_THREADS": "2", "HOME": "/root", "SLURM_JWT": "x", "CUDA_API_KEY": "x"}
        assert environment(given) == {"NCCL_A": "1", "OMP_NUM_THREADS": "2"}

    def test_submit_says_what_the_scheduler_said(self, config, tmp_path, monkeypatch, capsys):
        programs = tmp_path / "bin"
        programs.mkdir()
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        sbatch = programs / "sbatch"
        sbatch.write_text("#!/bin/sh\necho Submitted batch job 41\n")
        sbatch.chmod(0o755)
        with pytest.raises(typer.Exit):
            launch(config, on="slurm", submit=True)
        assert "Submitted batch job 41" in capsys.readouterr().out
        sbatch.write_text("#!/bin/sh\necho 'invalid\npartition' >&2; exit 1\n")
        with pytest.raises(MegamemError, match="invalid partition"):
            launch(config, ["name=other"], on="slurm", submit=True)
        sbatch.unlink()
        monkeypatch.setenv("PATH", str(programs))
        with pytest.raises(DependencyError, match="sbatch is not installed here"):
            launch(config, ["name=another"], on="slurm", submit=True)
