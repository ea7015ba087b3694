"""What the node tells systemd: that it is ready, how it is, that it lives, that it stops.

Theory of operation: sd_notify(3). systemd leaves the address of a Unix datagram socket in NOTIFY_SOCKET (``@`` for the zero
byte of an abstract one), and each message is a datagram of lines VARIABLE=value. With ``WatchdogSec=`` it also leaves
WATCHDOG_USEC (and WATCHDOG_PID, if it is for one process only), and kills who has not said ``WATCHDOG=1`` for so long; we
say it twice as often. The sign of life comes from the event loop, so a loop that hangs ends in a restart.

Telling systemd is never worth a failure: without the variables, or with nobody at the other end, nothing happens.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0


class Notifier:
    """Sends to `address`, a path or ``@`` and a name; nothing at all if it is None.

    `watchdog_interval` is how often, in seconds, the watchdog wants a sign of life at least; None if there is none.
    """

    def __init__(
        self,
        address: str | None = None,
        watchdog_interval: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watchdog_interval = watchdog_interval
        self._now = now
        self._next_beat = now()
        self._address = address
        self._complained = False

    @classmethod
    def from_environment(
        cls, environment: MutableMapping[str, str] | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> "Notifier":
        """By systemd's variables, which are taken out of `environment` (the process's if not given): children are not to
        speak for us. Variables that make no sense are warned about and ignored."""
        environment = os.environ if environment is None else environment
        address = environment.pop("NOTIFY_SOCKET", None) or None
        microseconds = environment.pop("WATCHDOG_USEC", None)
        process = environment.pop("WATCHDOG_PID", None)
        if address is not None and address[0] not in "/@":
            log.warning("NOTIFY_SOCKET is %s, which is no path and no abstract name: systemd is not told anything", address)
            address = None
        if microseconds is None or (process is not None and process != str(os.getpid())):
            return cls(address, now=now)
        if not (microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0):
            log.warning("WATCHDOG_USEC is %r, which is no number of microseconds: it is ignored", microseconds)
            return cls(address, now=now)
        return cls(address, int(microseconds) / 1e6 / 2, now=now)

    def ready(self, status: str = "") -> None:
        """The node works; `status` is what ``systemctl status`` shows. Waits for systemd, for two seconds at most."""
        self._send("READY=1", *_status_line(status), patient=True)

    def status(self, text: str) -> None:
        """What ``systemctl status`` shows from now on."""
        self._send(*_status_line(text))

    def stopping(self) -> None:
        """The node has begun to stop. Waits like `ready`."""
        self._send("STOPPING=1", patient=True)

    def beat(self) -> None:
        """A sign of life, to be given as often as one likes: systemd hears it as often as it has to."""
        if self.watchdog_interval is not None and self._now() >= self._next_beat:
            self._next_beat = self._now() + self.watchdog_interval
            self._send("WATCHDOG=1")

    def _send(self, *lines: str, patient: bool = False) -> None:
        """Not `patient`: drop it rather than hold up the loop, should the socket's queue be full."""
        if self._address is None or not lines:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as sender:
                sender.settimeout(_PATIENCE_SECONDS if patient else 0.0)
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            if not self._complained:
                log.warning("systemd cannot be told %s (%s): %s", lines[0], self._address, error)
            self._complained = True


def _status_line(text: str) -> list[str]:
    """On one line, whatever it says: a line more would be a variable more."""
    return ["STATUS=" + " ".join(text.split())] if text else []
