"""Makes TCP stand for RDMA in the processes of a test that have this folder in PYTHONPATH, while there is a file that
FABRIC names when they import NIXL's thread.

UCX then uses `tcp` where it would use `ib`. Diptych itself never does: whoever reaches UCX's TCP port may write to any
address of the process.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

MODULE = "diptych.workers.transport.nixl_thread"


class TcpLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert vars(module)["TLS_RDMA"] == "ib"
        if Path(os.environ["FABRIC"]).exists():
            vars(module)["TLS_RDMA"] = "tcp"


class TcpFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = TcpLoader(spec.loader)
        return spec


sys.meta_path.insert(0, TcpFinder())
