"""vLLM's own load generator, kept in one process: `vllm bench serve` takes longer to import than most runs last.

Run by versus_vllm.py with the Python of vLLM's environment, so it knows nothing of Diptych. Life: prints "ready", then
for each line on stdin, a JSON list of the arguments of `vllm bench serve`, prints one line of JSON, its result. What
the generator itself prints goes to stderr.
"""

import argparse
import json
import sys
from contextlib import redirect_stdout

from vllm.benchmarks.serve import add_cli_args
from vllm.benchmarks.serve import main as bench_serve


def main() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    print("ready", flush=True)
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            result = bench_serve(parser.parse_args(json.loads(line)))
        print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()
