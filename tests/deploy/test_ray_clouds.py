"""deploy/ray's files for clouds by Ray's own rules, with the cluster that is to run there, and who may reach it.

That a cloud accepts them is not tested: it would take accounts, and GPUs.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from diptych.cluster.common import config_file
from diptych.cluster.common.config import ClusterConfig

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"
CLOUDS = ("aws", "gcp")


def read(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{cloud}.yaml").read_text())


def configs(cloud: str) -> dict[str, dict[str, Any]]:
    """What the cloud is asked for, by node type."""
    return {name: kind["node_config"] for name, kind in read(cloud)["available_node_types"].items()}


@pytest.fixture
def served() -> ClusterConfig:
    return config_file.load(FOLDER / "cluster-config-gpu.yaml", {"router": {"api_key": "a key of the clients"}})


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_up_takes_it(cloud: str) -> None:
    prepared = prepare_config(read(cloud))
    validate_config(prepared)
    assert prepared["head_setup_commands"][:-1] == prepared["worker_setup_commands"] == read(cloud)["setup_commands"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_up_would_refuse_a_mistake(cloud: str) -> None:
    wrong = read(cloud)
    wrong["available_node_types"]["decode"]["label"] = {}
    with pytest.raises(Exception, match="'label' was unexpected"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_worker_of_every_pool_finds_a_machine_of_its_label(cloud: str, served: ClusterConfig) -> None:
    cluster = read(cloud)
    types = cluster["available_node_types"]
    num_workers = 0
    for name, pool in served.pools.items():
        if not pool.bounds[1]:
            continue
        [kind] = [kind for kind in types.values() if kind["labels"] == pool.label_selector]
        assert kind["resources"]["GPU"] == served.gpus_of(pool), f"a machine of {name} has one worker"
        assert kind["resources"]["CPU"] >= pool.num_cpus and not pool.resources
        assert kind["max_workers"] == pool.bounds[1]
        num_workers += pool.bounds[1]
    head = types[cluster["head_node_type"]]
    assert head["labels"] == served.router.label_selector
    assert head["resources"]["CPU"] >= served.router.num_cpus
    assert cluster["max_workers"] == num_workers


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_asks_for_its_token_and_knows_labels(cloud: str) -> None:
    cluster = read(cloud)
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token " in commands[-1]
        assert "RAY_enable_autoscaler_v2" not in commands[-1], "its first version starts no node for a label"
    assert "--dashboard-host=127.0.0.1 " in cluster["head_start_ray_commands"][-1]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_it_starts_rays_version_of_the_local_machines(cloud: str) -> None:
    [ours] = set(re.findall(r"ray\[default\]==[\d.]+", (FOLDER / f"{cloud}.yaml").read_text()))
    assert ours in (FOLDER / "cluster.yaml").read_text()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_machine_has_a_public_address(cloud: str) -> None:
    assert read(cloud)["provider"]["use_internal_ips"]
    assert "0.0.0.0/0" not in (FOLDER / f"{cloud}.yaml").read_text() + (FOLDER / "README.md").read_text()


def test_aws_gets_no_group_role_or_image_of_rays_making() -> None:
    """Ray's own group lets every address reach port 22, and its role may do anything with EC2 and S3."""
    head = read("aws")["head_node_type"]
    for name, config in configs("aws").items():
        assert config["SecurityGroupIds"] and config["SubnetIds"] and config["ImageId"] and config["KeyName"]
        assert ("IamInstanceProfile" in config) == (name == head), "workers may start no machine"
        assert config["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert all(disk["Ebs"]["Encrypted"] for disk in config["BlockDeviceMappings"])


def test_gcp_machines_are_on_a_network_of_their_own() -> None:
    for name, config in configs("gcp").items():
        [interface] = config["networkInterfaces"]
        assert interface["subnetwork"].endswith("/subnetworks/diptych") and "accessConfigs" not in interface
        assert "diptych" in config["tags"]["items"]
        assert ("diptych-router" in config["tags"]["items"]) == (name == "head"), "clients reach the router alone"
        if name != "head":
            assert config["scheduling"]["onHostMaintenance"] == "TERMINATE", "as Google asks of machines with GPUs"
