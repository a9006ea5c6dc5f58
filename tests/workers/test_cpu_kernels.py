import pytest

from diptych.kernels.cpu.library import ISA_VARIABLE, library
from diptych.workers.cpu_kernels import choose
from diptych.workers.errors import ConfigError


@pytest.mark.skipif(library() is None, reason="the kernels are not built")
def test_an_instruction_set_that_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cpu_isa must be auto, none or one that this processor has"):
        choose("avx1024")
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=ISA_VARIABLE):
        choose()
