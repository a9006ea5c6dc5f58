"""What deploy/kubernetes makes keeps the rules of policy.py, each of which finds what breaks it."""

from collections.abc import Callable
from typing import Any

import pytest

from . import policy
from .manifests import INSTALLATIONS, Manifest, objects, one, pods
from .policy import RULES, Rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("installation", INSTALLATIONS)
def test_rules_are_kept(installation: str, rule: Rule) -> None:
    assert list(rule(objects(installation))) == []


def router(found: list[Manifest]) -> Any:
    return one(found, "Deployment", "diptych-router")["spec"]


def container(found: list[Manifest]) -> Any:
    return router(found)["template"]["spec"]["containers"][0]


def group(found: list[Manifest]) -> Any:
    return one(found, "RayCluster")["spec"]["workerGroupSpecs"][0]


def worker(found: list[Manifest]) -> Any:
    return group(found)["template"]["spec"]["containers"][0]


# What a rule finds, and what breaks it.
BROKEN: list[tuple[Rule, str, Callable[[list[Manifest]], object]]] = [
    (policy.host_namespaces, "namespace", lambda o: group(o)["template"]["spec"].update(hostIPC=True)),
    (policy.host_namespaces, "folder", lambda o: router(o)["template"]["spec"]["volumes"].append({"hostPath": {}})),
    (policy.host_namespaces, "port", lambda o: container(o)["ports"][0].update(hostPort=80)),
    (policy.rights, "root", lambda o: router(o)["template"]["spec"]["securityContext"].update(runAsUser=0)),
    (policy.rights, "system call", lambda o: group(o)["template"]["spec"]["securityContext"].pop("seccompProfile")),
    (policy.rights, "more rights", lambda o: container(o)["securityContext"].pop("allowPrivilegeEscalation")),
    (policy.rights, "capabilities", lambda o: worker(o)["securityContext"].update(capabilities={"add": ["SYS_ADMIN"]})),
    (policy.rights, "image", lambda o: worker(o)["securityContext"].pop("readOnlyRootFilesystem")),
    (policy.accounts, "account", lambda o: router(o)["template"]["spec"].pop("serviceAccountName")),
    (policy.accounts, "token", lambda o: router(o)["template"]["spec"].pop("automountServiceAccountToken")),
    (policy.images, "changes", lambda o: container(o).update(image="diptych:latest")),
    (policy.images, "changes", lambda o: container(o).update(image="registry:5000/diptych")),
    (policy.resources, "no bound", lambda o: container(o)["resources"]["limits"].pop("memory")),
    (policy.resources, "killed", lambda o: worker(o)["resources"]["requests"].update(memory="1Gi")),
    (policy.secrets, "written", lambda o: container(o)["env"].append({"name": "DIPTYCH_API_KEY", "value": "a"})),
    (policy.secrets, "twice", lambda o: container(o)["env"].append({"name": "RAY_ADDRESS", "value": "a"})),
    (policy.secrets, "has a key", lambda o: one(o, "ConfigMap")["data"].update({"a": "api_key: a"})),
    (policy.probes, "does not have", lambda o: container(o)["readinessProbe"]["httpGet"].update(port="web")),
    (policy.probes, "has no livenessProbe", lambda o: container(o).pop("livenessProbe")),
    (policy.targets, "selects no pod", lambda o: one(o, "Service")["spec"].update(selector={"app": "other"})),
    (policy.targets, "no port", lambda o: container(o)["ports"].pop()),
    (
        policy.targets,
        "scales nothing",
        lambda o: router(o) and one(o, "Deployment", "diptych-router").update(kind="Job"),
    ),
    (policy.availability, "fixes", lambda o: router(o).update(replicas=2)),
    (policy.availability, "away", lambda o: router(o).pop("strategy")),
    (policy.availability, "drain a machine", lambda o: group(o).update(minReplicas=1)),
    (policy.availability, "no budget", lambda o: o.remove(one(o, "PodDisruptionBudget", "diptych-decode"))),
    (policy.ends, "at once", lambda o: worker(o).pop("lifecycle")),
    (policy.ends, "killed", lambda o: router(o)["template"]["spec"].update(terminationGracePeriodSeconds=300)),
]


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=lambda n: f"{BROKEN[n][0].__name__}-{BROKEN[n][1]}")
def test_rules_find_what_breaks_them(number: int) -> None:
    rule, word, breaks = BROKEN[number]
    found = objects("default")
    breaks(found)
    assert any(word in text for text in rule(found)), list(rule(found))


def test_every_rule_is_seen_to_find_something() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)
    assert {pod.component for pod in pods(objects("default"))} == {"head", "worker", "router", "serve"}
