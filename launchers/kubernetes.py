"""The manifests of a job on Kubernetes: an Indexed Job or a PyTorchJob, with what it needs."""

from __future__ import annotations

from typing import Any

import yaml

from launchers.job import Job
from megamem.errors import FINAL, STOPPED

Manifest = dict[str, Any]

CONFIG = "/etc/megamem/config.yaml"
"""Where pods find the run's configuration."""
_MORE_S = 30
"""What a pod gets to end besides its ranks."""


def manifests(job: Job, config: str) -> list[Manifest]:
    """Everything to apply. config: the run's resolved configuration, as YAML."""
    name, namespace = job_name(job), job.cluster.kubernetes.namespace
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, namespace),
        "data": {"config.yaml": config},
    }
    if job.cluster.kubernetes.kind == "PyTorchJob":
        return [settings, _pytorch_job(job, name)]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, namespace),
        # without an address of its own: pods find one another by name, also while they start
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    return [settings, service, _indexed_job(job, name)]


def manifest_text(job: Job, config: str) -> str:
    """The manifests as one YAML file."""
    return "# Written by `megamem launch`; kubectl apply takes it.\n" + yaml.safe_dump_all(
        manifests(job, config), sort_keys=False, width=120
    )


def job_name(job: Job) -> str:
    """The run and when it was launched: a Job cannot be changed once it is there."""
    label = job.label(40)  # names of Services begin with a letter
    return f"{label if label[0].isalpha() else f'run-{job.label(36)}'}-{job.folder.name.lower()}"


def _metadata(name: str, namespace: str) -> Manifest:
    return {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/name": "megamem"}}


def _indexed_job(job: Job, name: str) -> Manifest:
    nodes, spec = job.cluster.nodes, job.cluster.kubernetes
    final = sorted(FINAL | (set() if job.again else {STOPPED}))
    rules: list[Manifest] = [
        {"action": "FailJob", "onExitCodes": {"containerName": "megamem", "operator": "In", "values": final}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    if job.again:  # a pod that is evicted stops the ranks of all
        stopped = {"containerName": "megamem", "operator": "In", "values": [STOPPED]}
        rules.append({"action": "Ignore", "onExitCodes": stopped})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(name, spec.namespace),
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": nodes * job.cluster.max_restarts,
            "podFailurePolicy": {"rules": rules},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": "megamem"}},
                "spec": {
                    "subdomain": name,
                    "restartPolicy": "Never",
                    **_pod(job, name, "megamem", f"{name}-0.{name}", "$(JOB_COMPLETION_INDEX)"),
                },
            },
        },
    }


def _pytorch_job(job: Job, name: str) -> Manifest:
    nodes, spec = job.cluster.nodes, job.cluster.kubernetes
    # the operator sets RANK to the number of the pod
    template = {
        "metadata": {"labels": {"app.kubernetes.io/name": "megamem"}},
        "spec": _pod(job, name, "pytorch", f"{name}-master-0", "$(RANK)"),
    }
    replicas = {"Master": 1, "Worker": nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(name, spec.namespace),
        "spec": {
            "runPolicy": {"backoffLimit": job.cluster.max_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                for kind, count in replicas.items()
                if count
            },
        },
    }


def _pod(job: Job, name: str, container: str, head: str, node_rank: str) -> Manifest:
    cluster, spec = job.cluster, job.cluster.kubernetes
    gpus = job.processes if spec.gpus is None else spec.gpus
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": name}},
        # NCCL and data loading share memory between processes; a container's own /dev/shm has 64 MB
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, (path, claim) in enumerate(spec.volumes.items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    command = [
        *job.agent(),
        "--job", name, "--head", head, "--port", str(cluster.port),
        "--node-rank", node_rank, "--address", "$(POD_IP)", "--",
        *("train", CONFIG),
    ]  # fmt: skip
    pod: Manifest = {
        "terminationGracePeriodSeconds": cluster.stop_seconds + _MORE_S,
        "containers": [
            {
                "name": container,
                "image": spec.image,
                "workingDir": spec.folder,
                "command": command,
                "env": [
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    *({"name": key, "value": value} for key, value in job.environment.items()),
                ],
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    if gpus:
        pod["containers"][0]["resources"] = {"limits": {spec.gpu_resource: gpus}}
    if spec.env_secret:
        pod["containers"][0]["envFrom"] = [{"secretRef": {"name": spec.env_secret}}]
    if spec.service_account:
        pod["serviceAccountName"] = spec.service_account
    return pod
