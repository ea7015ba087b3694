"""A finite queue with a callback: what the devices and underlays in memory receive from.

It behaves towards the event loop as a readable descriptor does: while something is in it, the watcher is called, once per
turn of the loop, until nothing is left.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """At most `capacity` items wait; `refused` counts those that found it full."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._ready: Callable[[], None] | None = None
        self.refused = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """Add `item`; False, and counted, if there is no room."""
        if len(self._items) >= self._capacity:
            self.refused += 1
            return False
        self._items.append(item)
        if self._ready is not None and len(self._items) == 1:
            asyncio.get_running_loop().call_soon(self._notify)
        return True

    def take(self) -> T:
        """The oldest item. Raises IndexError if there is none."""
        return self._items.popleft()

    def peek(self) -> T:
        """The oldest item, which stays. Raises IndexError if there is none."""
        return self._items[0]

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on call `ready` from the running loop while items wait; those that wait already count."""
        self._ready = ready
        asyncio.get_running_loop().call_soon(self._notify)

    def unwatch(self) -> None:
        """Call it no more; items go on waiting."""
        self._ready = None

    def _notify(self) -> None:
        if self._ready is not None and self._items:
            self._ready()
            asyncio.get_running_loop().call_soon(self._notify)
