"""No route of the front door controls the cluster: the names that other servers have for such routes are unknown."""

import httpx
import pytest

from ...support.front import Echo, served

KEY = "sesame-sesame"
NAMES = [
    "abort",
    "abort_request",
    "admin",
    "collective_rpc",
    "configure_logging",
    "configure_log",
    "drain",
    "flush_cache",
    "generate",
    "get_internal_state",
    "is_sleeping",
    "load_lora_adapter",
    "metrics/reset",
    "pause",
    "pause_generation",
    "ping",
    "profile",
    "release_memory_occupation",
    "reset_mm_cache",
    "reset_prefix_cache",
    "resume",
    "server_info",
    "scale",
    "scale_elastic_ep",
    "set_internal_state",
    "shutdown",
    "sleep",
    "start_profile",
    "stop_profile",
    "unload_lora_adapter",
    "update_weights",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "wake_up",
    "workers",
    "docs",
    "redoc",
]


@pytest.mark.parametrize("prefix", ["", "/v1", "/admin"])
def test_no_name_of_an_admin_route_is_served(prefix: str) -> None:
    with served(Echo(), api_key=KEY) as server, httpx.Client(base_url=server.url) as http:
        for name in NAMES:
            for method in ("GET", "POST"):
                path = f"{prefix}/{name}"
                assert http.request(method, path).status_code == 401
                with_key = http.request(method, path, headers={"authorization": f"Bearer {KEY}"})
                assert with_key.status_code == 404, path
