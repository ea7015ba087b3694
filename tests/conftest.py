"""What all tests share: nothing may leak, and what needs root is skipped aloud without it.

After each test, when its fixtures are gone, no descriptor and no network namespace may be left that was not there before;
in a module that says ``SHARES_A_LAB = True`` after its last test, since its tests use one lab. Warnings are errors
(pyproject.toml), which makes a forgotten task or an unclosed socket one, too.
"""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from dataplane import lab as lab_module

settings.register_profile(
    "project",
    deadline=None,  # the same tests run uncompiled, fifty times slower
    derandomize=True,  # a run repeats exactly
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")

uvloop.new_event_loop().close()  # the first loop opens a pipe for signals that libuv keeps for the life of the process


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        if name in {"0", "1", "2"}:  # pytest swaps them to capture output
            continue
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


def _namespaces() -> set[str]:
    """Those of the labs of this process, whose names hold its number (dataplane/lab/hosts.py)."""
    folder = Path("/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if f"{os.getpid():x}-" in name}


def _unit(item: pytest.Item | None) -> str:
    """What must not leak: the test, or its module."""
    if item is None:
        return ""
    module = item.getparent(pytest.Module)
    shared = module is not None and getattr(module.obj, "SHARES_A_LAB", False)
    return module.nodeid if module is not None and shared else item.nodeid


_before: dict[str, tuple[dict[int, str], set[str]]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _before.setdefault(_unit(item), (_descriptors(), _namespaces()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if _unit(item) == _unit(nextitem):
        return
    descriptors, namespaces = _before.pop(_unit(item))
    leaked = {fd: what for fd, what in _descriptors().items() if descriptors.get(fd) != what}
    end = time.monotonic() + 5
    while leaked and time.monotonic() < end:  # gRPC closes its sockets in threads of its own
        gc.collect()
        time.sleep(0.02)
        leaked = {fd: what for fd, what in _descriptors().items() if descriptors.get(fd) != what}
    assert not leaked, f"descriptors left open: {leaked}"
    assert _namespaces() <= namespaces, "network namespaces left behind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = lab_module.missing()
    if reason is None:
        return
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if item.get_closest_marker("netns"):
            item.add_marker(skip)
