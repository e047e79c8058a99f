"""Kubernetes: the manifests of an Indexed Job or a PyTorchJob, with what it needs, handed to kubectl."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field, NonNegativeInt

from launchers.commands import call_if
from launchers.config import ClusterConfig, Word
from launchers.job import Job
from launchers.node import TOKEN
from launchers.target import Report, Target, register
from megamem.errors import FINAL, STOPPED, ConfigError

Manifest = dict[str, object]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]

CONFIG = "/etc/megamem/config.yaml"
"""The path at which pods find the run's configuration."""
_EXTRA_S = 30
"""Seconds that a pod has to end besides those of its ranks."""


@register
class KubernetesTarget(Target):
    """A Kubernetes cluster."""

    name: ClassVar[str] = "kubernetes"
    restarts_stopped_jobs: ClassVar[bool] = True

    image: Word | None = None
    """Container image with megamem installed."""
    namespace: Name = "default"
    """Namespace of the job."""
    kind: Literal["Job", "PyTorchJob"] = "Job"
    """`Job`: an Indexed Job of Kubernetes itself. `PyTorchJob`: of the Kubeflow training operator."""
    gpu_resource: Word = "nvidia.com/gpu"
    """Name of the GPU resource."""
    gpus: NonNegativeInt | None = None
    """GPUs of a pod; one per process if not given, 0 for none."""
    volumes: dict[Annotated[str, Field(pattern=r"^/")], Name] = {}
    """Mount path: persistent volume claim. The run folder must be on one that all pods may write to."""
    folder: Annotated[str, Field(pattern=r"^/")] = "/work"
    """Working folder of the pods, to which relative paths of the run refer."""
    service_account: Name | None = None
    """Service account of the pods."""
    env_secret: Name | None = None
    """Secret whose entries become environment variables, such as WANDB_API_KEY."""

    def check(self, cluster: ClusterConfig) -> None:
        """See `Target.check`."""
        if self.image is None:
            raise ConfigError("kubernetes.image: required, but not given; name a container image that has megamem")

    def files(self, job: Job, config: str) -> dict[str, str]:
        """See `Target.files`."""
        text = yaml.safe_dump_all(self.manifests(job, config), sort_keys=False, width=120)
        return {"job.yaml": f"# Written by `megamem launch`; kubectl apply takes it.\n{text}"}

    def start(self, job: Job, submit: bool, report: Report) -> int:
        """See `Target.start`."""
        report(call_if(submit, ["kubectl", "apply", "-f", str(job.folder / "job.yaml")]))
        return 0

    def manifests(self, job: Job, config: str) -> list[Manifest]:
        """Return everything to apply. config: the run's resolved configuration, as YAML."""
        name = job_name(job)
        settings: Manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._metadata(name),
            "data": {"config.yaml": config},
        }
        token: Manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(name),
            "stringData": {"token": job.token},
        }
        if self.kind == "PyTorchJob":
            return [settings, token, self._pytorch_job(job, name)]
        service: Manifest = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(name),
            # without an address of its own: pods find one another by name, also while they start
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": name},
            },
        }
        return [settings, token, service, self._indexed_job(job, name)]

    def _metadata(self, name: str) -> Manifest:
        """Return the metadata of every object of a job."""
        return {"name": name, "namespace": self.namespace, "labels": {"app.kubernetes.io/name": "megamem"}}

    def _indexed_job(self, job: Job, name: str) -> Manifest:
        """Return an Indexed Job, whose pods know their number and whose failures are judged by exit code."""
        nodes = job.cluster.nodes
        final = sorted(FINAL | (set() if job.resumes else {STOPPED}))
        rules: list[Manifest] = [
            {"action": "FailJob", "onExitCodes": {"containerName": "megamem", "operator": "In", "values": final}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        if job.resumes:  # a pod that is evicted stops the ranks of all
            stopped = {"containerName": "megamem", "operator": "In", "values": [STOPPED]}
            rules.append({"action": "Ignore", "onExitCodes": stopped})
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(name),
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
                        **self._pod(job, name, "megamem", f"{name}-0.{name}", "$(JOB_COMPLETION_INDEX)"),
                    },
                },
            },
        }

    def _pytorch_job(self, job: Job, name: str) -> Manifest:
        """Return a PyTorchJob: one pod as master, the others as workers."""
        nodes = job.cluster.nodes
        # the operator sets RANK to the number of the pod
        template: Manifest = {
            "metadata": {"labels": {"app.kubernetes.io/name": "megamem"}},
            "spec": self._pod(job, name, "pytorch", f"{name}-master-0", "$(RANK)"),
        }
        replicas = {"Master": 1, "Worker": nodes - 1}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": self._metadata(name),
            "spec": {
                "runPolicy": {"backoffLimit": job.cluster.max_restarts, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": {
                    kind: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
                    for kind, count in replicas.items()
                    if count
                },
            },
        }

    def _pod(self, job: Job, name: str, container: str, head: str, node_rank: str) -> Manifest:
        """Return the specification of a pod: one container, which runs the agent of one node.

        Args:
            name: of the job and of the ConfigMap with the run's configuration.
            container: name of the container.
            head: host name of the pod that holds the rendezvous.
            node_rank: the pod's number, or the variable that Kubernetes puts in its place.
        """
        cluster = job.cluster
        gpus = job.processes if self.gpus is None else self.gpus
        volumes: list[Manifest] = [
            {"name": "config", "configMap": {"name": name}},
            # NCCL and data loading share memory between processes; a container's own /dev/shm has 64 MB
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        mounts: list[Manifest] = [
            {"name": "config", "mountPath": CONFIG.rpartition("/")[0], "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        for number, (path, claim) in enumerate(self.volumes.items()):
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
            mounts.append({"name": f"volume-{number}", "mountPath": path})
        command = [
            *job.agent_command(),
            "--job", name, "--head", head, "--port", str(cluster.port),
            "--node-rank", node_rank, "--address", "$(POD_IP)", "--",
            *("train", CONFIG),
        ]  # fmt: skip
        main: Manifest = {
            "name": container,
            "image": self.image,
            "workingDir": self.folder,
            "command": command,
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}},
                *({"name": key, "value": value} for key, value in job.environment.items()),
            ],
            "volumeMounts": mounts,
        }
        if gpus:
            main["resources"] = {"limits": {self.gpu_resource: gpus}}
        if self.env_secret:
            main["envFrom"] = [{"secretRef": {"name": self.env_secret}}]
        pod: Manifest = {
            "terminationGracePeriodSeconds": cluster.stop_seconds + _EXTRA_S,
            "containers": [main],
            "volumes": volumes,
        }
        if self.service_account:
            pod["serviceAccountName"] = self.service_account
        return pod


def job_name(job: Job) -> str:
    """Return the run's name and the time of its launch: a Job cannot be changed once it is there."""
    label = job.label(40)  # names of Services begin with a letter
    return f"{label if label[0].isalpha() else f'run-{job.label(36)}'}-{job.folder.name.lower()}"
