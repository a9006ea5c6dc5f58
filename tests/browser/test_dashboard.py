"""The dashboard in a real browser, over a router whose workers do what the test says."""

import asyncio
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import httpx
import pytest

from diptych.workers.common.errors import DiptychError
from diptych.workers.common.request import FinishReason, Request, SamplingParams

from ..support.browser import Page, behind, browsing
from ..support.watched import WatchedRouter, watched

pytestmark = pytest.mark.browser
KEY = "sesame-sesame"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
BARS = ".request .bar:not(.thin) .segment"


@pytest.fixture(scope="module")
def page() -> Generator[Page]:
    with browsing() as found:
        yield found


@contextmanager
def seen(page: Page, *names: str, **settings: object) -> Generator[WatchedRouter]:
    """A router whose page is left before it ends."""
    with watched(names or ("prefill-1", "decode-2"), **settings) as found:
        try:
            yield found
        finally:
            page.open("about:blank")


@pytest.fixture
def router(page: Page) -> Generator[WatchedRouter]:
    with seen(page) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_complains(page: Page) -> Generator[None]:
    """Nothing that a test does may leave an error in the console."""
    page.errors()
    yield
    assert page.errors() == []


def open_dashboard(page: Page, url: str) -> None:
    page.open(f"{url}/dashboard")
    page.until_text("#link", "live")


def ask(router: WatchedRouter, **more: object) -> threading.Thread:
    """Send a chat on a thread of its own."""
    url, given = f"{router.url}/v1/chat/completions", {"json": ASKED | more, "timeout": 60}
    thread = threading.Thread(target=httpx.post, args=(url,), kwargs=given)
    thread.start()
    return thread


def segments(page: Page) -> list[str]:
    """Names of the segments of the first request."""
    classes: list[str] = page.run(f"[...document.querySelectorAll('{BARS}')].map(e => e.className)")
    return [name.removeprefix("segment ") for name in classes]


def test_a_request_appears_moves_through_its_phases_and_ends(page: Page, router: WatchedRouter) -> None:
    open_dashboard(page, router.url)
    assert page.text("#requests-count") == "0 live"
    asked = ask(router)
    prefill, decode = router.workers
    source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
    page.until_text(".request .phase", "prefill")
    assert page.text(".request .route") == "prefill-1 → decode-2"
    assert "prefill open" in segments(page)
    router.do(lambda: prefill.first_token(source))
    page.until_text(".request .phase", "pull")
    page.until(lambda: segments(page)[-1:] == ["pull open"])
    router.do(lambda: decode.pulled_tokens(sink, 3))
    page.until_text(".request .phase", "decode")
    page.until(lambda: segments(page)[-1:] == ["decode open"])
    shown = segments(page)
    assert [name for name in ("queue", "prefill", "pull", "wait", "decode") if name in shown] == [
        "queue",
        "prefill",
        "pull",
        "wait",
        "decode",
    ]
    router.do(lambda: decode.tokens(sink, [300] * 4, start=4, finish=FinishReason.LENGTH))
    page.until_text(".request .phase", "length")
    page.until_text("#requests-count", "0 live")
    page.until_text(".chips", "ended 1")
    asked.join()


def test_the_phases_of_a_chosen_request_are_shown_and_keys_choose_it(page: Page, router: WatchedRouter) -> None:
    open_dashboard(page, router.url)
    asked = ask(router)
    prefill, decode = router.workers
    source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
    router.do(lambda: prefill.first_token(source))
    router.do(lambda: decode.pulled_tokens(sink, 7, finish=FinishReason.LENGTH))
    asked.join()
    page.until_text(".request .phase", "length")
    page.run("document.querySelector('.requests').focus()")
    page.press("ArrowDown")
    page.until_text(".detail", "reads in all (beside the prefill)8.0 ms")
    assert "1.0 MB of KV by nixl" in page.text(".detail")
    assert page.run("document.querySelector('.request').ariaSelected") == "true"


def test_a_worker_that_is_killed_turns_red_until_another_takes_its_place(page: Page, router: WatchedRouter) -> None:
    open_dashboard(page, router.url)
    page.until(lambda: page.number_of(".worker[data-state=up]") == 2)
    lost = router.workers.pop()
    router.call(lost.kill())
    page.until_text(".worker[data-state=down] .title", "decode-2")
    red = "getComputedStyle(document.querySelector('.worker[data-state=down]')).borderTopColor"
    page.until(lambda: page.run(red) == "rgb(179, 38, 30)")
    router.list_workers()  # the supervisor has seen it
    page.until_text(".worker[data-state=lost] .state", "lost")
    page.until_text(".events", "decode-2 is gone")
    router.add_worker("decode", "decode-3")
    page.until(lambda: page.number_of(".worker[data-state=up]") == 2 and not page.number_of(".worker[data-state=lost]"))
    assert "decode-3" in page.text(".worker[data-state=up] .title")


def test_the_chat_shows_the_worker_and_the_time_of_each_token(page: Page, router: WatchedRouter) -> None:
    open_dashboard(page, router.url)
    page.click(".chat-form button")
    prefill, decode = router.workers
    source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
    router.do(lambda: prefill.first_token(source))
    router.do(lambda: decode.pulled_tokens(sink, 3, finish=FinishReason.STOP))
    page.until_text("#chat-summary", "4 tokens")
    assert page.text("#chat .legend") == "prefill-1decode-2"
    assert page.texts("#chat td:nth-child(3)") == ["prefill-1", "decode-2", "decode-2", "decode-2"]
    assert all(re.fullmatch(r"[\d.]+ m?s", each) for each in page.texts("#chat td:nth-child(4)"))


