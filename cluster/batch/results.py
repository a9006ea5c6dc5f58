"""Files of a batch's results in OpenAI's format: answers in one, failures in the other."""

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from ...workers.common.errors import ConfigError, WorkloadError


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a request. `status`: of the HTTP answer, 0 without one. `body`: of the answer. `message`: why there is
    no answer."""

    custom_id: str
    status: int
    request_id: str
    body: object
    code: str = ""
    message: str = ""

    @property
    def is_answer(self) -> bool:
        return self.status == 200

    def to_line(self) -> bytes:
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        fields = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response if self.status else None,
            "error": None if self.is_answer else {"code": self.code, "message": self.message},
        }
        return json.dumps(fields).encode() + b"\n"


class ResultFiles:
    """`done`: ids whose answers the output already held, when it was opened to resume. Each line reaches the operating
    system before the next request is sent, so that a killed command loses none; what it was writing is cut off."""

    def __init__(self, output: Path, failures: Path, *, resume: bool) -> None:
        """Raises ConfigError where the files cannot be written, or are there and shall not be resumed."""
        if not resume and (there := next((p for p in (output, failures) if p.exists()), None)):
            raise ConfigError(f"{there} exists: continue it with --resume, or choose another --output")
        try:
            self._output = output.open("r+b" if output.exists() else "x+b", buffering=0)
        except OSError as e:
            raise ConfigError(f"cannot write {output}: {e.strerror}") from e
        try:
            self.done = _complete_ids(self._output, output)
            self._failures = failures.open("wb", buffering=0)  # what failed is sent again
        except OSError as e:
            self._output.close()
            raise ConfigError(f"cannot write {failures}: {e.strerror}") from e
        except WorkloadError:
            self._output.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._failures.close()

    def write(self, outcome: Outcome) -> None:
        """Raises ConfigError where the file cannot hold it."""
        file = self._output if outcome.is_answer else self._failures
        line = memoryview(outcome.to_line())
        try:
            while line:  # a disk that is nearly full takes a part
                line = line[os.write(file.fileno(), line) :]
        except OSError as e:
            raise ConfigError(f"cannot write {file.name}: {e.strerror}. Then continue with --resume") from e


def _complete_ids(file: IO[bytes], path: Path) -> frozenset[str]:
    """Ids of the file's lines; cuts off a last one that has no end, and leaves the file's position there."""
    ids: set[str] = set()
    end = 0
    for number, text in enumerate(iter(file.readline, b""), 1):
        if not text.endswith(b"\n"):
            break
        try:
            fields: Any = json.loads(text)
            ids.add(fields["custom_id"])
        except (ValueError, TypeError, KeyError) as e:
            raise WorkloadError(f"{path}:{number} is no result of a batch: choose another --output") from e
        end += len(text)
    file.truncate(end)
    file.seek(end)
    return frozenset(ids)
