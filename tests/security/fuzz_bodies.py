"""Coverage-guided fuzzing of what reads request bodies: the JSON of every HTTP route.

    python -m tests.security.fuzz_bodies [FOLDER OF THE CORPUS] [-max_total_time=600]    (extra `fuzz`)

Any error but an InvalidRequest ends it, with the input in a file. The first byte of an input chooses the reader.
"""

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["diptych"]):
    from diptych.cluster.front.http.operations import OPERATIONS
    from diptych.cluster.front.openai.tokenize import DetokenizeBody
    from diptych.cluster.front.openai.types import parse
    from diptych.workers.common.errors import InvalidRequest

BODIES = [operation for operation in OPERATIONS.values() if operation.body is not None]
VOCABULARY = 1000


def read(data: bytes) -> None:
    if not data:
        return
    kind = BODIES[data[0] % len(BODIES)].body
    try:
        body = parse(kind, data[1:])
        if isinstance(body, DetokenizeBody):
            body.check(VOCABULARY)
        else:
            body.call()
    except InvalidRequest:
        pass


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for i, operation in enumerate(BODIES):
            (Path(folder) / str(i)).write_bytes(bytes([i]) + json.dumps(operation.example).encode())
        words = {name for operation in BODIES for name in operation.body.known().served}
        (dictionary := Path(folder) / "words").write_text("".join(f'"\\"{word}\\": "\n' for word in sorted(words)))
        atheris.Setup([*sys.argv, f"-dict={dictionary}", folder], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
