"""Is the client still there? What waits for an answer is cancelled when it isn't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class Gone(Exception):
    """The client closed its connection."""


@asynccontextmanager
async def connected(receive: Receive) -> AsyncIterator[None]:
    """Run the block while the client is there, else cancel it and raise `Gone`.

    To be entered when the request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # Another cancellation may have come at the same time; that one must go on.
        if gone and not task.uncancel():
            raise Gone from None
        raise
    finally:
        watcher.cancel()
