"""A Ray of two machines on one: `python ray_nodes.py` prints its address, and ends it when its input closes.

It has no process that no test asks: no dashboard, no monitors, no agents and no idle workers. They take half of the
processor time of its start, and some ever after. The Ray of test_deploy_ray.py has them.
"""

import json
import sys
from typing import Any
from unittest import mock

from ray._private import node, services
from ray.cluster_utils import Cluster

from diptych.cluster.placement import lean_ray

SHARED = {"num_cpus": 8, "object_store_memory": 80 << 20, "include_log_monitor": False}
HEAD = {"labels": {"diptych.io/pool": "prefill", "diptych.io/door": "yes"}, "no_monitor": True}
OTHER = {"labels": {"diptych.io/pool": "decode"}, "resources": {"decoder": 2}}


class LeanNode(node.Node):
    """A machine's part of Ray, as lean_ray.py starts ours."""

    def start_api_server(self, **_: object) -> None:
        self._webui_url = None

    def start_raylet(self, *args: Any, **kwargs: Any) -> None:
        with lean_ray._raylet_command(services, lean_ray.without_agents):
            super().start_raylet(*args, **kwargs)


def main() -> None:
    with mock.patch.object(node, "Node", LeanNode):
        cluster = Cluster(initialize_head=True, head_node_args=SHARED | HEAD)
        other = cluster.add_node(**SHARED, **OTHER)
    print(json.dumps({"address": cluster.address, "other": other.node_id}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
