"""Checks made before anything is started: the model's folder, the ports, the files named. No torch."""

import errno
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from ...workers.common.errors import CheckpointError, ConfigError, PortInUse
from ...workers.common.tls import LinkTls, TlsFiles, make_identity
from ...workers.config.worker_config import WorkerConfig
from ...workers.kv.dtypes import GROUP, is_rounded_by_block
from ...workers.models.families.registry import load_spec
from ...workers.models.families.spec import ModelSpec
from ...workers.models.gguf.gguf_files import CONFIG_FILE, gguf_paths, read_gguf
from ...workers.models.gguf.gguf_tokens import read_vocabulary
from ...workers.models.head_specs.head_bytes import head_weight_bytes
from ...workers.models.head_specs.head_config import read_head_spec
from ...workers.models.head_specs.head_spec import HeadSpec
from ...workers.models.plan.draft_fit import check_draft_divides, check_draft_fits, check_kv_fits
from ...workers.models.plan.formats import check_shares
from ...workers.models.plan.kv_plan import check_kv_dtype
from ...workers.models.plan.sharding import share_of
from ...workers.models.plan.shards import read_index, shards
from ...workers.models.plan.skipped_layers import skipped_layers_of
from ...workers.telemetry.otlp import check_installed
from ..common.config import ClusterConfig, PoolConfig
from ..common.plurals import count
from ..tokens.chat_template import read_json
from ..tokens.tokenizer_files import find_sources

SHIPPED_MODEL = "tiny"
SHIPPED = (SHIPPED_MODEL, "tiny_draft", "tiny_eagle3", "tiny_mtp")  # with those that draft for it


def resolve_model(model: str) -> str:
    """The folder or GGUF file of MODEL as an absolute path; the word `tiny` is the model that ships with Diptych, and
    `tiny_draft`, `tiny_eagle3` and `tiny_mtp` draft for it."""
    if model in SHIPPED:
        return str(resources.files("diptych") / "examples" / model)
    return _absolute(model)


def resolve_paths(config: ClusterConfig) -> ClusterConfig:
    """Copy with absolute paths of the model and of what the pools' workers draft with: relative ones begin in the
    folder of this process, and workers run elsewhere."""
    pools: dict[str, PoolConfig] = {}
    for name, pool in config.pools.items():
        of, changes = config.worker(name).speculation, dict[str, str]()
        if of.draft_model is not None:
            changes["draft_model"] = resolve_model(of.draft_model)
        if of.skipped_layers is not None:
            changes["skipped_layers"] = _absolute(of.skipped_layers)
        pools[name] = pool.model_copy(update=changes) if changes else pool
    model = resolve_model(config.shared.model.model)
    return config.model_copy(update={"model": model, "pools": config.pools.model_copy(update=pools)})


def _absolute(path: str) -> str:
    """Raises ConfigError."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as e:
        raise ConfigError(f"{path} is in the home folder of a user that there is not: write the whole path") from e


def check_model(folder: Path) -> ModelSpec:
    """Read the config.json of the Hugging Face checkpoint in `folder`, or the metadata of the GGUF file that it is or
    has. Raises ConfigError or CheckpointError."""
    remedy = (
        "Give the folder of a Hugging Face checkpoint, a GGUF file, or "
        f"`{SHIPPED_MODEL}` for the model that ships with Diptych"
    )
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist. {remedy}")
    is_gguf = bool(gguf_paths(folder))
    if not folder.is_dir() and not is_gguf:
        raise ConfigError(f"{folder} is a file, and no GGUF file. {remedy}")
    if not (folder / CONFIG_FILE).is_file() and not is_gguf:
        raise CheckpointError(f"{folder} has no config.json. {remedy}")
    return load_spec(folder)


def check_checkpoint(folder: Path) -> None:
    """Raises ConfigError or CheckpointError where config.json, the tokenizer's files or the index of the weights say
    that `folder` cannot be served; of a GGUF file, its header, and its vocabulary."""
    check_model(folder)
    shards(folder, read_index(folder))
    if (model := read_gguf(folder)) is not None and find_sources(folder):
        read_vocabulary(model)
    find_sources(folder)
    read_json(folder / "tokenizer_config.json")


def check_drafts(config: ClusterConfig) -> None:
    """Raises ConfigError or CheckpointError where the pools' workers could not draft as they are told, by the files of
    the draft and of the model. What depends on a worker's kernels is told by the worker."""
    for name, pool in config.pools.items():
        worker = config.worker(name)
        if pool.bounds[1] and worker.speculation.has_model:
            with _naming(f"pools.{name}"):
                skipped_layers_of(worker, load_spec(Path(worker.model.model)))
            with _naming(f"pools.{name}.draft_model"):
                _check_draft(worker)


