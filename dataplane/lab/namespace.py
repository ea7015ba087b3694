"""A network namespace and what can be done in it.

Theory of operation: everything is done with iproute2's ``ip``, so that what the lab does can be done by hand. A thread of
ours enters a namespace only to open a socket or to write under /proc/sys, both of which stay there when it comes back.
"""

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.lab.hosts import Lab

_NETNS_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.005

Command = str | Sequence[str]


class LabError(Exception):
    """The lab cannot be set up; the text holds the command that failed and what it said."""


def missing() -> str | None:
    """Why no lab can be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root (or a user namespace: unshare -Urnm)"
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian package iproute2)"
    return None


def namespace_exists(name: str) -> bool:
    """Whether a namespace of that name is there."""
    return (_NETNS_DIR / name).exists()


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run the body with this thread in `namespace`; sockets made there stay there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        finally:
            os.close(descriptor)

    home = Path(f"/proc/self/task/{threading.get_native_id()}/ns/net")
    back = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(_NETNS_DIR / namespace)
        try:
            yield
        finally:
            if libc.setns(back, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot go back to the old namespace")
    finally:
        os.close(back)


@dataclass
class Namespace:
    """A network namespace of the lab, named `name`."""

    lab: "Lab"
    name: str

    def ip(self, *commands: str) -> None:
        """Run each of `commands` with ``ip -n NAME``; raises LabError on the first that fails."""
        script = "\n".join(commands)
        call(["ip", "-n", self.name, "-batch", "-"], script, what=script)

    def run(self, command: Command, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in here to its end; output is captured as text. A line is split as a shell would, without one."""
        defaults: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        return subprocess.run(self._command(command), **(defaults | options))  # noqa: PLW1510 - check is in the defaults

    def popen(self, command: Command, **options: Any) -> "subprocess.Popen[str]":
        """Start a program in here; the lab ends it at the latest when it closes."""
        process: subprocess.Popen[str] = subprocess.Popen(self._command(command), text=True, **options)
        self.lab.processes.append(process)
        return process

    def _command(self, command: Command) -> list[str]:
        words = shlex.split(command) if isinstance(command, str) else command
        return ["ip", "netns", "exec", self.name, *words]

    def settle(self) -> None:
        """Wait until every IPv6 address can be used.

        The kernel finishes one in the background, also with nodad: until its local route is there (net/ipv6/addrconf.c,
        addrconf_dad_work), packets for it are not delivered.
        """
        until(f"an IPv6 address in {self.name} becoming usable", self._is_settled, _SETTLE_SECONDS)

    def _is_settled(self) -> bool:
        shown = self.run(["ip", "-6", "-j", "addr", "show", "up"]).stdout
        routes = self.run(["ip", "-6", "-j", "route", "show", "table", "local"]).stdout
        local = {route["dst"] for route in json.loads(routes or "[]")}
        own = [address for link in json.loads(shown or "[]") for address in link.get("addr_info", ())]
        return all(not address.get("tentative") and address["local"] in local for address in own if address)

    def sysctl(self, settings: Mapping[str, str]) -> None:
        """Write /proc/sys entries, named with slashes."""
        with inside(self.name):
            for name, value in settings.items():
                Path("/proc/sys", name).write_text(value, encoding="ascii")


def kill_all_inside(namespaces: Sequence[str]) -> None:
    """Kill what runs in `namespaces`, such as a forgotten shell: each lives on without its name as long as one does."""
    inodes = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            inodes.add((_NETNS_DIR / name).stat().st_ino)
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # it has ended
            if (process / "ns/net").stat().st_ino in inodes and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


def until(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Poll, since other processes and the kernel tell nobody. Raises LabError if it takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise LabError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)


def call(command: Sequence[str], script: str | None = None, what: str | None = None) -> None:
    """Run `command` with `script` on its standard input. Raises LabError, naming `what` was to be done."""
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{what or ' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
