"""Gluon's kernels on a CPU: their functions as Python, with what a multiprocessor does besides them.

Groups of warps take turns at each barrier and at each access to shared memory, in an order that depends on a seed.
Copies and products are done as soon as they are issued, as late as somebody waits for them, or in between. Shared
memory is NaN at first. So where a group does not wait, or for a wrong phase, or uses a buffer again too early, one of
the orders gives wrong numbers, or groups that wait for each other for ever. An error at once is a wait for copies that
belong to no group of copies, and a product of what was stored without a fence.

Threads of a group go together, and layouts are not looked at: what is missing within a group is not seen, nor whether
Triton compiles it.
"""

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .gluon_numbers import LAYOUT, Barrier, Barriers, Dtype, EmulationError, Factor, Pointer, Shared, Tile

EARLY, LATE, PRODUCTS_LATE, ANY = "early", "late", "products late", "any time"  # when copies and products are done
ORDERS = EARLY, LATE, PRODUCTS_LATE, ANY
PAUSES = 0.3  # share of the places at which another group may go on, or something ends


@dataclass
class Operation:
    """A copy or a product that is under way."""

    work: Callable[[], object]
    after: "Operation | None" = None
    is_done: bool = False
    result: Any = None

    def finish(self) -> None:
        if not self.is_done:
            if self.after is not None:
                self.after.finish()
            self.is_done, self.result = True, self.work()


@dataclass
class Group:
    """A group of warps, on a thread of its own that goes on when it is told to."""

    goes_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_ready: Callable[[], bool] = lambda: True
    is_over: bool = False
    rank: float = 0.0
    loose: list[Operation] = field(default_factory=list[Operation])  # copies that no group of copies has
    copies: list[list[Operation]] = field(default_factory=list[list[Operation]])
    products: list[Operation] = field(default_factory=list[Operation])


class _Ended(BaseException):
    """Another group has failed."""


