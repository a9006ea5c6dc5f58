"""The dashboard of `diptych serve` under load, while a worker is killed. The documentation's pictures are made here."""

import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ..support.browser import Page, browsing
from ..support.cluster_harness import Served, serving

pytestmark = [pytest.mark.browser, pytest.mark.cluster]
ROOT = Path(__file__).parents[2]
WORDS = ("prefill", "decode", "cache", "router", "worker", "block", "lease", "token", "the", "and", "moves", "keeps")
NUM_CLIENTS = 10
SIZES = {"wide": (1280, 1560), "phone": (390, 1560)}
SETTINGS = """
model: tiny
pools:
  prefill: {replicas: 1}
  decode: {replicas: 2}
"""


@contextmanager
def chats(url: str) -> Generator[list[int]]:
    """Clients that send one chat after another while the body runs. Yields the statuses of their answers."""
    stop, statuses = threading.Event(), list[int]()

    def client(seed: int) -> None:
        number = seed
        while not stop.is_set():
            number += NUM_CLIENTS
            words = [WORDS[(number * 7 + i * (number % 11 + 1)) % len(WORDS)] for i in range(20 + number * 37 % 280)]
            body = {"messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 100 + number * 53 % 300}
            statuses.append(http.post("/v1/chat/completions", json=body | {"ignore_eos": True}).status_code)

    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client, seed) for seed in range(NUM_CLIENTS)]
        try:
            yield statuses
        finally:
            stop.set()
    for each in clients:
        each.result()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    folder = tmp_path_factory.mktemp("dashboard")
    (config := folder / "cluster.yaml").write_text(SETTINGS)
    with serving(folder / "home", "--config", str(config)) as found:
        yield found


def killed_worker(served: Served) -> str:
    """Kill a decode worker. Returns its name."""
    victim = next(w for w in served.status()["workers"] if w["pool"] == "decode")
    os.kill(victim["pid"], signal.SIGKILL)
    return victim["worker_id"]


def take_pictures(page: Page, folder: Path) -> None:
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        page.run("new Promise(done => setTimeout(done, 1500))")  # charts are drawn once a second
        page.picture(folder / f"dashboard-{scheme}.png")
    page.prefer("light")
    page.resize(*SIZES["phone"])
    page.run("new Promise(done => setTimeout(done, 1500))")
    page.picture(folder / "dashboard-phone.png")
    page.resize(*SIZES["wide"])


def test_a_killed_worker_turns_red_and_comes_back_and_no_request_fails(served: Served, tmp_path: Path) -> None:
    url = served.http_address
    with browsing(*SIZES["wide"]) as page, chats(url) as statuses:
        page.open(f"{url}/dashboard")
        page.until_text("#link", "live")
        page.until_text("#workers-title", "prefill 1 of 1, decode 2 of 2")
        page.write("#chat-input", "What is a diptych?")
        page.click(".chat-form button")
        page.until_text("#chat-summary", "tokens")
        page.until(lambda: "decode" in page.texts(".request .phase"))
        page.until(lambda: len(statuses) > 8 * NUM_CLIENTS)  # the charts have something to show
        name = killed_worker(served)
        page.until_text(":is(.worker[data-state=down], .worker[data-state=lost]) .title", name)
        folder = Path(os.environ.get("DIPTYCH_PICTURES") or tmp_path)
        take_pictures(page, ROOT / folder)
        page.until(lambda: page.number_of(".worker[data-state=up]") == 3)
        page.until(lambda: not page.number_of(".worker[data-state=lost]"))
        assert name not in page.texts(".worker .title")
        assert page.errors() == []
        page.open("about:blank")
    assert set(statuses) == {200}
