"""Regenerate the committed protobuf modules: `python proto/generate.py [OUT]` (default: this folder)."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ENVOYS = ("envoy_base", "envoy_ext_proc", "envoy_http_status", "envoy_processing_mode")  # in part
PROTOS = ("inference", "kv", "worker", *ENVOYS)
# Oldest runtimes that can load what is generated, though it asks for its generator's own version: what it calls has
# been there since. A test loads it with them (tests/workers/common/test_oldest_versions.py).
OLDEST_PROTOBUF, OLDEST_GRPC = (6, 30, 0), "1.70.0"


def generate(out: Path) -> None:
    """Write `*_pb2.py`, `*_pb2_grpc.py` and their stubs for every .proto file into `out`."""
    # Plugins are looked up on PATH, where an environment that is not activated is missing.
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"-Idiptych/proto={HERE}",
                f"--python_out={tmp}",
                f"--grpc_python_out={tmp}",
                f"--mypy_out=quiet:{tmp}",
                f"--mypy_grpc_out=quiet:{tmp}",
                *(f"diptych/proto/{name}.proto" for name in PROTOS),
            ],
            check=True,
            env=os.environ | path,
        )
        for path in sorted(Path(tmp, "diptych", "proto").iterdir()):
            if "_pb2_grpc." in path.name and not has_service(path.name.partition("_pb2_grpc.")[0]):
                continue
            # The package imports relatively, so that every tool resolves it by path.
            text = re.sub(r"from diptych\.proto import (\w+) as", r"from . import \1 as", path.read_text())
            text = re.sub(r"from diptych\.proto import", "from . import", text)
            (out / path.name).write_text(for_oldest(text))


def has_service(name: str) -> bool:
    return "\nservice " in (HERE / f"{name}.proto").read_text()


def for_oldest(text: str) -> str:
    """Replace the versions that a generated module asks for."""
    numbers = "".join(f"\n    {number}," for number in OLDEST_PROTOBUF)
    text = re.sub(r"(Domain\.PUBLIC,)(\n    \d+,){3}", rf"\1{numbers}", text)
    return re.sub(r"(?<=GRPC_GENERATED_VERSION = )'[\d.]+'", f"'{OLDEST_GRPC}'", text)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