def check_ranks(config: ClusterConfig) -> None:
    """Raises ConfigError where a worker's ranks cannot share the model."""
    for name, pool in config.pools.items():
        worker = config.worker(name)
        if pool.bounds[1] and worker.parallel.tensor_parallel > 1:
            with _naming(f"pools.{name}"):
                spec = load_spec(Path(worker.model.model))
                check_shares(spec, worker.model.quantize, share_of(worker, spec).size)


def check_kv(config: ClusterConfig) -> None:
    """Raises ConfigError where the KV of the model cannot be kept as a pool's `kv_dtype` says, or not be handed off to
    another pool."""
    for name, pool in config.pools.items():
        worker = config.worker(name)
        if pool.bounds[1] and worker.cache.kv_dtype != "auto":
            with _naming(f"pools.{name}"):
                on_gpu, block_size = worker.model.device_kind != "cpu", worker.cache.block_size
                check_kv_dtype(load_spec(Path(worker.model.model)), worker.kv_dtype, block_size, on_gpu=on_gpu)
    caches = {name: config.worker(name).cache for name, pool in config.pools.items() if pool.bounds[1]}
    is_by_block = any(is_rounded_by_block(cache.kv_dtype) for cache in caches.values())
    for name, cache in caches.items():
        if is_by_block and cache.block_size % GROUP:
            text = f"of {cache.block_size} is not a multiple of {GROUP}, the tokens that kv_dtype kivi of another pool"
            raise ConfigError(f"pools.{name}: block_size {text} rounds together: set it to {GROUP}")


def _check_draft(config: WorkerConfig) -> None:
    of, path = config.speculation, Path(config.model.model)
    folder, longest = Path(of.draft_model or path), config.model.max_context_tokens
    if of.has_head:
        check_head(folder, path, longest, of.speculation)
    elif of.draft_model is not None:
        draft = check_draft(folder, path, longest)
        check_draft_divides(folder, draft, config.model.quantize, config.num_draft_ranks)
        shards(folder, read_index(folder))


def check_draft(folder: Path, path: Path, max_context_tokens: int | None) -> ModelSpec:
    """Read the config.json of a model that is to draft for the one in `path`. Raises ConfigError or CheckpointError
    unless it fits that."""
    _check_has_config(folder, path)
    target, draft = load_spec(path), load_spec(folder)
    check_draft_fits(folder, draft, path, target, max_context_tokens or target.max_position_embeddings)
    return draft


def check_head(folder: Path, path: Path, max_context_tokens: int | None, method: str) -> HeadSpec:
    """Read the config.json of a head that is to draft for the model in `path`. method: eagle3 or mtp. Raises
    ConfigError or CheckpointError unless it fits that, and for files that are missing or broken."""
    _check_has_config(folder, path)
    target = load_spec(path)
    head = read_head_spec(folder, target, method)
    longest = max_context_tokens or target.max_position_embeddings
    check_kv_fits(folder, head.decoder, path, target, longest)
    head_weight_bytes(folder, target, "float32")
    return head


