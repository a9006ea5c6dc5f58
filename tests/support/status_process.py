"""Tells a running cluster's status: a line on standard input asks, a line of JSON answers.

Each `diptych status --json` would import Ray and join it, which takes seconds of processor time; this one joins once.

    python status_process.py NAME          questions: "status" or "check", the latter as with --check
"""

import json
import sys

from diptych.cluster.placement.remote import connected
from diptych.workers.common.errors import DiptychError


def main(name: str) -> int:
    answers = sys.stdout  # which is another while connected
    try:
        with connected(name) as client:
            for line in sys.stdin:
                supervisor = client.find(name)  # another one may have taken its place
                found = supervisor.status().to_json()
                problems = supervisor.audit() if line.strip() == "check" else {}
                answer = found | {"problems": {k: v for k, v in problems.items() if v}}
                print(json.dumps(answer), file=answers, flush=True)
    except DiptychError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
