"""What the chart makes for a gateway names what is there: pods, ports, services, and the picker's own words."""

import re
import shlex
from typing import Any

import pytest

from diptych.cluster.common import config_file
from diptych.cluster.picker.command import KEYS
from diptych.cluster.picker.server import LIVENESS, READINESS, PickerConfig

from . import crds, policy
from .manifests import Manifest, PodTemplate, objects, one, pods, renderer
from .policy import selects

USUAL_BYTES = 160 << 20  # of a picker that keeps no body: 115 MiB were measured
MADE = {"InferencePool", "HTTPRoute"}


@pytest.fixture(scope="module")
def found() -> list[Manifest]:
    return objects("gateway")


def the(component: str, found: list[Manifest]) -> PodTemplate:
    [pod] = [pod for pod in pods(found) if pod.component == component]
    return pod


def ports(pod: PodTemplate) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in pod.container["ports"]}


def flags(pod: PodTemplate) -> dict[str, list[str]]:
    words = shlex.split(pod.container["args"][0].removeprefix("exec diptych endpoint-picker "))
    made: dict[str, list[str]] = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        made.setdefault(name, []).append(value)
    return made


def test_nothing_of_it_is_there_unless_it_is_asked_for() -> None:
    usual = objects("default")
    assert not {o["kind"] for o in usual} & MADE
    assert not [o for o in usual if o["metadata"]["name"].endswith(("-picker", "-routers", "-gateway"))]


def test_the_pool_is_of_the_routers_and_its_picker_is_there(found: list[Manifest]) -> None:
    spec = one(found, "InferencePool")["spec"]
    chosen = {pod.component for pod in pods(found) if selects(spec["selector"]["matchLabels"], pod)}
    assert chosen == {"router"}
    assert [port["number"] for port in spec["targetPorts"]] == [ports(the("router", found))["http"]]
    reference = spec["endpointPickerRef"]
    service = one(found, "Service", reference["name"])["spec"]
    assert selects(service["selector"], the("picker", found))
    targets = {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]}
    assert targets == {"ext-proc": (reference["port"]["number"], "ext-proc"), "metrics": (9090, "metrics")}


def test_prometheus_reads_routers_and_pickers_each_by_a_service_of_its_own(found: list[Manifest]) -> None:
    there = [o["spec"] for o in found if o["kind"] == "ServiceMonitor"]
    read = {o["selector"]["matchLabels"]["app.kubernetes.io/component"]: o["endpoints"][0]["port"] for o in there}
    assert read == {"router": "http", "picker": "metrics"}
    broken = objects("gateway")
    one(broken, "Service", "diptych-picker")["spec"]["ports"].pop()
    assert "ServiceMonitor diptych-picker: no port metrics" in list(policy.targets(broken))


def test_the_route_leads_to_the_pool_and_is_made_for_gateways_alone(found: list[Manifest]) -> None:
    pool, route = one(found, "InferencePool"), one(found, "HTTPRoute")["spec"]
    [rule] = route["rules"]
    [backend] = rule["backendRefs"]
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    bare = renderer.objects({"gateway": {"enabled": True}})
    assert {o["kind"] for o in bare} & MADE == {"InferencePool"}


def test_the_picker_listens_where_it_is_asked_and_asks_where_routers_are(found: list[Manifest]) -> None:
    pod, given = the("picker", found), flags(the("picker", found))
    listening = {
        name: int(given[f"--{flag}"][0])
        for name, flag in (("ext-proc", "port"), ("health", "health-port"), ("metrics", "metrics-port"))
    }
    assert ports(pod) == listening
    [address] = given["--router"]
    name, _, port = address.rpartition(":")
    service = one(found, "Service", name)["spec"]
    assert service["clusterIP"] == "None", "its name leads to every router"
    assert selects(service["selector"], the("router", found))
    assert int(port) == ports(the("router", found))["http"]
    assert given["--objective"] == ["batch=-10"]


def test_numbers_are_written_as_they_were_given() -> None:
    """Helm reads numbers as floats, and Go writes those of a million and more with an exponent."""
    values = {"gateway": {"enabled": True, "objectives": {"top": 1_000_000, "low": -12_345_678}}}
    values |= {"drainSeconds": 1_000_000, "autoscaling": {"idleTimeoutSeconds": 1_000_000}}
    given = flags(the("picker", renderer.objects(values)))
    assert given["--objective"] == ["low=-12345678", "top=1000000"]
    assert given["--drain"] == ["1000000"]
    assert not [line for text in renderer.render(values) for line in text.splitlines() if re.search(r"\de\+\d", line)]


def test_a_picker_has_memory_for_the_bodies_that_it_keeps(found: list[Manifest]) -> None:
    limit = the("picker", found).container["resources"]["limits"]["memory"]
    kept = (
        3 * PickerConfig(("diptych-routers:8000",)).max_kept_bytes
    )  # as they come, as they are sent on, and what is inflated or changed
    assert int(limit.removesuffix("Mi")) << 20 >= USUAL_BYTES + kept


def test_the_picker_knows_routers_that_are_not_ready(found: list[Manifest]) -> None:
    """One that drains answers for the responses that it keeps."""
    assert one(found, "Service", "diptych-routers")["spec"]["publishNotReadyAddresses"] is True


def test_probes_ask_what_the_picker_answers(found: list[Manifest]) -> None:
    pod = the("picker", found)
    for kind, name in (("readinessProbe", READINESS), ("livenessProbe", LIVENESS)):
        assert pod.container[kind]["grpc"] == {"port": ports(pod)["health"], "service": name}


def test_the_picker_has_a_key_for_the_load_of_routers(found: list[Manifest]) -> None:
    names = {variable["name"] for variable in the("picker", found).container["env"]}
    assert names == set(KEYS) == set(config_file.KEY_VARIABLES.values())


def test_the_gateway_reaches_pickers_and_no_more_of_them(found: list[Manifest]) -> None:
    policy = one(found, "NetworkPolicy", "diptych-gateway")["spec"]
    assert {pod.component for pod in pods(found) if selects(policy["podSelector"]["matchLabels"], pod)} == {"picker"}
    [rule] = policy["ingress"]
    assert {port["port"] for port in rule["ports"]} == {"ext-proc", "metrics"}
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    made = renderer.objects({"gateway": {"enabled": True, "from": peers}})
    assert one(made, "NetworkPolicy", "diptych-gateway")["spec"]["ingress"][0]["from"] == peers


def test_names_of_models_may_have_any_form() -> None:
    rewrites = {"gpt-4o": "meta-llama/Llama-3.1-8B", 'a"b$(c)': "d`e"}
    made = renderer.objects({"gateway": {"enabled": True, "modelRewrites": rewrites, "fallbacks": 2}})
    given = flags(the("picker", made))
    assert dict(each.split("=", 1) for each in given["--model-rewrite"]) == rewrites
    assert given["--fallbacks"] == ["2"]
    made = renderer.objects({"gateway": {"enabled": True, "modelRewriteHeader": True}})
    assert the("picker", made).container["args"][0].split()[-1] == "--model-rewrite-header"


@pytest.mark.parametrize("change", [{"selector": {}}, {"targetPorts": []}, {"endpointPickerReference": {}}])
def test_the_schemas_find_what_a_pool_may_not_say(found: list[Manifest], change: dict[str, Any]) -> None:
    pool = one(found, "InferencePool")
    with pytest.raises(crds.jsonschema.ValidationError):
        crds.check(pool | {"spec": pool["spec"] | change})
