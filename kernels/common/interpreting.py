"""Triton's interpreter without what it does over and over: nothing changes of what kernels compute, nor of what is
checked, and tests of interpreted kernels take half the time.

lang.py imports it where TRITON_INTERPRET=1, and nowhere else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter

interpreter: Any = triton.runtime.interpreter  # what is replaced is private there
REPLACED = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")


def hasten() -> None:
    """Call once, before any kernel is launched. Does nothing with a version of Triton that has other names."""
    if not all(hasattr(interpreter, name) for name in REPLACED):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # sums and products in 64 bits too, to see an overflow, of which only `debug` tells
        builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _of_scalars(interpreter._get_np_dtype)
    builder.get_block_ty = block_of = _kept_blocks()
    tl.block_type.with_element_ty = lambda self, scalar_ty: block_of(scalar_ty, self.shape)


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """patch: makes what a function's module sees of triton.language compute; what it returns restores that. It is
    called for each launch and for each call of another function: thousands, in few modules. Nothing is compiled where
    kernels are interpreted, so nothing need be restored."""
    patched = set[int]()

    def patch_module(fn: Any) -> Any:
        if (module := id(fn.__globals__)) not in patched:
            patched.add(module)
            patch(fn)
        return interpreter._LangPatchScope()

    return patch_module


def _of_scalars(find: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """find: tells numpy's type for one of Triton's, by a table that it makes at each call."""
    known: dict[str, np.dtype[Any]] = {}

    def of(dtype: Any) -> np.dtype[Any]:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return of


def _kept_blocks() -> Callable[[Any, Any], tl.block_type]:
    """Type of a block by that of its elements and its shape. Each is made once: nobody changes one."""
    known: dict[tuple[Any, ...], tl.block_type] = {}

    def of(scalar: Any, shape: Any) -> tl.block_type:
        key = (scalar.name, *shape)
        if key not in known:
            known[key] = tl.block_type(scalar, shape)
        return known[key]

    return of
