"""A Ray of two machines on one: `python ray_nodes.py` prints its address, and ends it when its input closes."""

import json
import sys

from ray.cluster_utils import Cluster

HEAD = {"labels": {"diptych.io/pool": "prefill", "diptych.io/door": "yes"}}
OTHER = {"labels": {"diptych.io/pool": "decode"}, "resources": {"decoder": 2}}


def main() -> None:
    shared = {"num_cpus": 8, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=shared | HEAD)
    node = cluster.add_node(num_cpus=8, object_store_memory=80 << 20, **OTHER)
    print(json.dumps({"address": cluster.address, "other": node.node_id}), flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
