"""What a cluster's processes are called, and what each worker gets of its machine."""

from dataclasses import replace

import pytest

from diptych.cluster.common import deployment as deployment_module
from diptych.cluster.common.config import interchangeable
from diptych.cluster.common.config_file import build
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.common.handles import RouterStarted
from diptych.workers.common.errors import ConfigError
from diptych.workers.config.worker_config import WorkerConfig


def deployment(is_local: bool = True, name: str = "a", **pools: object) -> Deployment:
    pools = pools or {"prefill": {}, "decode": {}}
    return Deployment(build({"model": "m", "name": name, "pools": pools}), "secret", is_local)


def test_a_cluster_knows_its_own_by_name_even_where_names_begin_alike() -> None:
    one, other = deployment(name="a"), deployment(name="a-b")
    name = other.worker_name("prefill-1")
    assert other.worker_id(name) == "prefill-1"
    assert other.owns(name)
    assert one.worker_id(name) is None
    assert not one.owns(name)
    assert one.owns(one.router_name("router-1"))
    assert one.worker_id(one.router_name("router-1")) is None


def test_local_workers_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_module, "usable_cores", lambda: tuple(range(8)))
    config = deployment(prefill={"replicas": 1}, decode={"replicas": 2}).worker_config("decode", "10.0.0.1", "decode-1")
    assert config.threads == 8 // 3
    assert config.cores is None, "which ones is for the worker's process to say"
    assert config.cache.kv_memory_fraction == pytest.approx(0.1)
    assert config.host == "127.0.0.1"
    assert config.auth_token == "secret"


def test_workers_with_gpus_of_their_own_share_none_of_their_memory() -> None:
    pools = {"prefill": {"replicas": 1, "num_gpus": 0.5}, "decode": {"replicas": 2, "tensor_parallel": 2}}
    found = Deployment(build({"model": "m", "device": "cuda", "pools": pools}), "secret", is_local=True)
    assert found.worker_config("decode", "", "decode-1").cache.kv_memory_fraction == 0.85
    assert found.worker_config("prefill", "", "prefill-1").cache.kv_memory_fraction == pytest.approx(0.85 / 3)


def test_more_workers_than_cores_get_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_module, "usable_cores", lambda: (0, 1))
    assert deployment(decode={"replicas": 5}).worker_config("decode", "", "decode-1").threads == 1


def test_workers_elsewhere_have_what_ray_reserves_for_them() -> None:
    settings = {"replicas": 2, "num_cpus": 4.0, "chunk_tokens": 64, "kv_memory_bytes": "1GiB"}
    config = deployment(is_local=False, decode=settings).worker_config("decode", "10.0.0.1", "decode-1")
    assert (config.threads, config.host, config.cache.kv_memory_fraction) == (4, "10.0.0.1", 0.3)
    assert (config.role, config.scheduler.chunk_tokens, config.cache.kv_memory_bytes) == ("decode", 64, 1 << 30)


def test_steps_aim_at_the_time_per_token_that_is_promised() -> None:
    def worker(pool: dict[str, object], **level: float) -> WorkerConfig:
        config = build({"model": "m", "pools": {"decode": pool}, "service_level": level})
        return Deployment(config, "secret", is_local=True).worker_config("decode", "", "decode-1")

    assert worker({}, ttft_s=0.5).scheduler.tpot_s == WorkerConfig.of(model="m").scheduler.tpot_s
    assert (worker({}, tpot_s=0.1).scheduler.target_step_s, worker({}, tpot_s=0.1).scheduler.tpot_s) == (None, 0.1)
    assert worker({"target_step_s": 0.0}, tpot_s=0.1).scheduler.target_step_s == 0.0


def test_threads_that_are_given_stay() -> None:
    assert deployment(decode={"threads": 3}).worker_config("decode", "", "decode-1").threads == 3


@pytest.mark.parametrize(
    ("is_local", "pool", "num_cores", "num_threads"),
    [
        (True, {}, 4, 4),  # its share of eight
        (True, {"cores": 0}, 0, 4),
        (True, {"cores": 3}, 3, 3),
        (True, {"threads": 2}, 2, 2),
        (True, {"threads": 2, "cores": 3}, 3, 2),
        (False, {"num_cpus": 6.0}, 0, 6),  # Ray may have placed another cluster's worker on the same machine
        (False, {"num_cpus": 6.0, "cores": 5}, 5, 5),
    ],
)
def test_a_worker_has_a_thread_for_each_of_its_cores(
    monkeypatch: pytest.MonkeyPatch, is_local: bool, pool: dict[str, object], num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(deployment_module, "usable_cores", lambda: tuple(range(8)))
    found = deployment(is_local, prefill={}, decode=pool)
    assert (found.num_cores("decode"), found.worker_config("decode", "", "decode-1").threads) == (
        num_cores,
        num_threads,
    )


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"threads \(3\) must not exceed cores \(2\)"):
        deployment(decode={"threads": 3, "cores": 2})


