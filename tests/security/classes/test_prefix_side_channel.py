"""Cached prefixes tell a client nothing about other keys' prompts: on real engines, by way of the front door."""

from contextlib import aclosing

from diptych.cluster.front.access.accounts import Account
from diptych.cluster.front.access.key_file import NamedKey
from diptych.cluster.front.front_door import FrontDoor, GenerationSpec
from diptych.workers.common.request import SamplingParams

from ...cluster.routing.test_router_with_workers import Cluster, cluster
from ...support.front import byte_tokenizer

PROMPT = tuple(range(1, 60))


def tenant(name: str) -> Account:
    return Account(NamedKey(name, b""), is_tenant=True)


class Prober:
    def __init__(self, running: Cluster) -> None:
        self.door = FrontDoor(running.router, byte_tokenizer())
        self._num = 0

    async def cached_tokens(self, account: Account | None, salt: str = "") -> int:
        """Cached tokens of one request with the same prompt as all others."""
        self._num += 1
        spec = GenerationSpec((PROMPT,), SamplingParams(temperature=0.0), max_tokens=2, cache_salt=salt)
        generation = await self.door.start(spec, f"probe-{self._num}", account.begin() if account else None)
        async with aclosing(generation.batches()) as batches:
            async for _ in batches:
                pass
        return generation.usage.cached_tokens


async def test_a_stranger_does_not_learn_which_prompts_others_have_sent() -> None:
    async with cluster("mixed") as running:
        probe = Prober(running)
        alice, bob = tenant("alice"), tenant("bob")
        assert await probe.cached_tokens(alice) == 0
        assert await probe.cached_tokens(alice) > 0
        for guess in ("", "alice", "\0", alice.cache_salt("").hex(), alice.cache_salt("").decode("latin-1")):
            assert await probe.cached_tokens(bob, guess) == 0
        assert await probe.cached_tokens(alice, "of a session") == 0
        assert await probe.cached_tokens(alice, "of a session") > 0


async def test_without_a_file_of_keys_only_salts_separate() -> None:
    async with cluster("mixed") as running:
        probe = Prober(running)
        assert await probe.cached_tokens(None) == 0
        assert await probe.cached_tokens(None) > 0
        assert await probe.cached_tokens(None, "mine") == 0
