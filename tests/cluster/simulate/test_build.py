"""Simulations are built as a cluster is: the settings of its workers are those that the cluster gives them."""

import pytest

from diptych.cluster.common.config_file import build
from diptych.cluster.simulate.build import Hardware, build_simulation, simulate
from diptych.cluster.simulate.gpus import GPUS
from diptych.cluster.simulate.profile import LinkProfile, Profile, WorkerProfile
from diptych.cluster.simulate.worker_setup import TransitTimes, WorkerSetup
from diptych.workers.common.errors import ConfigError
from diptych.workers.costs.step_cost import StepWork
from diptych.workers.costs.step_log_format import StepLogHeader

from .clusters import requests


def profile(*threads: int) -> Profile:
    """Workers that take 20 ms a step and 2 ms a prompt token, by the number of threads."""
    workers = tuple(
        WorkerProfile(
            StepLogHeader("m", "bfloat16", "cpu", "mixed", n, 1, 16, 500, 128.0, "here", 2),
            (0.02 / n, 0, 0, 0.002 / n, 0, 0),
            {},
            0,
            0,
            99,
            {},
            TransitTimes(0.001),
        )
        for n in threads
    )
    return Profile("2026-11-23", workers, LinkProfile(1e9, 0.003))


def test_schedulers_aim_at_the_clusters_level() -> None:
    config = build({"model": "tiny", "service_level": {"ttft_s": 0.5, "tpot_s": 0.03}})
    simulation = build_simulation(config, Hardware(GPUS["H100"]), shares_blocks=False)
    simulation.run(requests((0.0, 10, 2)))
    scheduler = next(iter(simulation.alive.values())).setup.scheduler
    assert (scheduler.ttft_s, scheduler.tpot_s) == (0.5, 0.03)


def test_a_gpu_computes_with_weights_and_kv_as_the_settings_say() -> None:
    def setup(**settings: str) -> WorkerSetup:
        pools = {"mixed": {"replicas": 1, "kv_memory_fraction": 0.001}}
        config = build({"model": "tiny", "pools": pools, **settings})
        simulation = build_simulation(config, Hardware(GPUS["H100"]), shares_blocks=False)
        simulation.run(requests((0.0, 10, 2)))
        return next(iter(simulation.alive.values())).setup

    plain, few = setup(), setup(quantize="int4", kv_dtype="int8")
    assert few.num_blocks > 1.8 * plain.num_blocks
    step = StepWork(1, 1000)
    assert few.timer.seconds(step) < plain.timer.seconds(step)


def test_workers_are_profiled_by_their_threads() -> None:
    """A prompt of 100 tokens in 220 or 110 ms, and 1 ms until the worker has it."""
    for num, expected in ((1, 221.0), (2, 111.0)):
        config = build({"model": "tiny", "pools": {"mixed": {"replicas": 1, "threads": num}}})
        figures = simulate(config, Hardware.of(profile(1, 2)), requests((0.0, 100, 1)))
        assert figures.spreads["ttft"].percentiles[50] == pytest.approx(expected)
    with pytest.raises(ConfigError, match="set `threads`"):
        simulate(build({"model": "tiny"}), Hardware.of(profile(1, 2)), requests((0.0, 100, 1)))


def test_levels_are_the_clusters_unless_given() -> None:
    config = build(
        {"model": "tiny", "pools": {"mixed": {"replicas": 1, "threads": 1}}, "service_level": {"ttft_s": 0.2}}
    )
    load = requests((0.0, 100, 1))
    assert simulate(config, Hardware.of(profile(1)), load).good == 0.0
    assert simulate(config, Hardware.of(profile(1)), load, {"ttft": 0.3}).good == 1.0
