"""Findings about a cluster's certificates."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.cluster.common.config import ClusterConfig
from diptych.cluster.preflight import doctor
from diptych.cluster.preflight.doctor import Verdict, certificates
from diptych.kernels.attention.libraries import prompt_library
from diptych.kernels.gemm import scaled_library
from diptych.kernels.mla import latent_library
from diptych.kernels.moe import expert_library
from diptych.workers.common import tls as tls_module
from diptych.workers.common.tls import make_identity


def config(**given: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": "m", **given})


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    identity = make_identity("own")
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_bytes(getattr(identity, name))
    return {name: str(tmp_path / name) for name in ("ca", "cert", "key")}


@pytest.mark.parametrize("word", ["off", "auto"])
def test_without_files_there_is_nothing_to_renew(word: str) -> None:
    [found] = certificates(config(tls=word))
    assert (found.name, found.verdict) == ("TLS between processes", Verdict.OK) and word in found.detail


def test_the_end_of_each_certificate_is_told(files: dict[str, str]) -> None:
    pair = {"cert": files["cert"], "key": files["key"]}
    found = list(certificates(config(tls=files, router={"http_tls": pair, "grpc_tls": pair})))
    assert [each.name for each in found] == ["TLS between processes", "router.http_tls", "router.grpc_tls"]
    year = str((datetime.datetime.now(datetime.UTC) + tls_module.VALID_FOR).year)
    assert all(each.verdict is Verdict.OK and f"valid until {year}" in each.detail for each in found)


@pytest.mark.parametrize(("days", "verdict"), [(-1, Verdict.FAILED), (29, Verdict.WARNING), (31, Verdict.OK)])
def test_a_certificate_that_ends_soon_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(tls_module, "VALID_FOR", datetime.timedelta(days=days))
    monkeypatch.setattr(tls_module, "CLOCKS_DIFFER", datetime.timedelta(days=2))
    identity = make_identity("own")
    paths = {name: str(tmp_path / name) for name in ("ca", "cert", "key")}
    for name, path in paths.items():
        Path(path).write_bytes(getattr(identity, name))
    pair = {"cert": paths["cert"], "key": paths["key"]}
    found = list(certificates(config(tls=paths, router={"http_tls": pair})))
    assert [each.verdict for each in found] == [verdict] * 2
    assert verdict is Verdict.OK or all("renew it" in each.detail + each.remedy for each in found)


def test_what_peers_and_clients_would_refuse_is_found(files: dict[str, str], tmp_path: Path) -> None:
    stranger = make_identity("other")
    (tmp_path / "ca").write_bytes(stranger.ca)
    (tmp_path / "strange").write_bytes(stranger.key)
    pair = {"cert": files["cert"], "key": str(tmp_path / "strange")}
    link, door = certificates(config(tls=files, router={"http_tls": pair}))
    assert link.verdict is Verdict.FAILED and "of none of the authorities in `ca`" in link.detail
    assert door.verdict is Verdict.FAILED and "is not the key of" in door.detail
    [gone] = certificates(config(tls=files | {"cert": str(tmp_path / "absent")}))
    assert gone.verdict is Verdict.FAILED and "cannot read" in gone.detail


def test_a_library_for_gpus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CUDNN_VERSION", "print(0)")
    monkeypatch.setattr(doctor, "LIBRARIES", {"absent": "no_such_module", "within it": "no_such_module.part"})
    assert doctor.library_finding().detail == "none: kernels of our own compute"
    modules = {"absent": "no_such_module", "FlashAttention 3": "json", "DeepGEMM": "csv"}
    monkeypatch.setattr(doctor, "LIBRARIES", modules)
    found = doctor.library_finding()
    assert found.verdict is Verdict.OK
    assert found.detail.startswith("FlashAttention 3, DeepGEMM: workers on GPUs that they know")


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("print(91501)", "cuDNN 9.15.1"),
        ("print(8902)", "cuDNN 8.9.2"),
        ("print(0)", "none"),  # torch for CPUs, whatever else is installed
        ("import no_such_module", "cuDNN"),
        ("import time; time.sleep(1000)", "cuDNN"),
    ],
)
def test_torch_is_asked_for_cudnn_and_only_else_its_package_counts(
    code: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LIBRARIES", {}), ("CUDNN_PACKAGE", "json"), ("CUDNN_VERSION", code)):
        monkeypatch.setattr(doctor, name, value)
    if "sleep" in code:
        monkeypatch.setattr(doctor, "IMPORT_S", 0.1)
    assert doctor.library_finding().detail.startswith(f"{detail}: ")


def test_torch_says_which_cudnn_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIBRARIES", {})
    has_cudnn = torch.version.cuda is not None and torch.backends.cudnn.version() is not None
    assert doctor.library_finding().detail.startswith("cuDNN " if has_cudnn else "none: ")


def test_libraries_are_looked_for_as_workers_do() -> None:
    packages = [*(build.package for build in prompt_library.BUILDS)]
    packages += [latent_library.PACKAGE, scaled_library.PACKAGE, expert_library.PACKAGE]
    assert list(doctor.LIBRARIES.values()) == packages
