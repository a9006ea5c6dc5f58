"""Tests of benchmarks/serving/chaos.py: its criteria of success and its settings."""

from benchmarks.serving import chaos
from diptych.cluster.common.config import ClusterConfig


def test_a_failed_request_spoils_the_verdict() -> None:
    report = chaos.Report(seconds=1.0, seed=1, transport="grpc")
    assert report.is_clean
    report.failed["Unavailable: no worker could finish the request"] += 1
    assert not report.is_clean


def test_it_runs_with_the_attempts_and_leases_of_a_cluster() -> None:
    cluster = ClusterConfig(model="tiny")
    assert chaos.ROUTING.max_attempts == cluster.router.max_attempts
    assert chaos.ROUTING.worker_timeout_s == cluster.router.worker_timeout_s
    assert chaos.AWAY_S[0] < chaos.ROUTING.worker_timeout_s < cluster.lease_s < chaos.AWAY_S[1]
