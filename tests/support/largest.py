"""Records the largest allocation within a `with`: tests memory limits without a clock or a meter of the machine."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that a tensor is made in, or is a view of."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [of.untyped_storage().nbytes() for of in tree_leaves(out) if isinstance(of, Tensor)]
        self.num_bytes = max(self.num_bytes, *made, 0)
        return out
