"""Calls of actors, whose errors are named. A connection that breaks is no error: the call is made again."""

import asyncio
import re
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ...workers.common.errors import InternalError, WorkerLost, from_wire
from .fleet_watch import last_line
from .supervisor_name import Refused

RETRY_S = 1.0


async def ask(actor: Any, method: str, *args: Any, who: str = "its process") -> Any:
    """The answer of the actor's method, which may be called twice. Raises the DiptychError that it named, WorkerLost if
    its process died. Ray notices that within milliseconds, and the loss of a machine by its health checks."""
    while True:
        try:
            answer = await getattr(actor, method).remote(*args)
            break
        except ActorUnavailableError:  # the connection to it broke: it may well live
            await asyncio.sleep(RETRY_S)
        except RayTaskError as e:
            raise InternalError(last_line(e)) from e
        except RayError as e:
            raise WorkerLost(f"{who} ended: {_cause_of_death(e)}") from e
    if isinstance(answer, Refused):
        raise from_wire(answer.error, answer.message)
    return answer


def _cause_of_death(error: RayError) -> str:
    """Ray tells it in a page: a type, a detail, and guesses."""
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes|$)", str(error))
    if found is None:
        return last_line(error)
    kind, detail = found.groups()
    return "it was killed, ran out of memory or crashed" if kind == "SYSTEM_ERROR" else detail