def test_a_pool_may_lay_its_kv_out_in_its_own_way() -> None:
    cluster = {"model": "m", "dtype": "float32", "block_size": 32, "verify_kv": True, "wire_dtype": "bfloat16"}
    own = {"dtype": "bfloat16", "block_size": 64, "kv_axis_order": "layer", "wire_dtype": "int8"}
    config = build(cluster | {"pools": {"prefill": {}, "decode": own}})
    found = [Deployment(config, "secret", True).worker_config(pool, "", "decode-1") for pool in ("prefill", "decode")]
    layouts = [(worker.model.dtype, worker.cache.block_size, worker.cache.kv_axis_order) for worker in found]
    assert layouts == [("float32", 32, "block"), ("bfloat16", 64, "layer")]
    assert [(worker.handoff.wire_dtype, worker.handoff.verify_kv) for worker in found] == [
        ("bfloat16", True),
        ("int8", True),
    ]
    assert not any(group >= {"prefill", "decode"} for group in interchangeable(config.pools))


def test_how_a_pool_announces_its_kv_reaches_its_workers() -> None:
    found = deployment(prefill={"layer_groups": 4}, decode={"look_ahead": True})
    prefill, decode = (found.worker_config(pool, "", "decode-1") for pool in ("prefill", "decode"))
    assert (prefill.model.look_ahead, decode.model.look_ahead) == (False, True)
    assert (prefill.handoff.layer_groups, decode.handoff.layer_groups) == (4, 0)
    with pytest.raises(ConfigError, match=r"layer_groups"):
        deployment(decode={"layer_groups": -1})


def test_a_worker_on_several_machines_is_told_where_its_ranks_start() -> None:
    pool = {"tensor_parallel": 4, "machines_per_worker": 2, "num_cpus": 8.0, "cores": 6}
    config = build({"model": "m", "trusted_network": True, "pools": {"prefill": {}, "decode": pool}})
    found = Deployment(config, "secret", is_local=False)
    worker = found.worker_config("decode", "10.0.0.1", "decode-1", ("10.0.0.2:41231",))
    assert (worker.parallel.rank_hosts, worker.threads, found.num_cores("decode")) == (("10.0.0.2:41231",), 6, 3)
    assert found.worker_config("prefill", "10.0.0.1", "prefill-1").parallel.rank_hosts == ()
    with pytest.raises(ConfigError, match="rank_hosts must name 1"):
        found.worker_config("decode", "10.0.0.1", "decode-1")


def test_a_router_is_replaced_where_it_listened() -> None:
    again = deployment().listening_at(RouterStarted("127.0.0.1", 4711, 4712, 1))
    assert (again.config.router.http_port, again.config.router.grpc_port) == (4711, 4712)
    assert again.config.pools == deployment().config.pools


def test_a_gang_shares_one_machine_and_meets_at_a_place_of_its_own() -> None:
    found = deployment(decode={"replicas": 1, "data_parallel": 2, "kv_memory_fraction": 0.5})
    first, second, other = (
        found.worker_config("decode", "", each) for each in ("decode-1.0", "decode-1.1", "decode-2.0")
    )
    for config, rank in ((first, 0), (second, 1), (other, 0)):
        assert (config.parallel.data_parallel, config.parallel.data_rank) == (2, rank)
        assert config.cache.kv_memory_fraction == 0.5 / found.config.pools.num_workers
    joined = replace(found, is_local=False)
    assert joined.worker_config("decode", "10.0.0.1", "decode-1.0").cache.kv_memory_fraction == 0.25
    assert joined.worker_config("prefill", "10.0.0.1", "prefill-1").cache.kv_memory_fraction == 0.3
    assert first.parallel.rendezvous == second.parallel.rendezvous != other.parallel.rendezvous
    again = replace(found, token="another").worker_config("decode", "", "decode-1.0")
    assert again.parallel.rendezvous != first.parallel.rendezvous
    assert deployment(decode={"replicas": 1}).worker_config("decode", "", "decode-1").parallel.rendezvous is None
