"""TLS between the cluster's processes: who is refused, that work goes on, and certificates replaced meanwhile."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.common.deployment import Deployment
from diptych.cluster.control.worker_control import WorkerControl
from diptych.cluster.preflight.checks import check_tls, link_tls
from diptych.cluster.routing.policy import RoutingConfig
from diptych.cluster.routing.router import Router
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.workers.common import channel as channel_module
from diptych.workers.common import tls as tls_module
from diptych.workers.common.channel import auth_metadata, each_of, open_channel
from diptych.workers.common.errors import ConfigError, TlsMismatch, WorkerLost
from diptych.workers.common.tls import LinkTls, TlsFiles, TlsIdentity, lost_peer, make_identity, valid_until
from diptych.workers.handoff.errors import error_of
from diptych.workers.server.worker import parse_args
from tests.cluster.routing.test_router_with_workers import LiveWorker, answer, prompts, start_worker
from tests.support.routed import TOKEN

TIMEOUT_S = 20.0


@asynccontextmanager
async def worker(tls: LinkTls | None, role: str = "mixed", step_s: float = 0.0) -> AsyncIterator[LiveWorker]:
    live = await start_worker(role, step_s, tls=tls)
    try:
        yield live
    finally:
        await live.kill()


async def refusal(address: str, tls: LinkTls | None) -> grpc.aio.AioRpcError:
    """Error of a call with the right token."""
    async with open_channel(address, tls) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN), timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value


def write(identity: TlsIdentity, folder: Path) -> TlsFiles:
    """Replace the files one by one, as an operator does."""
    for name in ("ca", "cert", "key"):
        (folder / name).write_bytes(getattr(identity, name))
    return TlsFiles(*(str(folder / name) for name in ("ca", "cert", "key")))


async def test_a_caller_without_a_certificate_of_the_authority_is_refused_despite_the_token() -> None:
    own = make_identity("own")
    async with worker(own) as live:
        others = make_identity("own")
        thief = TlsIdentity(own.ca, others.cert, others.key)  # trusts the right authority, is of another
        for wrong in (None, others, thief):
            error = await refusal(live.info.address, wrong)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        async with open_channel(live.info.address, own) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN), timeout=TIMEOUT_S)
            assert (await call.read()).WhichOneof("message") == "hello"  # type: ignore[union-attr]
            stranger = worker_pb2_grpc.WorkerStub(channel).Link(timeout=TIMEOUT_S)  # a certificate is not a token
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stranger.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_caller_refuses_a_server_of_another_authority_or_without_tls() -> None:
    for other in (make_identity("other"), None):
        async with worker(other) as live:
            assert (await refusal(live.info.address, make_identity("own"))).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("of_worker", "of_caller", "why"),
    [
        ("none", "own", "answers without TLS"),
        ("own", "none", "closed the connection at its beginning"),
        ("other", "own", "of another authority than ours"),
        ("own", "thief", "closed the connection at its beginning"),
        ("expired", "as the worker", "not valid now: renew it"),
    ],
)
async def test_a_mismatch_has_its_own_error_with_cause_and_remedy(
    of_worker: str, of_caller: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = make_identity("own"), make_identity("own")
    with monkeypatch.context() as patch:
        patch.setattr(tls_module, "VALID_FOR", datetime.timedelta(minutes=-1))
        expired = make_identity("own")
    known = {"none": None, "own": own, "other": other, "thief": TlsIdentity(own.ca, other.cert, other.key)}
    caller = expired if of_caller == "as the worker" else known[of_caller]
    async with worker(expired if of_worker == "expired" else known[of_worker]) as live:
        found = error_of(await refusal(live.info.address, caller))
        assert isinstance(found, TlsMismatch) and why in found.message and found.retryable
        control = WorkerControl(live.info.address, TOKEN, caller)
        with pytest.raises(TlsMismatch, match=why):
            await control.state()
        await control.close()
        router = Router(RoutingConfig(), TOKEN, caller)
        try:
            router.update_fleet([live.info])
            await router.start()
            async with asyncio.timeout(TIMEOUT_S):
                while not any("no link to worker" in line and why in line for line in caplog.messages):
                    await asyncio.sleep(0.002)
        finally:
            await router.stop()


def test_a_worker_that_is_not_there_is_no_mismatch() -> None:
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert type(lost_peer("gone", details)) is WorkerLost and type(lost_peer("gone", "Socket closed")) is WorkerLost


@pytest.mark.parametrize("has_files", [False, True])
async def test_hand_off_with_tls_gives_the_same_tokens(has_files: bool, tmp_path: Path) -> None:
    asked = prompts(6, 60, seed=3)
    answers: list[list[list[int]]] = []
    identity = make_identity("own")
    for tls in (None, write(identity, tmp_path) if has_files else identity):
        async with worker(tls, "prefill") as source, worker(tls, "decode") as sink:
            router = Router(RoutingConfig(), TOKEN, tls)
            try:
                router.update_fleet([source.info, sink.info])
                await router.start()
                async with asyncio.timeout(TIMEOUT_S):
                    while not all(w.is_up for w in router.workers()):
                        await asyncio.sleep(0.002)
                answers.append(await asyncio.gather(*(answer(router, prompt, 12) for prompt in asked)))
                load = (await sink.settled_state(tls)).load  # each was handed off, and by gRPC: nothing else is set
                assert (load.num_handoffs_received, load.num_handoffs_failed) == (len(asked), 0)
                assert (await source.settled_state(tls)).load.num_handoffs_sent == len(asked)
            finally:
                await router.stop()
    assert answers[0] == answers[1]


async def test_replaced_files_hold_for_new_connections_while_a_stream_runs(tmp_path: Path) -> None:
    old, new = make_identity("old"), make_identity("new")
    files = write(old, tmp_path)
    async with worker(files, step_s=0.01) as live:
        async with open_channel(live.info.address, files) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Link(metadata=auth_metadata(TOKEN), timeout=TIMEOUT_S)
            assert (await call.read()).WhichOneof("message") == "hello"  # type: ignore[union-attr]
            write(new, tmp_path)
            async with open_channel(live.info.address, files) as second:
                fresh = worker_pb2_grpc.WorkerStub(second).Link(metadata=auth_metadata(TOKEN), timeout=TIMEOUT_S)
                assert (await fresh.read()).WhichOneof("message") == "hello"  # type: ignore[union-attr]
                await call.write(worker_pb2.RouterMessage(ping=worker_pb2.Ping(number=7)))
                while not any(message.HasField("pong") for message in each_of(await call.read())):  # type: ignore[type-var]
                    pass
        assert (await refusal(live.info.address, old)).code() is grpc.StatusCode.UNAVAILABLE


def test_half_replaced_files_keep_the_old_certificate_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = make_identity("old"), make_identity("new")
    files = write(old, tmp_path)
    reload = channel_module._reloader(files, files.load())  # pyright: ignore[reportPrivateUsage]
    assert reload() is None
    (tmp_path / "cert").write_bytes(new.cert)
    assert reload() is None and reload() is None
    assert [r.message for r in caplog.records if "key is not the certificate's" in r.message] != []
    assert len(caplog.records) == 1
    write(new, tmp_path)
    assert reload() is not None and reload() is None


def test_what_is_wrong_with_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_identity("own")
    files = write(own, tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*absent.* Check the path"):
        replace(files, key=str(tmp_path / "absent")).load()
    with pytest.raises(ConfigError, match=r"cannot parse .* give PEM files"):
        replace(files, cert=files.key).load()
    other = make_identity("other")
    (tmp_path / "ca").write_bytes(other.ca)
    with pytest.raises(ConfigError, match="of none of the authorities in `ca`"):
        files.load()
    (tmp_path / "ca").write_bytes(other.ca + make_identity("third").ca + own.ca)  # while authorities are changed
    assert files.load().cert == own.cert
    monkeypatch.setattr(tls_module, "SERVER_NAME", "another")
    with pytest.raises(ConfigError, match="lacks the DNS name 'another'"):
        files.load()
    monkeypatch.undo()
    monkeypatch.setattr(tls_module, "VALID_FOR", datetime.timedelta(minutes=-1))
    expired = make_identity("own")
    with pytest.raises(ConfigError, match="not now: renew it"):
        write(expired, tmp_path).load()
    assert "not now: renew it" in (valid_until(files) or "")


def test_auto_makes_a_new_authority_for_each_start() -> None:
    config = ClusterConfig(model="m", tls="auto")
    first, second = link_tls(config), link_tls(config)
    assert isinstance(first, TlsIdentity) and isinstance(second, TlsIdentity) and first.ca != second.ca
    first.check()
    assert "PRIVATE" not in repr(Deployment(config, "secret", is_local=True, tls=first))


def test_workers_of_a_deployment_have_its_tls() -> None:
    identity = make_identity("own")
    config = Deployment(ClusterConfig(model="m"), "secret", is_local=True, tls=identity).worker_config(
        "decode", "h", "decode-1"
    )
    assert config.tls == identity and "PRIVATE" not in repr(config)
    assert config.changed(role="mixed").tls == identity


def test_tls_is_off_unless_asked_for_and_files_are_checked_at_the_start(tmp_path: Path) -> None:
    assert link_tls(ClusterConfig(model="m")) is None
    assert link_tls(ClusterConfig.model_validate({"model": "m", "tls": False})) is None  # YAML's `off`
    files = {name: str(tmp_path / name) for name in ("ca", "cert", "key")}
    with pytest.raises(ConfigError, match="cannot read"):
        check_tls(ClusterConfig.model_validate({"model": "m", "tls": files}))
    assert parse_args(["--model", "m", *(t for n, p in files.items() for t in (f"--tls-{n}", p))]).tls == TlsFiles(
        **files
    )
    with pytest.raises(ConfigError, match="add --tls-ca, --tls-key"):
        parse_args(["--model", "m", "--tls-cert", "c"])