def _check_has_config(folder: Path, path: Path) -> None:
    if not (folder / CONFIG_FILE).is_file() and not gguf_paths(folder):
        what = "has no config.json" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}. Give the folder of a model that drafts for {path}")


@contextmanager
def _naming(key: str) -> Generator[None]:
    """Put the key that is wrong before the message of what it raises."""
    try:
        yield
    except (ConfigError, CheckpointError) as e:
        raise type(e)(f"{key}: {e.message}") from e


def check_machines(config: ClusterConfig) -> None:
    """Raises ConfigError where a worker's ranks would be on several machines, and Diptych starts Ray on this one."""
    for name, pool in config.pools.items():
        if (machines := pool.parallel.machines_per_worker) > 1 and pool.bounds[1]:
            raise ConfigError(
                f"pools.{name}.machines_per_worker ({machines}) needs a Ray of several machines, and Diptych starts "
                "one on this machine alone: set RAY_ADDRESS to join such a Ray, or leave it out"
            )


def crowding(config: ClusterConfig, num_cores: int) -> str | None:
    """Warn of more workers than this machine has cores, before they start; None where each has one."""
    num = sum(
        pool.replicas * pool.parallel.data_parallel * pool.parallel.tensor_parallel for _, pool in config.pools.items()
    )
    if config.is_on_gpus or num <= num_cores:
        return None
    ranks = ", ranks counted," if num != config.pools.num_workers else ""
    return (
        f"warning: {count(num, 'worker')}{ranks} will share {count(num_cores, 'core')}: they start and compute slowly. "
        "Start fewer; `--mixed 1` is one worker that does both"
    )


def check_ports(config: ClusterConfig) -> None:
    """Raises PortInUse or ConfigError where the front door could not listen."""
    router = config.router
    for flag, port in (("--http-port", router.http_port), ("--grpc-port", router.grpc_port)):
        if port:
            check_port(router.host, port, flag)


def check_dashboard(config: ClusterConfig) -> None:
    """Raises ConfigError where a dashboard is asked for and its parts are not installed."""
    if config.dashboard and find_spec("aiohttp_cors") is None:
        raise ConfigError(
            "Ray's dashboard is not installed. Run `pip install 'ray[default]'`, or leave out --dashboard"
        )


def check_traces(config: ClusterConfig) -> None:
    """Raises ConfigError where traces are asked for in a wrong way, or OpenTelemetry is not installed."""
    check_installed(config.shared.telemetry.trace_settings(os.environ))


def check_tls(config: ClusterConfig) -> None:
    """Raises ConfigError for a certificate or key that cannot be read."""
    for key, tls in (("router.http_tls", config.router.http_tls), ("router.grpc_tls", config.router.grpc_tls)):
        for name in ("cert", "key") if tls else ():
            path = Path(getattr(tls, name))
            try:
                path.read_bytes()
            except OSError as e:
                raise ConfigError(f"{key}.{name}: cannot read {path}: {e.strerror}. Check the path") from e
    if config.tls != "auto" and (files := link_tls(config)):
        files.load()


def link_tls(config: ClusterConfig) -> LinkTls | None:
    """TLS of one start of the cluster's processes: `auto` makes a new authority each time."""
    if config.tls == "off":
        return None
    if config.tls == "auto":
        return make_identity(config.name)
    return TlsFiles(config.tls.ca, config.tls.cert, config.tls.key)


def check_port(host: str, port: int, flag: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server will: a port whose last connections still linger is free, one that listens is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise PortInUse(
                    f"port {port} on {host} is in use. Choose another with {flag}, or 0 for any free one"
                ) from e
            if e.errno == errno.EACCES:
                raise ConfigError(f"port {port} needs root rights. Choose a port above 1023 with {flag}") from e
            raise ConfigError(f"cannot listen on {host}: {e.strerror}. Is it an address of this machine?") from e
