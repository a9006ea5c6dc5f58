"""Time that an endpoint picker takes for a request, by number of routers.

    python -m benchmarks.serving.picking [--routers 1 2 8 48] [--requests 3000]

Choice: between routers that are all ready. Exchange: choice included, all messages of a request in full-duplex
streaming (headers, one chunk of a body of 2 KB) and of a streamed answer of 64 chunks, each read from and written to
its wire form; without gRPC. Processor time in microseconds, medians over the requests of a kind.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from diptych.cluster.common.admission import RouteForecast, RouterLoad, RouterOutlook
from diptych.cluster.common.prediction import Level
from diptych.cluster.common.quota import Quota
from diptych.cluster.picker.choice import RouterAsk, RouterView, pick
from diptych.cluster.picker.exchange import Exchange
from diptych.cluster.picker.messages import Request
from diptych.cluster.picker.reading import ReadingRules, RequestHead

NUM_CHUNKS = 64
TIMES = RouteForecast(0.2, 0.1, 0.02)


def routers(num: int) -> list[RouterView]:
    """Routers of which each has another load."""
    found: list[RouterView] = []
    for i in range(num):
        outlook = RouterOutlook(i * 7 % 100, 1024, 2.0, Level(1.0, 0.1), TIMES, TIMES)
        found.append(RouterView(f"10.0.{i // 256}.{i % 256}:8000", RouterLoad(f"{i:08x}", True, outlook), True, i % 3))
    return found


class Chooser:
    """RouterChoice of fixed routers."""

    def __init__(self, views: Sequence[RouterView]) -> None:
        self._views = views

    def choose(self, head: RequestHead, subset: frozenset[str] | None, call: str) -> list[str]:
        return pick(self._views, RouterAsk(subset, call, head.key, head.ttft_s, head.is_sheddable))

    def doubt(self, endpoints: Sequence[str]) -> None:
        raise AssertionError(endpoints)


def messages() -> list[bytes]:
    """Messages of a request and its answer, as an Envoy sends them."""
    names = {":method": "POST", ":path": "/v1/chat/completions", "authorization": "Bearer " + "k" * 40}
    names |= {f"x-header-{i}": "v" * 30 for i in range(12)}
    found = [Request() for _ in range(3 + NUM_CHUNKS)]
    for name, value in names.items():
        found[0].request_headers.headers.headers.add(key=name, raw_value=value.encode())
    found[1].request_body.body, found[1].request_body.end_of_stream = b"x" * 2048, True
    found[2].response_headers.headers.headers.add(key=":status", raw_value=b"200")
    for message in found[3:]:
        message.response_body.body = b"x" * 180
    found[-1].response_body.end_of_stream = True
    return [message.SerializeToString() for message in found]


def exchange(choice: Chooser, sent: Sequence[bytes]) -> int:
    """Do one exchange; return the bytes of the answers."""
    with Quota(1 << 20, "").share() as held:
        it = Exchange(choice, ReadingRules(), held, 1 << 20)
        return sum(len(answer.SerializeToString()) for each in sent for answer in it.on(Request.FromString(each)))


def median_us(work: Callable[[], object], num: int) -> float:
    times: list[float] = []
    for _ in range(num):
        begun = time.thread_time()
        work()
        times.append(time.thread_time() - begun)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 8, 48])
    parser.add_argument("--requests", type=int, default=3000)
    args = parser.parse_args()
    sent = messages()
    print("| routers | choice | with a key | exchange |\n|--:|--:|--:|--:|")
    for num in args.routers:
        views = routers(num)
        choice = Chooser(views)
        plain = median_us(lambda views=views: pick(views, RouterAsk()), args.requests)
        keyed = median_us(lambda views=views: pick(views, RouterAsk(key="a key")), args.requests)
        whole = median_us(lambda choice=choice: exchange(choice, sent), args.requests // 10)
        print(f"| {num} | {plain:.0f} | {keyed:.0f} | {whole:.0f} |")


if __name__ == "__main__":
    main()
