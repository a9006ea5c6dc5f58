"""Load from another machine: `python -m tests.support.load_process ADDRESS KEY`. For each number that it reads it waits
until so many more requests have ended, and prints what came of all. At the end of its input it ends, when they have.
"""

import asyncio
import json
import sys

from .cluster_harness import load


async def main(address: str, api_key: str) -> None:
    async with load(address, api_key=api_key) as requests:
        while number := await asyncio.to_thread(sys.stdin.readline):
            await requests.until_done(int(number))
            told = {"num_done": requests.num_done, "errors": [repr(error) for error in requests.errors]}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
