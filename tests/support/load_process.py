"""Load from another machine: `python -m tests.support.load_process ADDRESS KEY`.

For each number that it reads it waits until so many more requests have ended, and prints what came of all, and the
longest gaps since it read "forget". It ends at the end of its input, when all requests have ended.
"""

import asyncio
import json
import sys

from .cluster_harness import load


async def main(address: str, api_key: str) -> None:
    async with load(address, api_key=api_key) as requests:
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await requests.until_done(0 if line == "forget" else int(line))
            told = {"num_done": requests.num_done, "errors": [repr(error) for error in requests.errors]}
            gaps = {"gap_s": round(requests.longest_gap_s, 3), "silence_s": round(requests.longest_silence_s, 3)}
            print(json.dumps(told | gaps), flush=True)
            if line == "forget":
                requests.forget_gaps()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
