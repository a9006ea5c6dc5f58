import pytest

from diptych.kernels.cpu import load as compiled
from diptych.kernels.cpu.library import ISA_VARIABLE
from diptych.kernels.cpu.load import library
from diptych.workers.common.errors import ConfigError
from diptych.workers.execution.cpu.cpu_kernels import choose


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_an_instruction_set_that_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cpu_isa must be auto, none or one that this processor has"):
        choose("avx1024")
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=ISA_VARIABLE):
        choose()


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_kernels_built_from_other_sources_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "fingerprint", lambda: "other sources")
    library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"build\.py"):
            choose()
    finally:
        library.cache_clear()
