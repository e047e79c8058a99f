"""Manifests against the schemas that Kubernetes publishes, and a PyTorchJob against the models of Kubeflow's SDK.

Strict: a field that the schema does not know is an error. The pods of a PyTorchJob are validated as Kubernetes' own.
"""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
import typer
import yaml
from kubeflow.training import models

from megamem.cli.launch import launch
from tests.cluster.runs import tiny_run

pytestmark = pytest.mark.cluster
VERSIONS = ["1.31", "1.37"]
"""The first with a stable podFailurePolicy, and the newest that the package knows."""
IMAGE = "kubernetes.image=registry.example.org/me/megamem:1.0"
FULL = (
    "nodes=2",
    "processes_per_node=2",
    "environment={NCCL_SOCKET_IFNAME: eth0, OMP_NUM_THREADS: 4}",
    "kubernetes.namespace=training",
    "kubernetes.volumes={/work: runs, /data: corpora}",
    "kubernetes.service_account=trainer",
    "kubernetes.env_secret=wandb",
)
CASES = {"plain": (), "full": FULL, "no-gpu": ("kubernetes.gpus=0",), "once": ("training.stop_after=2",)}


def manifests(data, folder, *overrides):
    """What is written, read again."""
    with pytest.raises(typer.Exit):
        launch(tiny_run(data, folder, name="1.Tiny_run"), [IMAGE, *overrides], on="kubernetes")
    (path,) = (folder / "runs" / "1.Tiny_run" / "launch").glob("*/job.yaml")
    return list(yaml.safe_load_all(path.read_text()))


def kube(kind, **fields):
    return {"apiVersion": "v1", "kind": kind, **fields}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_an_indexed_job(data, tmp_path, case, version):
    found = manifests(data, tmp_path, *CASES[case])
    assert [manifest["kind"] for manifest in found] == ["ConfigMap", "Secret", "Service", "Job"]
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)
        # what the schema does not say: a Service's name begins with a letter; names become host names, with an index
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= 60


@pytest.mark.parametrize("case", CASES)
def test_a_pytorch_job(data, tmp_path, case):
    settings, secret, job = manifests(data, tmp_path, "kubernetes.kind=PyTorchJob", *CASES[case])
    kubernetes_validate.validate(settings, VERSIONS[-1], strict=True)
    kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    check_fields(job, models.KubeflowOrgV1PyTorchJob)
    check_fields(job["spec"], models.KubeflowOrgV1PyTorchJobSpec)
    check_fields(job["spec"]["runPolicy"], models.KubeflowOrgV1RunPolicy)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == ({"Master", "Worker"} if case == "full" else {"Master"})
    for replica in replicas.values():
        check_fields(replica, models.KubeflowOrgV1ReplicaSpec)
        template = kube("PodTemplate", metadata={"name": "pods"}, template=replica["template"])
        kubernetes_validate.validate(template, VERSIONS[-1], strict=True)
        # the operator looks for a container of this name
        assert [c["name"] for c in replica["template"]["spec"]["containers"]] == ["pytorch"]


def check_fields(section, model):
    """Fields that the SDK's model has, with values of its plain types."""
    types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    assert set(section) <= set(types)
    for name, value in section.items():
        if types[name] in ("int", "str"):
            assert type(value).__name__ == types[name], name


def test_a_wrong_manifest_is_seen(data, tmp_path):
    """The validation above can fail."""
    job = manifests(data, tmp_path)[-1]
    job["spec"]["template"]["spec"]["containers"][0]["ressources"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="ressources"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)