class Machine:
    """One program of a kernel. seed, when: of the order of what happens."""

    def __init__(self, place: Sequence[int], grid: Sequence[int], seed: int, when: str) -> None:
        self.place, self.grid, self._random, self._when = place, grid, Random(seed), when
        self._groups: list[Group] = []
        self._memory: list[Any] = []  # unfenced flags
        self._under_way: list[Operation] = []
        self._goes_on = threading.Semaphore(0)
        self._is_ranked = self._random.random() < 0.5
        self._problem: BaseException | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Raises what a group does, or EmulationError."""
        self._start(work)
        try:
            while self._problem is None and not all(group.is_over for group in self._groups):
                self._go_on()
        except BaseException as e:  # of a copy or a product
            self._problem = e
        for group in self._groups:
            group.goes_on.release()
        if self._problem is not None:
            raise self._problem

    def _go_on(self) -> None:
        if self._when == ANY and self._random.random() < PAUSES:
            self._finish_one()
        ready = [group for group in self._groups if not group.is_over and group.is_ready()]
        if ready:
            # One is ahead of the others as far as it can be, and another behind them; or they take turns at random.
            first = max(ready, key=lambda group: group.rank)
            group = first if self._is_ranked else self._random.choice(ready)
            group.goes_on.release()
            self._goes_on.acquire()
        elif not self._finish_one():
            raise EmulationError("all groups of warps wait for each other")

    @property
    def group(self) -> Group:
        return _GROUP.of

    def _start(self, work: Callable[[], object]) -> Group:
        group = Group(rank=self._random.random())

        def run() -> None:
            _GROUP.of, _MACHINE.of = group, self
            group.goes_on.acquire()
            try:
                if self._problem is None:
                    work()
            except _Ended:
                pass
            except BaseException as e:
                self._problem = self._problem or e
            group.is_over = True
            self._goes_on.release()

        self._groups.append(group)
        threading.Thread(target=run, daemon=True).start()
        return group

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let other groups go on. until: the group goes on once it is true."""
        group = self.group
        if until is None and not self._is_ranked and self._random.random() > PAUSES:
            return
        group.is_ready = until or (lambda: True)
        self._goes_on.release()
        group.goes_on.acquire()
        group.is_ready = lambda: True
        if self._problem is not None:
            raise _Ended

    def specialize(self, parts: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
        """The first part is this group's."""
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        others = [self._start(lambda of=of: of[0](*of[1])) for of in parts[1:]]
        parts[0][0](*parts[0][1])
        self.pause(lambda: all(other.is_over for other in others))

    def issue(self, operation: Operation, *, is_early: bool) -> Operation:
        self._under_way.append(operation)
        if is_early:
            operation.finish()
        self.pause()
        return operation

    def copy(self, work: Callable[[], object]) -> Operation:
        return self.issue(Operation(work), is_early=self._when in (EARLY, PRODUCTS_LATE))

    def _finish_one(self) -> bool:
        """Finish one of the oldest copies and products. Returns whether there was any."""
        self._under_way = [of for of in self._under_way if not of.is_done]
        if self._under_way:
            self._random.choice(self._under_way[:4]).finish()
        return bool(self._under_way)

    def allocate(self, dtype: Dtype, shape: Sequence[int], _: Any) -> Any:
        if dtype is INT64:
            return Barriers(shape[0])
        numbers = np.full(tuple(shape), np.nan, np.float32)
        self._memory.append(np.zeros(tuple(shape), bool))
        return Shared(self.pause, dtype, numbers, self._memory[-1], shape)

    def fence(self) -> None:
        for unfenced in self._memory:
            unfenced[...] = False
        self.pause()

    def copy_rows(self, target: Shared, source: Pointer, mask: Any = None) -> None:
        """Copy by cp.async: zeros where the mask says no."""
        self.group.loose.append(self.copy(lambda: target.put(source.load(mask), is_fenced=False)))

    def commit_copies(self) -> None:
        self.group.copies.append(self.group.loose)
        self.group.loose = []

    def wait_for_copies(self, most: int) -> None:
        group = self.group
        if group.loose:
            raise EmulationError("waits for copies, of which some belong to no group of copies")
        for of in itertools.chain(*group.copies[: max(len(group.copies) - most, 0)]):
            of.finish()

    def arrive_with_copies(self, barrier: Barrier, *, increment_count: bool) -> None:
        """Each of a group's threads arrives once its copies are done, whichever groups these belong to."""
        group = self.group
        mine = [*group.loose, *itertools.chain(*group.copies)]
        group.loose, group.copies = [], []
        assert not increment_count

        def arrive() -> None:
            for of in mine:
                of.finish()
            barrier.arrive(128)

        self.copy(arrive)

    def copy_box(self, box: Any, place: Sequence[Any], barrier: Barrier, target: Shared, pred: Any = True) -> None:
        """Copy by TMA: zeros beyond the tensor."""

        def copy() -> None:
            found, firsts = np.zeros(box.block_shape, np.float32), [int(of) for of in place]
            whole = torch.as_strided(box.base, box.shape, box.strides, box.base.storage_offset())
            read = whole[tuple(slice(at, at + size) for at, size in zip(firsts, box.block_shape, strict=True))]
            found[tuple(map(slice, read.shape))] = read.float().numpy()
            target.put(found.reshape(target.shape), is_fenced=True)
            barrier.arrive(0, -found.size * box.base.element_size())

        if pred:
            self.copy(copy)

    def multiply(self, a: Any, b: Shared | Factor, acc: Any, *, is_async: bool, use_acc: Any = True) -> Operation:
        products = self.group.products
        assert is_async
        if isinstance(a, Tile):
            a = a.copy()

        def work() -> Tile:
            start = acc.result if isinstance(acc, Operation) else acc
            one = a.as_factor() if isinstance(a, Shared) else np.asarray(a)
            product = one @ b.as_factor()
            return Tile.of(product + start if use_acc else product)

        product = Operation(work, products[-1] if products else None)
        products.append(self.issue(product, is_early=self._when == EARLY))
        return products[-1]

    def wait_for_products(self, most: int, deps: Sequence[Any]) -> Any:
        products = self.group.products
        for of in products[: max(len(products) - most, 0)]:
            of.finish()
        del products[: max(len(products) - most, 0)]
        self.pause()
        found = [of.result if isinstance(of, Operation) and of not in products else of for of in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def wait_for(self, barrier: Barrier, phase: Any, **_: Any) -> None:
        self.pause(lambda: barrier.is_over(int(phase)))

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.arrive(count)
            self.pause()

    def expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if pred:
            barrier.arrive(1, num_bytes)


class OfThread(threading.local):
    of: Any = None


_GROUP, _MACHINE = OfThread(), OfThread()
INT64 = Dtype(torch.int64)


def _of_machine(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*of: Any, **named: Any) -> Any:
        return method(_MACHINE.of, *of, **named)

    return call


def _tiles(function: Callable[..., Any]) -> Callable[..., Tile]:
    return lambda *of, **named: Tile.of(function(*of, **named))


GL: Any = SimpleNamespace(
    float32=Dtype(torch.float32),
    int32=Dtype(torch.int32),
    int64=INT64,
    int1=Dtype(torch.bool),
    arange=lambda start, end, layout=None: Tile.of(np.arange(start, end, dtype=np.int32)),
    zeros=lambda shape, dtype, layout=None: Tile.of(np.zeros(tuple(shape), np.float32)),
    full=lambda shape, value, dtype, layout=None: dtype.rounded(np.full(tuple(shape), value)),
    where=_tiles(np.where),
    maximum=_tiles(np.maximum),
    minimum=_tiles(np.minimum),
    max=_tiles(np.max),
    sum=_tiles(np.sum),
    exp=_tiles(np.exp),
    exp2=_tiles(np.exp2),
    log2=_tiles(np.log2),
    cdiv=lambda x, of: (x + of - 1) // of,
    convert_layout=lambda x, layout: x,
    load=lambda at, mask=None, other=0: at.load(mask, other),
    store=lambda at, value, mask=None: at.store(value, mask),
    program_id=lambda axis: Tile.of(np.int32(_MACHINE.of.place[axis])),
    num_programs=lambda axis: Tile.of(np.int32(_MACHINE.of.grid[axis])),
    inline_asm_elementwise=lambda asm, constraints, of, *_: of[0],
    allocate_shared_memory=_of_machine(Machine.allocate),
    warp_specialize=_of_machine(Machine.specialize),
    static_range=range,
    NVMMADistributedLayout=LAYOUT,
    NVMMASharedLayout=LAYOUT,
    SwizzledSharedLayout=LAYOUT,
    BlockedLayout=LAYOUT,
    SliceLayout=LAYOUT,
    DotOperandLayout=LAYOUT,
)
MBARRIER = SimpleNamespace(
    MBarrierLayout=LAYOUT,
    init=lambda barrier, count: barrier.init(count),
    wait=_of_machine(Machine.wait_for),
    arrive=_of_machine(Machine.arrive),
    expect=_of_machine(Machine.expect),
)
COPIES = SimpleNamespace(
    wait_group=_of_machine(Machine.wait_for_copies),
    commit_group=_of_machine(Machine.commit_copies),
    mbarrier_arrive=_of_machine(Machine.arrive_with_copies),
)
NAMES: dict[str, Any] = {  # of the kernels' modules, whichever has them
    "gl": GL,
    "mbarrier": MBARRIER,
    "async_copy": COPIES,
    "fence_async_shared": _of_machine(Machine.fence),
    **dict.fromkeys(("warpgroup_mma", "multiply"), _of_machine(Machine.multiply)),
    **dict.fromkeys(("begin_copy", "_fetch_rows"), _of_machine(Machine.copy_rows)),
    **dict.fromkeys(("_copy", "_fetch_box"), _of_machine(Machine.copy_box)),
    **dict.fromkeys(("barrier", "_barrier"), lambda: None),
    **dict.fromkeys(("warpgroup_mma_wait", "wait_for"), _of_machine(Machine.wait_for_products)),
    "_commit_rows": COPIES.commit_group,
    "_wait_for_rows": COPIES.wait_group,
    "_view": lambda shared, dtype, shape, layout: shared.in_columns(shape),
}


def as_python(kernel: Any, known: dict[Any, FunctionType]) -> FunctionType:
    """Return a function of Gluon's, and those that it calls, as Python that computes here."""
    if kernel.fn not in known:
        own = dict(kernel.fn.__globals__)
        known[kernel.fn] = FunctionType(kernel.fn.__code__, own, kernel.fn.__name__)
        own |= {name: NAMES[name] for name in own.keys() & NAMES.keys()}
        own |= {name: as_python(of, known) for name, of in own.items() if hasattr(of, "is_gluon")}
    return known[kernel.fn]


def _in_kernel(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Pointer.to(argument)
    if not hasattr(argument, "block_shape"):
        return argument
    base, sizes = argument.base, argument.block_shape
    block = SimpleNamespace(nbytes=math.prod(sizes) * base.element_size())
    named = {"shape": argument.shape, "strides": argument.strides, "block_shape": sizes, "block_type": block}
    return SimpleNamespace(base=base, dtype=Dtype(base.dtype), layout=LAYOUT, **named)


@dataclass(frozen=True)
class Emulated:
    """A kernel: call it as kernel[grid](arguments)."""

    kernel: Any
    seed: int = 0
    when: str = ANY

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            names = self.kernel.arg_names
            given = [_in_kernel(of) for of in arguments]
            named = {name: of for name, of in constants.items() if name in names}
            function = as_python(self.kernel, {})
            sizes = (*grid, *[1] * (3 - len(grid)))
            for number, place in enumerate(itertools.product(*map(range, sizes))):
                Machine(place, sizes, 1000 * self.seed + number, self.when).run(lambda: function(*given, **named))

        return launch
