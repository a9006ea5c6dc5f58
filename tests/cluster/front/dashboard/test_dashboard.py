"""The dashboard's data and files over HTTP: who may read them, what they say, and what they cost."""

import re
import threading
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from diptych.cluster.common.demand import ControlReport, ControlSeries, DecisionNote, PoolNote
from diptych.cluster.front.dashboard import snapshots
from diptych.cluster.front.dashboard.pages import ASSETS, KINDS
from diptych.cluster.front.dashboard.requests import COLUMNS, PHASES
from diptych.proto import worker_pb2
from diptych.workers.common.request import FinishReason

from ....support.front import Echo, served
from ....support.watched import WatchedRouter, watched

Json = dict[str, object]
KEY, METRICS_KEY = "sesame-sesame", "only-for-metrics"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "service_tier": "auto"}
DOCS = Path(__file__).parents[4] / "docs" / "dashboard.md"


@pytest.fixture(scope="module")
def router() -> Generator[WatchedRouter]:
    with watched() as found:
        while httpx.get(f"{found.url}/health").status_code != 200:
            pass
        yield found


def read(router: WatchedRouter, holds: str = "") -> dict[str, list[dict[str, object]]]:
    """Newest data; with requests as objects. `holds`: a phase that one of them must have."""
    while True:
        found = httpx.get(f"{router.url}/dashboard/data").json()
        for name in ("live", "ended"):
            found[name] = [dict(zip(found["columns"], row, strict=True)) for row in found[name]]
        if not holds or any(row["phase"] == holds for row in found["live"] + found["ended"]):
            return found


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_request_is_told_of_in_each_of_its_phases(router: WatchedRouter) -> None:
    read(router)  # from now on those that end are kept
    url = f"{router.url}/v1/chat/completions"
    asked = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": ASKED, "timeout": 60})
    asked.start()
    prefill, decode = router.workers
    source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
    found = read(router, "prefill")
    [row] = found["live"]
    assert found["num_live"] == 1 and row["num_output"] == 0 and row["timings"] is None and row["outcome"] is None
    assert [found["names"][i] for i in (row["source"], row["worker"])] == [prefill.incarnation, decode.incarnation]  # type: ignore[index]
    router.do(lambda: prefill.first_token(source))
    [row] = read(router, "pull")["live"]
    assert row["first_at"] is not None and row["second_at"] is None and row["num_output"] == 1
    router.do(lambda: decode.pulled_tokens(sink, 2))
    [row] = read(router, "decode")["live"]
    assert row["transport"] == "nixl" and row["handoff_bytes"] == 1 << 20
    assert dict(zip(PHASES, row["timings"], strict=True))["pull"] == 0.008  # type: ignore[arg-type]
    router.do(lambda: decode.tokens(sink, [300], start=3, finish=FinishReason.LENGTH))
    asked.join()
    found = read(router, "ended")
    assert found["live"] == [] and found["num_live"] == 0
    row = found["ended"][0]
    assert row["outcome"] == "length" and row["num_output"] == 4 and row["tier"] == "default"
    assert found["totals"]["ended"]["length"] == 1  # type: ignore[call-overload]


def test_workers_and_links_are_as_they_have_reported(router: WatchedRouter) -> None:
    prefill, decode = router.workers
    link = worker_pb2.PeerLink(incarnation=prefill.incarnation, transport="nixl", num_bytes=4096, num_reads=2)
    counts = {"num_running": 3, "num_open_leases": 4, "num_late_leases": 1, "num_expired_leases": 2}
    router.do(lambda: decode.load(num_free=56, num_leased_blocks=8, links=[link], **counts))
    while not (found := read(router))["links"]:
        pass
    [worker] = [each for each in found["workers"] if each["id"] == decode.incarnation]
    assert worker["name"] == "decode-2" and worker["node"] == "127.0.0.1" and worker["state"] == "up"
    assert worker["num_used_blocks"] == 200 and worker["num_leased_blocks"] == 8
    assert {name: worker[name] for name in counts} == counts
    [told] = found["links"]
    assert (told["worker"], told["source"], told["num_bytes"]) == (decode.incarnation, prefill.incarnation, 4096)


