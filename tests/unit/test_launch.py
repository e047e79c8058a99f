"""What `megamem launch` writes for each target, what it refuses, and what it keeps of a job."""

from __future__ import annotations

import json
import re
import secrets
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from launchers import target, target_names
from launchers.launch import load_cluster, load_launch
from launchers.node import TOKEN
from launchers.snapshot import environment
from launchers.target import Target, cluster_config_type, registered_targets
from launchers.targets.ssh import SshTarget
from megamem.cli.launch import launch
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.errors import FINAL, STOPPED, ConfigError, DependencyError, MegamemError, NodesMissingError
from megamem.ops.attention import softmax as attention
from tests.snippets import run_snippets
from tests.unit.launch_helpers import option, script, small_run

CLUSTERS = sorted((Path(__file__).resolve().parents[2] / "configs" / "clusters").glob("*.yaml"))


@pytest.fixture
def config(data, tmp_path):
    return small_run(data, tmp_path)


class TestConfiguration:
    @pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
    def test_shipped_files_load_and_explain_every_value(self, path, config):
        assert path.stem in target_names()
        cluster = load_config(cluster_config_type(), path)
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
        planned = load_launch(config, ["processes_per_node=2", *overrides], None, "slurm")
        settings, cluster = planned.config, planned.job.cluster
        assert (settings.steps, settings.optimizer.lr) == (7, 1e-3)
        assert (cluster.nodes, cluster.slurm.partition) == (2, "gpu")
        assert not set(cluster_config_type().__pydantic_fields__) & set(RunConfig.__pydantic_fields__), (
            "a key has one owner"
        )

    def test_the_target_that_the_page_shows(self, config, monkeypatch):
        """Known by its name and its section, as those of this package are."""
        caches = (registered_targets, cluster_config_type)
        monkeypatch.setattr(target, "_known", dict(registered_targets()))
        try:
            for found in caches:
                found.cache_clear()
            run_snippets("docs/launching.md")
            text = script(config, "mine", "mine.queue=long", "nodes=2", "processes_per_node=1")
            assert text.startswith("queue long\npython -m megamem agent --nodes 2 --processes 1 ")
            assert re.search(r" --head \$FIRST_NODE -- train \S+/config\.yaml\n$", text)
            said: list[str] = []
            job = load_launch(config, [], None, "mine")
            assert job.start(False, said.append) == 0
            assert said == [f"to start it: mysubmit {job.job.folder}/job.txt, or megamem launch ... --submit"]
        finally:
            for found in caches:
                found.cache_clear()

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
            (
                "local",
                ["checkpoint.resume=none"],
                r"checkpoint\.resume: none does not go with max_restarts 3, .*; use auto",
            ),
            (
                "ssh",
                ["checkpoint.resume=none", "max_restarts=0", "nodes=2", "min_nodes=1", "ssh.hosts=[a, b]"],
                r"checkpoint\.resume: none .* min_nodes 1, .*; use auto",
            ),
            (
                "slurm",
                ["checkpoint.resume=none", "max_restarts=0"],
                r"checkpoint\.resume: none .* --on slurm, .*; use auto",
            ),
        ],
    )
    def test_what_cannot_be_is_one_line_that_names_the_field(self, config, tmp_path, on, overrides, line):
        with pytest.raises(ConfigError, match=line) as caught:
            launch(config, overrides, on=on)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "runs").exists(), "nothing was written"

    def test_a_job_that_is_started_once_need_not_go_on(self, config):
        once = ["checkpoint.resume=none", "max_restarts=0"]
        assert load_launch(config, once, None, "local").job.processes == 1
        assert load_launch(config, [*once, "training.stop_after=2"], None, "slurm").job.resumes is False

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
    def test_a_time_limit_is_read_as_slurm_does(self, given, text, seconds):
        slurm = load_cluster([f"slurm.time={given}", "stop_seconds=1"], None)[0].slurm
        assert (slurm.time, slurm.time_s) == (text, seconds)

    def test_kernels_are_those_of_the_machine_that_runs(self, config, monkeypatch):
        """Not of the one that submits, which may have no device."""
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: None)
        launch(config, ["model.attention_kernel=flash_attn"], on="slurm", dry_run=True)
        with pytest.raises(typer.Exit):
            launch(config, ["model.attention_kernel=flash_attn", "logging.wandb.mode=disabled"], on="slurm")
        with pytest.raises(ConfigError, match=r"model\.attention_kernel: flash_attn is not installed"):
            launch(config, ["model.attention_kernel=flash_attn"], on="local")

    def test_node_counts_that_batch_and_layout_fit(self, config):
        def fits(*overrides):
            return load_launch(config, ["nodes=4", "processes_per_node=1", *overrides], None, "slurm").job.node_counts

        assert fits() == (4,)
        assert fits("min_nodes=1") == (1, 2, 4)  # 3 x 2 rows do not divide 8
        assert fits("min_nodes=2", "parallel.pp=2") == (2, 4)


class TestTargets:
    def test_each_has_a_file_of_its_name(self):
        """`--help` lists targets by their files, and imports none."""
        assert tuple(registered_targets()) == target_names()
        assert all(issubclass(target, Target) for target in registered_targets().values())

    def test_one_that_is_not_there_is_named_with_the_nearest(self, config):
        with pytest.raises(ConfigError, match=r"--on slrum: no such .*; did you mean 'slurm'\? valid: kubernetes, "):
            launch(config, on="slrum")


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

    def test_the_token_comes_by_the_input_and_stands_in_no_command(self, config, monkeypatch, capfd):
        assert self.run(config, monkeypatch, ["read token; echo $token", "read token; echo $token"]) == 0
        tokens = {line.rpartition(" ")[2] for line in capfd.readouterr().out.splitlines()}
        assert len(tokens) == 1
        assert re.fullmatch("[0-9a-f]{64}", tokens.pop())
        planned = load_launch(config, self.OVERRIDES, None, "ssh")
        assert not [text for text in planned.files.values() if planned.job.token in text]

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
        planned = load_launch(config, self.OVERRIDES, None, "ssh")
        played = {host: ["sh", "-c", text] for host, text in zip(planned.target.hosts, scripts, strict=True)}
        monkeypatch.setattr(SshTarget, "commands", lambda self, job, name: played)
        return planned.start(False, print)


