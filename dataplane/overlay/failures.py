"""What goes wrong on a loop of an overlay's own and would go unheard, and the end of what a test left running there."""

import asyncio
from typing import Any
from weakref import WeakKeyDictionary


class Failures:
    """Collects what is raised on `loop` and asked for by nobody: by callbacks, and by tasks.

    asyncio tells of a failed task when the garbage collector takes it, which may be late, in the middle of another test, or
    never. So all tasks are known here, weakly, and those that are left are looked at in the end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._found: list[Exception] = []
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], None] = WeakKeyDictionary()  # keeps their order
        loop.set_exception_handler(self._handle)
        loop.set_task_factory(self._make_task)

    def take(self) -> list[Exception]:
        """What there was; from now on nothing is collected."""
        self._loop.set_exception_handler(None)
        self._loop.set_task_factory(None)
        for task in list(self._tasks):
            # The flag by which asyncio itself knows that nobody has asked. There is no public one.
            if task.done() and not task.cancelled() and getattr(task, "_log_traceback", False):
                error = task.exception()
                if isinstance(error, Exception):
                    self._found.append(error)
        self._tasks.clear()
        return self._found

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._tasks[task] = None
        return task

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Exception):
            self._found.append(error)
        else:
            loop.default_exception_handler(context)


def cancel_tasks(loop: asyncio.AbstractEventLoop) -> list[Exception]:
    """End the tasks that a test left behind, so that none is destroyed while it waits; returns what they raised then."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    results: list[Any] = []
    if tasks:
        results = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    return [result for result in results if isinstance(result, Exception)]