def test_the_supervisors_word_is_passed_on(router: WatchedRouter) -> None:
    decision = DecisionNote(5.0, "budgets", "mixed", "flip 1", "it pays", "", has_failed=False)
    made = ControlSeries("controller_decisions", "Decisions", "kind", (("budgets", 3.0),), is_counter=True)
    report = ControlReport(None, (made,), (decision,), (PoolNote("decode", 2, 1, 1, 0, "lost decode-1"),))
    router.do(lambda: router.process.on_control(report))
    while not (found := read(router))["decisions"]:
        pass
    [told] = found["decisions"]
    assert told["action"] == "flip 1" and told["reason"] == "it pays"
    assert 4.0 < found["now"] - told["at"] < 60.0  # type: ignore[operator]
    assert found["pools"][0]["last_error"] == "lost decode-1"
    assert found["control"] == {"controller_decisions": {"budgets": 3.0}}


def test_what_has_not_changed_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PACE_S", 3600.0)  # however long the next call takes
    with watched() as own:
        first = httpx.get(f"{own.url}/dashboard/data")
        again = httpx.get(f"{own.url}/dashboard/data", headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and again.content == b"" and first.headers["cache-control"] == "no-store"
        plain = httpx.get(f"{own.url}/dashboard/data", headers={"accept-encoding": "identity"})
        assert plain.json() == first.json()


def test_all_who_look_share_one_computation(router: WatchedRouter) -> None:
    with httpx.Client(base_url=router.url) as http:
        clocks = [http.get("/dashboard/data").json()["now"] for _ in range(50)]
    assert len(set(clocks)) < 50


def test_the_page_needs_no_key_and_its_data_the_operators() -> None:
    with watched((), api_key=KEY, metrics_key=METRICS_KEY) as guarded, httpx.Client(base_url=guarded.url) as http:
        assert http.get("/dashboard").status_code == 200
        for name in assets_of_the_page():
            assert http.get(f"/dashboard/assets/{name}").status_code == 200
        for key, status in ((KEY, 200), (METRICS_KEY, 200), ("wrong", 401)):
            assert http.get("/dashboard/data", headers=bearer(key)).status_code == status
        assert http.get("/dashboard/data").status_code == 401


def test_a_key_of_a_file_does_not_open_the_data(tmp_path: Path) -> None:
    (keys := tmp_path / "keys.yaml").write_text("ann: anns-own-secret-key\n")
    keys.chmod(0o600)
    with watched((), api_keys_file=str(keys)) as guarded, httpx.Client(base_url=guarded.url) as http:
        assert http.get("/v1/models", headers=bearer("anns-own-secret-key")).status_code != 401
        assert http.get("/dashboard/data", headers=bearer("anns-own-secret-key")).status_code == 401


def test_a_server_without_a_router_has_no_data() -> None:
    with served(Echo(laps=1)) as server:
        answer = httpx.get(f"{server.url}/dashboard/data")
        assert answer.status_code == 503 and "no router" in answer.json()["error"]["message"]


def assets_of_the_page() -> set[str]:
    return set(re.findall(r"dashboard/assets/([\w.-]+)", (ASSETS / "index.html").read_text()))


def test_the_page_allows_no_code_but_its_own_files(router: WatchedRouter) -> None:
    page = httpx.get(f"{router.url}/dashboard")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", page.text)


def test_files_of_the_page_are_served_as_they_are_and_no_others(router: WatchedRouter) -> None:
    with httpx.Client(base_url=router.url) as http:
        for path in ASSETS.iterdir():
            answer = http.get(f"/dashboard/assets/{path.name}")
            assert answer.content == path.read_bytes() and answer.headers["content-type"] == KINDS[path.suffix]
            tag = {"if-none-match": answer.headers["etag"]}
            assert http.get(f"/dashboard/assets/{path.name}", headers=tag).status_code == 304
        for name in ("none.js", "..%2fpages.py", "%2e%2e%2fpages.py", ""):
            assert http.get(f"/dashboard/assets/{name}").status_code == 404


def test_the_page_asks_no_other_host_and_reads_nothing_as_html() -> None:
    """URLs are relative, so that it works at any path."""
    for path in ASSETS.iterdir():
        text = path.read_text()
        if path.name.startswith("uplot"):
            continue
        assert not re.search(r"(?:src|href|fetch\()\s*=?\s*[\"'`](?:https?:)?/", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.js")), ids=lambda p: p.name)
def test_scripts_are_short(path: Path) -> None:
    if not path.name.startswith("uplot"):
        assert len(path.read_text().splitlines()) <= 400


def test_what_is_told_is_documented(router: WatchedRouter) -> None:
    words = set(re.findall(r"`(\w+)`", DOCS.read_text()))
    found = read(router)
    assert words >= {*COLUMNS, *PHASES, *found.keys()}
