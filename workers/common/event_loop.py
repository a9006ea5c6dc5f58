"""The event loop of our processes: uvloop, which spends less than asyncio's own on a callback, a wake-up or a socket.

Ray runs its actors on it too, where it is installed; asyncio's own serves where it is not (Windows).
"""

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