class TestKubernetes:
    FULL = ("kubernetes.image=i", "nodes=2", "processes_per_node=2")

    def test_an_indexed_job(self, config):
        settings, secret, service, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "max_restarts=2"))
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
        assert {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}} in container["env"]
        assert (secret["kind"], secret["metadata"]["name"]) == ("Secret", name)
        assert re.fullmatch("[0-9a-f]{64}", secret["stringData"]["token"])
        fails = spec["podFailurePolicy"]["rules"][0]
        assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", sorted(FINAL))

    def test_a_service_begins_with_a_letter(self, config):
        _, _, service, _ = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, f"name=760m-{'elastic' * 6}"))
        name = service["metadata"]["name"]
        assert re.fullmatch(r"run-760m-[-a-z0-9]*[a-z0-9]", name)
        assert len(name) <= 60

    def test_a_run_that_stops_itself_is_not_started_again(self, config):
        *_, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "training.stop_after=1"))
        rules = job["spec"]["podFailurePolicy"]["rules"]
        assert STOPPED in rules[0]["onExitCodes"]["values"]
        assert all(STOPPED not in rule.get("onExitCodes", {}).get("values", []) for rule in rules[1:])

    def test_a_pytorch_job(self, config):
        _, secret, job = yaml.safe_load_all(script(config, "kubernetes", *self.FULL, "kubernetes.kind=PyTorchJob"))
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 1}
        (container,) = replicas["Worker"]["template"]["spec"]["containers"]
        assert option(container["command"], "--head") == f"{job['metadata']['name']}-master-0"
        assert option(container["command"], "--node-rank") == "$(RANK)"
        assert container["env"][1]["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]


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
        for name in ("SLURM_JWT", "MEGAMEM_JOB_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_PAT", "CUDA_LICENCE"):
            monkeypatch.setenv(name, value)
        with pytest.raises(typer.Exit) as ended:
            launch(config, ["training.steps=9"], on="slurm")
        assert ended.value.exit_code == 0
        (folder,) = (tmp_path / "runs" / "run" / "launch").iterdir()
        assert f"to start it: sbatch {folder}/job.sh" in capsys.readouterr().out
        assert load_config(RunConfig, folder / "config.yaml").steps == 9
        assert load_config(cluster_config_type(), folder / "cluster.yaml") == cluster_config_type()()
        facts = json.loads((folder / "snapshot.json").read_text())
        assert {"command", "megamem", "revision", "changed", "python", "environment"} <= set(facts)
        assert re.fullmatch(r"[0-9a-f]{40}", facts["revision"])
        assert facts["environment"]["NCCL_DEBUG"] == "INFO"
        assert not [path for path in folder.iterdir() if value in path.read_text()]
        packages = dict(line.split("==", 1) for line in (folder / "packages.txt").read_text().splitlines())
        assert {"torch", "deepspeed", "megamem"} <= set(packages)

    def test_what_holds_the_token_is_for_its_owner_alone(self, config, tmp_path):
        planned = load_launch(config, TestKubernetes.FULL, None, "kubernetes")
        planned.write()
        modes = {path.name: path.stat().st_mode & 0o077 for path in planned.job.folder.iterdir()}
        assert modes["job.yaml"] == 0
        assert modes["config.yaml"] != 0

    def test_environment_is_an_allow_list(self):
        given = {"NCCL_DEBUG": "1", "OMP_NUM_THREADS": "2", "HOME": "/root", "SLURM_JWT": "x", "CUDA_APIKEY": "x"}
        assert environment(given) == {
            "NCCL_DEBUG": "1", "OMP_NUM_THREADS": "2", "SLURM_JWT": None, "CUDA_APIKEY": None
        }  # fmt: skip

    @pytest.mark.parametrize(
        "name",
        [
            "WANDB_APIKEY",
            "WANDB_API_KEY",
            "HF_TOKENS",
            "HF_TOKEN",
            "HF_PAT",
            "MYSQL_PWD",
            "GH_AUTH",
            "DB_PASS",
            "SSH_KEYS",
        ],
    )
    def test_a_name_that_says_secret_is_not_written_down(self, config, name):
        with pytest.raises(ConfigError, match=f"environment: {name} looks like a secret"):
            load_cluster([f"environment={{{name}: x}}"], None)

    @pytest.mark.parametrize(
        "name", ["TOKENIZERS_PARALLELISM", "PATH", "KEYBOARD", "PYTHONPATH", "HF_HOME", "NCCL_SOCKET_IFNAME"]
    )
    def test_other_names_are_taken(self, name):
        assert load_cluster([f"environment={{{name}: x}}"], None)[0].environment == {name: "x"}

    def test_a_proxy_with_a_password_is_not_written_down(self, config):
        with pytest.raises(
            ConfigError, match="environment: has credentials in its URL; leave them to the env"
        ) as caught:
            load_cluster(["environment={HTTPS_PROXY: http://me:hunter2@proxy}"], None)
        assert "hunter2" not in str(caught.value)

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
