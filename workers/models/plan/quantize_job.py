"""A checkpoint that is to be written in fewer bits (`diptych quantize`): what is wanted, checked before anything is
read. No torch.

Formats are those of compressed-tensors, which this package, vLLM and transformers read. Methods:

    rtn          round to nearest
    gptq         rounding errors are made up for by the weights of later inputs (arXiv 2210.17323)
    awq          inputs of large activations are scaled up first, by a search (arXiv 2306.00978)
    smoothquant  the range of activations is moved into the weights (arXiv 2211.10438)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError

RTN, GPTQ, AWQ, SMOOTHQUANT = "rtn", "gptq", "awq", "smoothquant"
METHODS = (RTN, GPTQ, AWQ, SMOOTHQUANT)
GROUPS = (128, 64, 32)  # inputs that may share a scale of int4, the first that divides all
MIN_SEQUENCE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class WrittenFormat:
    """Format of weights that `diptych quantize` writes."""

    format: str  # compressed-tensors' name
    bits: int
    is_float: bool
    strategy: str  # which weights share a scale: compressed-tensors' name
    group: int = 0  # inputs that share a scale; 0: not by groups, or by one of GROUPS
    methods: tuple[str, ...] = (RTN,)  # the second is the one that a calibration text stands for
    has_activations: bool = False  # those who compute in this format quantise them too, each token by its own scale

    @property
    def kind(self) -> str:
        return "float" if self.is_float else "int"


WRITTEN = {
    "int8": WrittenFormat("pack-quantized", 8, False, "channel", methods=(RTN, GPTQ, AWQ)),
    "int4": WrittenFormat("pack-quantized", 4, False, "group", methods=(RTN, GPTQ, AWQ)),
    "w8a8": WrittenFormat("int-quantized", 8, False, "channel", methods=(RTN, SMOOTHQUANT, GPTQ), has_activations=True),
    "fp8": WrittenFormat("float-quantized", 8, True, "channel", has_activations=True),
    "mxfp4": WrittenFormat("mxfp4-pack-quantized", 4, True, "group", group=32),
    "nvfp4": WrittenFormat("nvfp4-pack-quantized", 4, True, "tensor_group", group=16),
}


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Job of `diptych quantize`: what it is asked for."""

    model: str  # folder of the checkpoint
    out: str  # folder to make
    format: str  # a key of WRITTEN
    calibrate: str | None = None  # file of text
    method: str | None = None  # of METHODS; None: by the format, and whether there is a text
    ignore: tuple[str, ...] = ()  # names of modules, or "re:" and a regular expression
    group_size: int | None = None  # None: of GROUPS
    samples: int = 128  # sequences of the text
    sequence_tokens: int = 512  # of each, at most
    act_order: bool = True  # GPTQ rounds the inputs of the largest activations first
    damping: float = 0.01  # GPTQ: of the mean of the Hessian's diagonal, added to it
    memory_bytes: int | None = None  # None: what is free

    @property
    def written(self) -> WrittenFormat:
        return WRITTEN[self.format]

    @property
    def chosen_method(self) -> str:
        """One of METHODS."""
        if self.method is not None:
            return self.method
        methods = self.written.methods
        return methods[1] if self.calibrate is not None and len(methods) > 1 else RTN

    def ignores(self, module: str) -> bool:
        """Return whether a module, by its name in the checkpoint, is to stay as it is."""
        return any(re.match(of[3:], module) if of.startswith("re:") else of == module for of in self.ignore)

    def to_json(self) -> dict[str, Any]:
        return {of.name: getattr(self, of.name) for of in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "QuantizeJob":
        given: dict[str, Any] = {**values, "ignore": tuple(values["ignore"])}
        return cls(**given)

    def check(self) -> None:
        """Raise ConfigError where it cannot be done, whatever the model."""
        if self.format not in WRITTEN:
            raise ConfigError(f"--format must be one of {', '.join(WRITTEN)}, got {self.format!r}")
        if self.method is not None and self.method not in METHODS:
            raise ConfigError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}")
        self._check_method()
        self._check_numbers()
        for pattern in self.ignore:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as e:
                raise ConfigError(f"--ignore {pattern!r} is no regular expression after re: ({e})") from e
        if self.calibrate is not None and not Path(self.calibrate).is_file():
            raise ConfigError(f"--calibrate {self.calibrate} is no file: give one of text, or JSON lines with `text`")
        out = Path(self.out)
        if out.exists() or out.is_symlink():
            raise ConfigError(f"--out {out} exists already: name a folder that does not, or remove it")
        if not out.absolute().parent.is_dir():
            raise ConfigError(f"--out {out}: its parent is no folder: make that first")

    def _check_method(self) -> None:
        method, methods = self.chosen_method, self.written.methods
        if method not in methods:
            raise ConfigError(f"--method {method} does not make {self.format}: use {' or '.join(methods)}")
        if method != RTN and self.calibrate is None:
            raise ConfigError(f"--method {method} needs --calibrate FILE: text of the kind that the model will meet")
        if method == RTN and self.calibrate is not None:
            of_text = methods[1:] if len(methods) > 1 else ()
            remedy = f"use --method {' or '.join(of_text)}, or leave" if of_text else "leave"
            raise ConfigError(f"--calibrate changes nothing of {self.format} by {RTN}: {remedy} --calibrate out")

    def _check_numbers(self) -> None:
        if self.group_size is not None and (self.format != "int4" or self.group_size not in GROUPS):
            raise ConfigError(
                f"--group-size must be one of {', '.join(map(str, GROUPS))}, with --format int4, got {self.group_size}"
            )
        if self.samples < 1:
            raise ConfigError(f"--samples must be at least 1, got {self.samples}")
        if self.sequence_tokens < MIN_SEQUENCE_TOKENS:
            raise ConfigError(f"--sequence-tokens must be at least {MIN_SEQUENCE_TOKENS}, got {self.sequence_tokens}")
        if not 0 < self.damping < 1:
            raise ConfigError(f"--damping must be between 0 and 1, got {self.damping}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError("--memory-gib must be above 0")
