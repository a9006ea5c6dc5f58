"""Rules of kube-linter and polaris for what stands in deploy/kubernetes, each a function: objects -> what breaks it."""

import re
from collections.abc import Callable, Iterator, Mapping

from .manifests import Manifest, PodTemplate, pods

Rule = Callable[[list[Manifest]], Iterator[str]]

HOST_KEYS = ("hostIPC", "hostPID", "hostNetwork")
SECRET = re.compile(r"(key|token|password|secret)", re.IGNORECASE)
WORKLOADS = ("Deployment", "RayCluster", "LeaderWorkerSet")


def selects(selector: Mapping[str, str], pod: PodTemplate) -> bool:
    return selector.items() <= pod.labels.items()


def _of_kind(found: list[Manifest], kind: str) -> Iterator[tuple[str, Manifest]]:
    yield from ((o["metadata"]["name"], o["spec"]) for o in found if o["kind"] == kind)


def host_namespaces(found: list[Manifest]) -> Iterator[str]:
    """host-ipc, host-pid, host-network; sensitive-host-mounts, docker-sock; polaris: hostPortSet."""
    for pod in pods(found):
        if any(pod.spec.get(key) for key in HOST_KEYS):
            yield f"{pod.where} shares a namespace of the machine"
        if any("hostPath" in volume for volume in pod.spec.get("volumes", ())):
            yield f"{pod.where} mounts a folder of the machine"
        if any("hostPort" in port for port in pod.container.get("ports", ())):
            yield f"{pod.where} takes a port of the machine"


def rights(found: list[Manifest]) -> Iterator[str]:
    """run-as-non-root, privileged-container, privilege-escalation-container, drop-net-raw-capability,
    no-read-only-root-fs; and the seccomp profile that the restricted pod security standard asks for."""
    for pod in pods(found):
        whole, own = pod.spec.get("securityContext", {}), pod.container.get("securityContext", {})
        if not whole.get("runAsNonRoot") or not whole.get("runAsUser"):
            yield f"{pod.where} may run as root"
        if whole.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.where} may make any system call"
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield f"{pod.where} may get more rights"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{pod.where} has capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{pod.where} may write to its image"
        if whole.get("sysctls"):
            yield f"{pod.where} sets sysctls"


def accounts(found: list[Manifest]) -> Iterator[str]:
    """default-service-account, non-existent-service-account; polaris: automountServiceAccountToken."""
    there = {o["metadata"]["name"] for o in found if o["kind"] == "ServiceAccount"}
    for pod in pods(found):
        if pod.spec.get("serviceAccountName", "default") not in there:
            yield f"{pod.where} has an account that is not made here"
        needs_token = any(
            spec.get("enableInTreeAutoscaling") for _, spec in _of_kind(found, "RayCluster") if pod.component == "head"
        )
        if pod.spec.get("automountServiceAccountToken") is not needs_token:
            yield f"{pod.where} has a token of Kubernetes and needs none, or the reverse"


def images(found: list[Manifest]) -> Iterator[str]:
    """latest-tag; polaris: pullPolicyNotAlways, tagNotSpecified."""
    for pod in pods(found):
        image = pod.container["image"]
        if "@sha256:" not in image and not re.search(r":(?!latest$)[\w.-]+$", image):
            yield f"{pod.where} has an image that changes: {image}"
        if "imagePullPolicy" not in pod.container:
            yield f"{pod.where} does not say when its image is pulled"


def resources(found: list[Manifest]) -> Iterator[str]:
    """unset-cpu-requirements, unset-memory-requirements; volumes in memory have a limit."""
    for pod in pods(found):
        amounts = pod.container.get("resources", {})
        if any(set(amounts.get(which, {})) < {"cpu", "memory"} for which in ("requests", "limits")):
            yield f"{pod.where} sets no bound on CPU or memory"
        if amounts.get("requests") != amounts.get("limits"):
            yield f"{pod.where} may be killed for another pod's use of memory"
        for volume in pod.spec.get("volumes", ()):
            if volume.get("emptyDir", {}).get("medium") == "Memory" and "sizeLimit" not in volume["emptyDir"]:
                yield f"{pod.where}: {volume['name']} may take all memory"


def secrets(found: list[Manifest]) -> Iterator[str]:
    """env-var-secret, duplicate-env-var; no Secret is made, and no ConfigMap has one."""
    for pod in pods(found):
        names = [variable["name"] for variable in pod.container.get("env", ())]
        if len(set(names)) < len(names):
            yield f"{pod.where} sets a variable twice"
        for variable in pod.container.get("env", ()):
            if SECRET.search(variable["name"]) and "secretKeyRef" not in variable.get("valueFrom", {}):
                yield f"{pod.where}: {variable['name']} is written in the manifest"
    for each in found:
        if each["kind"] == "Secret":
            yield f"the secret {each['metadata']['name']} is written in the manifest"
        if each["kind"] == "ConfigMap" and re.search(r"(api|metrics)_key:", str(each["data"])):
            yield f"the config {each['metadata']['name']} has a key"


