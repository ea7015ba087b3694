"""Wait for a time or for an event, whichever comes first."""

import asyncio
from collections.abc import Awaitable


async def first_of(sleep: Awaitable[None], event: asyncio.Event) -> None:
    """Until `sleep` ends or `event` is set; the event is cleared then."""
    sleeping, changing = asyncio.ensure_future(sleep), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((sleeping, changing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in (sleeping, changing):
            one.cancel()
        await asyncio.gather(sleeping, changing, return_exceptions=True)
    event.clear()
