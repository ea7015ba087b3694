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
    """At most `capacity` items wait; `refused` counts those that found it full. `loop` calls the watcher, by default the
    one that runs when watching begins."""

    def __init__(self, capacity: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._capacity = capacity
        self._home = loop
        self._items: deque[T] = deque()
        self._ready: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False
        self.refused = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """Add `item`; False, and counted, if there is no room."""
        if len(self._items) >= self._capacity:
            self.refused += 1
            return False
        self._items.append(item)
        self._schedule()
        return True

    def take(self) -> T:
        """The oldest item. Raises IndexError if there is none."""
        return self._items.popleft()

    def peek(self) -> T:
        """The oldest item, which stays. Raises IndexError if there is none."""
        return self._items[0]

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on call `ready` from the loop while items wait; those that wait already count.

        Items may be put while the loop does not run; `ready` is called when it does.
        """
        self._ready = ready
        self._loop = self._home or asyncio.get_running_loop()
        self._schedule()

    def unwatch(self) -> None:
        """Call it no more; items go on waiting."""
        self._ready = self._loop = None

    def _schedule(self) -> None:
        """One call in the loop's next turn, however many items are put before it."""
        if self._loop is not None and self._items and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._is_scheduled = False
        if self._ready is not None and self._items:
            self._ready()
            self._schedule()