def probes(found: list[Manifest]) -> Iterator[str]:
    """liveness-port, readiness-port, startup-port; no-liveness-probe, no-readiness-probe of what clients reach."""
    for pod in pods(found):
        ports = {port["name"] for port in pod.container.get("ports", ())}
        for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
            probe = pod.container.get(kind, {})
            port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
            if port is not None and port not in ports:
                yield f"{pod.where}: its {kind} asks a port that it does not have: {port}"
            if pod.component == "router" and not probe:
                yield f"{pod.where} has no {kind}"


def targets(found: list[Manifest]) -> Iterator[str]:
    """dangling-service, dangling-networkpolicy, dangling-hpa, dangling-servicemonitor, invalid-target-ports,
    mismatching-selector, and the same of disruption budgets."""
    there = list(pods(found))
    selectors = [(f"Service {name}", spec["selector"]) for name, spec in _of_kind(found, "Service")]
    for kind, key in (
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("Deployment", "selector"),
    ):
        selectors += [(f"{kind} {name}", spec[key]["matchLabels"]) for name, spec in _of_kind(found, kind)]
    for where, selector in selectors:
        if not any(selects(selector, pod) for pod in there):
            yield f"{where} selects no pod"
    for name, spec in _of_kind(found, "Service"):
        ports = {p["name"] for pod in there if selects(spec["selector"], pod) for p in pod.container.get("ports", ())}
        yield from (f"Service {name}: no port {p['targetPort']}" for p in spec["ports"] if p["targetPort"] not in ports)
    for name, spec in _of_kind(found, "HorizontalPodAutoscaler"):
        if not any(
            o["kind"] == spec["scaleTargetRef"]["kind"]
            for o in found
            if o["metadata"]["name"] == spec["scaleTargetRef"]["name"]
        ):
            yield f"HorizontalPodAutoscaler {name} scales nothing"
    for name, spec in _of_kind(found, "ServiceMonitor"):
        wanted = spec["selector"]["matchLabels"].items()
        services = [o for o in found if o["kind"] == "Service" and wanted <= o["metadata"]["labels"].items()]
        if len(services) != 1:
            yield f"ServiceMonitor {name} selects {len(services)} Services"
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        yield from (f"ServiceMonitor {name}: no port {e['port']}" for e in spec["endpoints"] if e["port"] not in ports)


def availability(found: list[Manifest]) -> Iterator[str]:
    """no-anti-affinity, no-rolling-update-strategy, pdb-max-unavailable, pdb-min-available, hpa of one pod; a budget of
    every group whose pods are several."""
    for name, spec in _of_kind(found, "HorizontalPodAutoscaler"):
        if not 1 <= spec["minReplicas"] <= spec["maxReplicas"] or spec["maxReplicas"] < 2:
            yield f"HorizontalPodAutoscaler {name} scales from {spec['minReplicas']} to {spec['maxReplicas']}"
    scaled = {spec["scaleTargetRef"]["name"] for _, spec in _of_kind(found, "HorizontalPodAutoscaler")}
    for name, spec in _of_kind(found, "Deployment"):
        if name in scaled and (
            "replicas" in spec or "podAntiAffinity" not in spec["template"]["spec"].get("affinity", {})
        ):
            yield f"Deployment {name} fixes how many, or puts all on one machine"
        if name in scaled and spec.get("strategy", {}).get("rollingUpdate", {}).get("maxUnavailable") != 0:
            yield f"Deployment {name} takes a pod away before another serves"
    budgets = list(_of_kind(found, "PodDisruptionBudget"))
    groups = {
        g["groupName"]: g["minReplicas"] for _, spec in _of_kind(found, "RayCluster") for g in spec["workerGroupSpecs"]
    }
    for name, spec in budgets:
        group = spec["selector"]["matchLabels"].get("diptych.io/group")
        if spec.get("maxUnavailable") == 0 or (group in groups and spec["minAvailable"] >= groups[group]):
            yield f"PodDisruptionBudget {name} lets nobody drain a machine"
    named = {spec["selector"]["matchLabels"].get("diptych.io/group") for _, spec in budgets}
    yield from (
        f"the group {name} has no budget" for name, number in groups.items() if number > 1 and name not in named
    )


def ends(found: list[Manifest]) -> Iterator[str]:
    """A pod with requests drains before it ends, and has the time for it."""
    for pod in pods(found):
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if pod.component in ("worker", "router", "picker") and not hook:
            yield f"{pod.where} ends at once"
        seconds = [int(word) for word in (hook[-1:] + re.findall(r"--drain (\d+)", str(pod.container.get("args"))))]
        if seconds and pod.spec["terminationGracePeriodSeconds"] <= sum(seconds):
            yield f"{pod.where} is killed before it has drained"


RULES: tuple[Rule, ...] = (
    host_namespaces,
    rights,
    accounts,
    images,
    resources,
    secrets,
    probes,
    targets,
    availability,
    ends,
)
