"""CPU tensors of which some count as a GPU's, with their numbers: what torch refuses of tensors of both is refused.

python -m tests.support.gpu.marked_device GROUP...
    has the small cases of benchmarks/gpu/kernel_cases/GROUP.py make their inputs and references so, and says which fail

A described device (described_device.py) has no numbers: it cannot compute what reads some back, as references do.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
_ATEN = torch.ops.aten
_COPIES = _ATEN.copy_.default, _ATEN._to_copy.default
_INDEXING = _ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default  # by the host's tensors too
_WHOLE = "scaled_dot_product_attention"  # makes tensors within, where its own are


class MixedError(RuntimeError):
    """Error: an operation is given tensors of the host and of the GPU."""


class Marks:
    """Tells which memory is the GPU's."""

    def __init__(self) -> None:
        self._is_gpus: dict[int, bool] = {}  # by address: each is set when its memory is made

    def has(self, of: Tensor) -> bool:
        return self._is_gpus.get(of.untyped_storage().data_ptr(), False)

    def mark(self, made: Any, *, is_gpus: bool) -> Any:
        for of in _tensors(made):
            self._is_gpus[of.untyped_storage().data_ptr()] = is_gpus
        return made

    def on(self, tensors: Sequence[Tensor], what: object) -> bool:
        """Return where an operation is computed. Raises MixedError."""
        if len({self.has(of) for of in tensors if of.dim() and of.numel()}) > 1:
            raise MixedError(f"{what} is given tensors of the host and of the GPU")
        return any(map(self.has, tensors))


class MarkedOperations(TorchDispatchMode):
    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        checked = () if func in _COPIES else (args[0],) if func in _INDEXING and self._marks.has(args[0]) else given
        is_gpus = self._marks.on(checked, func) or any(map(self._marks.has, given))
        result = func(*args, **kwargs)
        if not func._schema.is_mutable:
            known = {of.untyped_storage().data_ptr() for of in given}
            self._marks.mark(
                [of for of in _tensors(result) if of.untyped_storage().data_ptr() not in known], is_gpus=is_gpus
            )
        return result


class MarkedFunctions(TorchFunctionMode):
    """Answers of tensors about their device, and functions that are told one."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, marks = dict(kwargs or {}), getattr(func, "__name__", ""), self._marks
        if name == "__get__" and (asked := func.__self__.__name__) in ("device", "is_cpu", "is_cuda"):
            is_gpus = marks.has(args[0])
            return {"device": GPU if is_gpus else torch.device("cpu"), "is_cpu": not is_gpus, "is_cuda": is_gpus}[asked]
        if name == "launched":  # of kernels/common/lang.py
            with self:
                return args[0](*args[1:], **kwargs)
        if name == _WHOLE:
            is_gpus = marks.on(_tensors((args, kwargs)), name)
            with _disable_current_modes():
                return marks.mark(func(*args, **kwargs), is_gpus=is_gpus)
        if name == "numpy" and marks.has(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name in ("to", "cpu", "cuda"):
            return self._moved(func, name, *args, **kwargs)
        is_gpus = marks.has(args[0]) if name.startswith("new_") else None
        if "device" in kwargs:
            is_gpus, kwargs["device"] = _is_gpu(kwargs["device"]), "cpu"
        kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        return result if is_gpus is None else marks.mark(result, is_gpus=is_gpus)

    def _moved(self, func: Any, name: str, of: Tensor, *rest: Any, device: Any = None, **kwargs: Any) -> Tensor:
        marks, others = self._marks, list[Any]()
        for each in rest:
            if isinstance(each, str | torch.device):
                device = each
            else:
                others.append(each)
        kwargs.pop("non_blocking", None)
        is_gpus = name == "cuda" or (name != "cpu" and (marks.has(of) if device is None else _is_gpu(device)))
        made = func(of, *others, **kwargs) if name == "to" and (others or kwargs) else of
        if is_gpus != marks.has(of):
            made = marks.mark(made.clone(), is_gpus=is_gpus)
        return made


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _tensors(of: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, Tensor)]


def problems_of(group: str) -> list[str]:
    """Cases whose inputs or references cannot be made of a GPU's tensors, and why. To be called where Triton is
    interpreted."""
    from benchmarks.gpu.kernel_cases import common
    from diptych.kernels.common import tuning

    chip, chip_of, problems, marks = tuning.chip_of(torch.device("cpu")), tuning.chip_of, list[str](), Marks()

    class Numbers(common.Random):
        def __init__(self, seed: int) -> None:
            self._generator = torch.Generator().manual_seed(seed)

    common.DEVICE, common.Random = GPU, Numbers  # type: ignore[misc]
    module: Any = importlib.import_module(f"benchmarks.gpu.kernel_cases.{group}")
    for each in [of for of in sys.modules.values() if getattr(of, "chip_of", None) is chip_of]:
        each.chip_of = lambda _: chip  # type: ignore[attr-defined]

    def failing(what: str, work: Callable[[], object]) -> Any:
        try:
            return work()
        except Exception as e:
            problems.append(f"{what}: {type(e).__name__}: {e}")

    with MarkedFunctions(marks), MarkedOperations(marks):
        for case in failing(group, lambda: list(module.cases())) or ():
            what = f"{case.kernel}, {case.shape}"
            found = failing(what, lambda case=case: case.run(case.make(0)))
            failing(what, lambda case=case, found=found: case.reference(case.make(0), found))
    return problems


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    assert triton.__version__
    found = [problem for group in sys.argv[1:] for problem in problems_of(group)]
    print(*found, sep="\n")
    sys.exit(1 if found else 0)
