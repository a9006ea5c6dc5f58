from diptych.cluster.common.config import RouterConfig
from diptych.cluster.front.responses.store import StoreLimits
from diptych.cluster.placement.router_process import kept_responses


def test_settings_limit_the_responses_that_are_kept() -> None:
    assert kept_responses(RouterConfig()) == StoreLimits()
    given = RouterConfig(max_kept_responses=3, max_kept_response_bytes=5 << 20, kept_response_lifetime_s=7.5)
    assert kept_responses(given) == StoreLimits(max_bytes=5 << 20, max_entries=3, lifetime_s=7.5)
