"""The pods of deploy/kubernetes have room for the workers that its cluster.yaml asks for, and for their KV."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diptych.cluster.common.config import ClusterConfig, PoolConfig

from .manifests import INSTALLATIONS, Manifest, PodTemplate, objects, one, pods
from .test_kubernetes_names import load

LABEL = "diptych.io/group"
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Group:
    """Pods of one kind: how many, and what each has."""

    pod: PodTemplate
    least: int
    number: int
    most: int

    def has(self, resource: str) -> float:
        return amount(self.pod.container["resources"]["limits"].get(resource, "0"))


def amount(text: str) -> float:
    return float(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else float(text)


@pytest.fixture(params=INSTALLATIONS)
def found(request: pytest.FixtureRequest) -> list[Manifest]:
    return objects(request.param)


@pytest.fixture
def config(found: list[Manifest], tmp_path: Path) -> ClusterConfig:
    return load(found, tmp_path)


@pytest.fixture
def groups(found: list[Manifest]) -> dict[str, Group]:
    by_name = {pod.labels[LABEL]: pod for pod in pods(found) if LABEL in pod.labels}
    made: dict[str, Group] = {}
    for each in found:
        if each["kind"] == "RayCluster":
            for group in each["spec"]["workerGroupSpecs"]:
                name = group["groupName"]
                assert group["labels"] == {LABEL: name}, "becomes the Ray nodes' label"
                made[name] = Group(by_name[name], group["minReplicas"], group["replicas"], group["maxReplicas"])
        if each["kind"] == "LeaderWorkerSet":
            number = each["spec"]["leaderWorkerTemplate"]["size"] - 1
            [(name, pod)] = by_name.items()
            assert f"--labels={LABEL}={name} " in pod.container["args"][0]
            made[name] = Group(pod, number, number, number)
    return made


def used(config: ClusterConfig) -> dict[str, PoolConfig]:
    return {name: pool for name, pool in config.pools.items() if pool.bounds[1]}


def test_every_pool_has_a_group(config: ClusterConfig, groups: dict[str, Group]) -> None:
    chosen = {name: pool.label_selector for name, pool in used(config).items()}
    assert all(list(labels) == [LABEL] for labels in chosen.values())
    assert {labels[LABEL] for labels in chosen.values()} == set(groups)


@pytest.mark.parametrize("which", ["number", "most"])
def test_pods_take_all_workers(config: ClusterConfig, groups: dict[str, Group], which: str) -> None:
    """Whole workers, the largest first, each on as many pods as it asks for: each pod's CPUs and GPUs."""
    for name, group in groups.items():
        pools = [pool for pool in used(config).values() if pool.label_selector[LABEL] == name]
        machines = [pool.parallel.machines_per_worker for pool in pools]
        workers = [
            (config.gpus_of(pool) / num, pool.num_cpus / num, num)
            for pool, num in zip(pools, machines, strict=True)
            for _ in range(pool.replicas if which == "number" else pool.bounds[1])
        ]
        free = [[group.has("nvidia.com/gpu"), group.has("cpu")] for _ in range(getattr(group, which))]
        for gpus, cpus, num in sorted(workers, reverse=True):
            places = [pod for pod in free if pod[0] >= gpus and pod[1] >= cpus][:num]
            assert len(places) == num, f"no room in {name} for a worker of {cpus} CPUs and {gpus} GPUs on {num} pods"
            for place in places:
                place[0] -= gpus
                place[1] -= cpus


def test_pods_grow_only_where_pools_do(config: ClusterConfig, groups: dict[str, Group], found: list[Manifest]) -> None:
    for name, group in groups.items():
        pools = [pool for pool in used(config).values() if pool.label_selector[LABEL] == name]
        assert (group.least < group.most) == any(pool.bounds[0] < pool.bounds[1] for pool in pools)
        if group.least < group.most:
            assert one(found, "RayCluster")["spec"]["enableInTreeAutoscaling"]


def test_gpus_are_asked_for_where_the_device_is_one(config: ClusterConfig, groups: dict[str, Group]) -> None:
    for group in groups.values():
        assert (group.has("nvidia.com/gpu") > 0) == config.is_on_gpus


def test_kv_fits_into_memory_or_huge_pages(config: ClusterConfig, groups: dict[str, Group]) -> None:
    for name, group in groups.items():
        pools = [pool for pool in used(config).values() if pool.label_selector[LABEL] == name]
        bytes_of: list[Any] = [
            (kv_bytes(config, pool_name), pool) for pool_name, pool in used(config).items() if pool in pools
        ]
        if any(num is None for num, _ in bytes_of):
            continue  # a fraction of what is free
        densest = max(num / pool.num_cpus for num, pool in bytes_of)
        most = densest * group.has("cpu")  # of whatever workers share a pod
        assert most <= (group.has("hugepages-2Mi") or group.has("memory") / 2), name


def kv_bytes(config: ClusterConfig, pool: str) -> int | None:
    return config.worker(pool).cache.kv_memory_bytes


def test_drains_last_as_long_as_the_pods_may(config: ClusterConfig, found: list[Manifest]) -> None:
    for pod in pods(found):
        if pod.component == "worker":
            seconds = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][-1])
            assert seconds == config.drain_timeout_s
            assert pod.spec["terminationGracePeriodSeconds"] > seconds


def test_every_pod_that_reads_the_model_has_it(config: ClusterConfig, found: list[Manifest]) -> None:
    for pod in pods(found):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        reads_none = pod.component == "picker" or (
            pod.component == "head" and "diptych" not in str(pod.container.get("args"))
        )
        assert ("models" in volumes) != reads_none
        if not reads_none:
            assert ("persistentVolumeClaim" in volumes["models"]) == config.shared.model.model.startswith("/models/")
            assert {"name": "models", "mountPath": "/models", "readOnly": True} in pod.container["volumeMounts"]
    made = [o["metadata"]["name"] for o in found if o["kind"] == "PersistentVolumeClaim"]
    assert made in ([], ["diptych-models"])
