"""A checkpoint of which some tensors are replaced in memory: a layer as its quantisation leaves it."""

from pathlib import Path

from torch import Tensor

from ..models.checkpoint.weights import Checkpoint
from ..models.families.spec import ModelSpec


class OverlaidCheckpoint(Checkpoint):
    def __init__(self, model_path: Path, spec: ModelSpec) -> None:
        """Raises CheckpointError."""
        self.path = model_path
        self.replaced: dict[str, Tensor] = {}  # by name, of the stored shape
        super().__init__(model_path, spec)

    def stored(self, name: str, part: tuple[int | slice, ...]) -> Tensor:
        """See CheckpointFiles."""
        of = self.replaced.get(name)
        return super().stored(name, part) if of is None else of[part]