def test_of_many_requests_only_those_in_sight_have_elements(page: Page, router: WatchedRouter) -> None:
    """The list can be scrolled to the oldest, and a worker's card shows its requests alone."""
    num = 200
    clients: list[asyncio.Task[None]] = []

    async def client(number: int) -> None:
        request = Request(f"request-{number}", (3, 4, 5), SamplingParams(max_tokens=4), timeout_s=600.0)
        with suppress(DiptychError):  # the router ends first
            async for _ in router.process.router.stream(request):
                pass

    open_dashboard(page, router.url)
    router.do(lambda: clients.extend(asyncio.create_task(client(number)) for number in range(num)))
    page.until_text(".chips", f"prefill {num}")
    assert page.text("#requests-count") == f"{num} live"
    assert 5 < page.number_of(".request") < 40
    assert f"request-{num - 1}" in page.texts(".request .id")
    page.run("document.querySelector('.requests').focus()")
    page.press("End")
    page.until(lambda: "request-0" in page.texts(".request .id"))
    assert page.run("document.querySelector('.request[aria-selected=true] .id').textContent") == "request-0"
    page.click(".worker")
    page.until_text(".chips", "only prefill-1")


def test_it_works_behind_a_key_and_at_a_sub_path(page: Page) -> None:
    with seen(page, api_key=KEY) as router, behind(router.url, "/some/path") as url:
        assert httpx.get(f"{url}/dashboard/data").status_code == 401
        page.open(f"{url}/dashboard")
        page.until(lambda: page.run("document.querySelector('#key-dialog').open"))
        assert [each for each in page.errors() if "401" not in each] == []  # the browser itself tells of the answer
        page.write("#key-input", KEY)
        page.click("#key-form button[type=submit]")
        page.until_text("#link", "live")
        page.until_text(".worker .title", "prefill-1")
        assert page.run("[sessionStorage.length, localStorage.length]")[0] == 1
        page.click(".chat-form button")
        prefill, decode = router.workers
        source, sink = router.call(prefill.submitted()).handle, router.call(decode.submitted()).handle
        router.do(lambda: prefill.first_token(source))
        router.do(lambda: decode.pulled_tokens(sink, 1, finish=FinishReason.STOP))
        page.until_text("#chat-summary", "2 tokens")
        addresses = page.run("performance.getEntriesByType('resource').map(e => e.name)")
        assert addresses and all(each.startswith(f"{url}/") for each in addresses)


def test_nothing_of_a_request_is_read_as_html(page: Page) -> None:
    """Names that a client or an operator chose are text, wherever they are shown."""
    with seen(page, "prefill-<img src=x>", "decode-<b>2</b>") as router:
        open_dashboard(page, router.url)
        page.until_text(".worker .title", "decode-<b>2</b>")
        page.until_text(".events", "prefill-<img src=x>")
        assert page.number_of(".worker b, .events b, main img") == 0


def test_it_fits_a_phone_and_is_read_without_a_mouse(page: Page, router: WatchedRouter) -> None:
    open_dashboard(page, router.url)
    page.resize(360, 800)
    try:
        page.until(lambda: page.run("innerWidth") == 360)
        assert page.run("document.documentElement.scrollWidth") == 360
    finally:
        page.resize(1280, 900)
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, textarea, [tabindex=\"0\"]')].filter(e => !("
        "e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label') || "
        "e.getAttribute('aria-labelledby'))).length"
    )
    assert unnamed == 0


def test_a_chosen_theme_is_that_of_the_page_and_of_its_charts(page: Page, router: WatchedRouter) -> None:
    """Whatever the system prefers; which is asked again once a person chooses so."""
    line, style = ".u-series:nth-child(2) .u-marker", "getComputedStyle(document.querySelector('{}')).{}"
    shown = f"[{style.format('body', 'backgroundColor')}, {style.format(line, 'borderTopColor')}]"
    light, dark = ["rgb(244, 245, 246)", "rgb(47, 111, 196)"], ["rgb(18, 19, 22)", "rgb(125, 176, 242)"]
    for preferred, other, wanted in (("light", "dark", light), ("dark", "light", dark)):
        page.prefer(preferred)
        open_dashboard(page, router.url)
        page.until(lambda: page.number_of(line) > 0)
        assert page.text("#theme") == "Theme: system" and page.run(shown) == wanted
        for choice in ("light", "dark", "system"):
            page.click("#theme")
            assert page.text("#theme") == f"Theme: {choice}"
            assert page.run(shown) == {"light": light, "dark": dark, "system": wanted}[choice]
        page.prefer(other)
        page.until(lambda it=light if wanted is dark else dark: page.run(shown) == it)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page: Page, router: WatchedRouter, scheme: str) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for every text that is shown."""
    page.prefer(scheme)
    open_dashboard(page, router.url)
    router.call(router.workers[1].kill())
    page.until_text(".events", "no link")
    page.until(lambda: page.run("document.getAnimations().length") == 0)
    faint = page.run(CONTRASTS)
    assert faint == []


# Texts whose colour is too near that of the first ground behind them, with the ratio.
CONTRASTS = """
const parts = (c) => c.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = (c) => parts(c).slice(0, 3).map(v => linear(v / 255))
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return getComputedStyle(e).backgroundColor;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.checkVisibility() || e.closest("dialog:not([open]), script, noscript, .skip")) continue;
  const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
  const ratio = (a + .05) / (b + .05);
  if (ratio < 4.5) found.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio.toFixed(2)].join(" "));
}
return found;
"""
