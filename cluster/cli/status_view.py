"""A ClusterStatus as tables for a person."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..common.plurals import count
from ..control.status import ClusterStatus, PoolStatus, WorkerStatus
from .upgrade import describe

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "cyan", "stopping": "dim", "failed": "red"}


def render(status: ClusterStatus) -> RenderableType:
    head = Text.assemble(
        (status.name, "bold"), "  ", _coloured(status.state), f"  {status.model}", no_wrap=True, overflow="ellipsis"
    )
    parts: list[RenderableType] = [head, _pools(status), _workers(status), _routers(status)]
    if status.upgrade:
        parts.append(Text(describe(status.upgrade), style="red" if status.upgrade.reason else ""))
    if status.tls_until:
        parts.append(Text(f"TLS between processes, certificate valid until: {status.tls_until}"))
    if status.links:
        parts.append(_links(status))
    parts += [
        Text(f"{w.worker_id}: waits for {w.waiting_for}", style="yellow") for w in status.workers if w.waiting_for
    ]
    parts += [
        Text(
            f"{w.worker_id}: {count(w.num_checksum_failures, 'pull')} brought other KV than the source had", style="red"
        )
        for w in status.workers
        if w.num_checksum_failures
    ]
    parts += [
        Text(f"{w.worker_id}: {w.acceptance:.0%} of the drafted tokens accepted, {w.mean_yield:.1f} tokens a step")
        for w in status.workers
        if w.acceptance is not None
    ]
    parts += [
        Text(f"{w.worker_id}: its draft computed {count(w.num_draft_tokens_anew, 'token')} later than the model")
        for w in status.workers
        if w.num_draft_tokens_anew
    ]
    parts += [_draft_failures(w) for w in status.workers if w.num_draft_failures]
    parts += [Text(f"{p.name}: {_trouble(p)}", style="yellow") for p in status.pools if p.last_error]
    if status.failure:
        parts.append(Text(f"{status.failure.error}: {status.failure.message}", style="red"))
    return Group(*parts)


def render_decisions(status: ClusterStatus) -> RenderableType:
    """Last decisions of the controller, newest first: what was done, why, and what came of it."""
    if not status.decisions:
        return Text("The controller has changed nothing since the supervisor started.")
    parts: list[RenderableType] = []
    for d in status.decisions:
        parts.append(Text(f"{_duration(d.age_s)} ago  {d.subject}: {d.action}", style="bold"))
        parts.append(Text(f"  {d.reason}"))
        parts.append(Text(f"  {d.result or 'what comes of it is not known yet'}", style="red" if d.has_failed else ""))
    return Group(*parts)


def _draft_failures(worker: WorkerStatus) -> Text:
    outcome = "is off until the worker ends" if worker.is_draft_off else "goes on"
    failed = f"{worker.worker_id}: its draft failed {count(worker.num_draft_failures, 'time')} and {outcome}"
    return Text(f"{failed}; its log says why", style="red")


def _pools(status: ClusterStatus) -> Table:
    table = _table("pool", "ready", "target", "bounds", "starting", "draining", "running", "waiting", "KV use")
    for pool in status.pools:
        members = [w for w in status.workers if w.pool == pool.name]
        if not (pool.target or members):
            continue
        bounds = f"{pool.min_replicas}..{pool.max_replicas}" if pool.min_replicas < pool.max_replicas else "fixed"
        running, waiting = sum(w.num_running for w in members), sum(w.num_waiting for w in members)
        row = (pool.num_ready, pool.target, bounds, pool.num_starting, pool.num_draining, running, waiting)
        table.add_row(pool.name, *map(str, row), _kv_use(members))
    return table


def _workers(status: ClusterStatus) -> Table:
    table = _table("worker", "role", "state", "since", "address", "node", "pid", "running", "waiting", "KV use")
    for w in sorted(status.workers, key=lambda w: (w.pool, w.worker_id)):
        table.add_row(
            w.worker_id,
            w.role,
            _coloured(w.phase),
            _duration(w.phase_s),
            w.address or "",
            ", ".join((w.node, *w.rank_host_nodes)) if w.node else "",
            str(w.pid or ""),
            str(w.num_running),
            str(w.num_waiting),
            _kv_use([w]),
        )
    return table


def _routers(status: ClusterStatus) -> Table:
    table = _table("router", "state", "HTTP", "gRPC", "pid")
    for r in status.routers:
        http = f"{r.host}:{r.http_port}" if r.http_port else ""
        grpc = f"{r.host}:{r.grpc_port}" if r.grpc_port else ""
        table.add_row(r.router_id, _coloured(r.phase), http, grpc, str(r.pid or ""))
    return table


def _links(status: ClusterStatus) -> Table:
    table = _table("sink", "source", "transport", "GB", "GB/s", "reads", "failed pulls")
    for link in sorted(status.links, key=lambda link: (link.sink, link.source)):
        table.add_row(
            link.sink,
            f"<- {link.source}",
            link.transport,
            f"{link.num_bytes / 1e9:.3f}",
            f"{link.bytes_per_s / 1e9:.2f}",
            str(link.num_reads),
            str(link.num_failed),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _coloured(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, "yellow"))


def _kv_use(workers: list[WorkerStatus]) -> str:
    blocks = sum(w.num_blocks for w in workers)
    free = sum(w.num_free_blocks for w in workers)
    return f"{1 - free / blocks:.0%} of {blocks}" if blocks else ""


def _trouble(pool: PoolStatus) -> str:
    retry = f", next try in {pool.retry_in_s:.0f} s" if pool.retry_in_s > 0 else ""
    return f"last lost {pool.last_error}{retry}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
