"""Tells when a link, an address or a route has changed, as soon as the kernel says so.

Theory of operation: a netlink socket that is in the kernel's multicast groups for these (rtnetlink(7)) becomes readable,
and is drained. Hardly anything is parsed, since whoever is told reads everything again anyway. So an overrun of the socket
(ENOBUFS), after which messages are missing, is a change like another. Routes alone are looked at more closely: a routing
daemon may change thousands a second, and only ours and the default routes concern a node.

`Throttle` makes few calls of many changes: the first of a burst is told at once, those that follow once per interval, the
last one always.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

from dataplane.host import ROUTE_PROTOCOL, HostError

INTERVAL_SECONDS = 0.05

_GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE (include/uapi/linux/rtnetlink.h)."""
_RTM_NEWROUTE, _RTM_DELROUTE = 24, 25
_NLM_F_REPLACE = 0x100
_HEAD = struct.Struct("=4xHH8xxB3xB2x")
"""Of struct nlmsghdr the type and the flags; of struct rtmsg, which follows it, the destination's length, the protocol."""
_PER_WAKE_UP = 64
"""Messages read before the loop gets its turn; what is left makes the socket readable again."""


class Throttle:
    """Calls `call` from `loop` after `trigger`, at once or `interval` seconds after the call before. Belongs to the loop's
    thread, as does `close`."""

    def __init__(self, call: Callable[[], None], interval: float, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._interval = interval
        self._loop = loop
        self._pending: asyncio.Handle | None = None
        self._next = loop.time()
        self._is_closed = False

    def trigger(self) -> None:
        """Something has changed."""
        if self._pending is None and not self._is_closed:
            self._pending = self._loop.call_later(max(0.0, self._next - self._loop.time()), self._fire)

    def _fire(self) -> None:
        self._pending = None
        self._next = self._loop.time() + self._interval
        self._call()

    def close(self) -> None:
        """No more calls."""
        self._is_closed = True
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None


class NetlinkWatch:
    """A `Watch` over the network namespace of the thread that makes it. Raises HostError."""

    def __init__(self, changed: Callable[[], None], interval: float = INTERVAL_SECONDS) -> None:
        self._loop = asyncio.get_running_loop()
        self._throttle = Throttle(changed, interval, self._loop)
        self._head = bytearray(_HEAD.size)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.setblocking(False)
            self._socket.bind((0, _GROUPS))
        except OSError as error:
            self._socket.close()
            raise HostError(f"cannot watch the interfaces: {error.strerror}") from error
        self._loop.add_reader(self._socket.fileno(), self._drain)

    def _drain(self) -> None:
        for _ in range(_PER_WAKE_UP):
            try:
                length = self._socket.recv_into(self._head)  # the rest of the message is discarded (recv(2))
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: messages are lost
                self._throttle.trigger()
                return
            if concerns(memoryview(self._head)[:length]):
                self._throttle.trigger()

    def close(self) -> None:
        """See `Watch`."""
        self._throttle.close()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


def concerns(message: memoryview) -> bool:
    """Whether a netlink message, given from its beginning, may concern a node; in doubt it does.

    A route of somebody else's does not, unless it is a default route, or has taken the place of a route that might be ours.
    """
    if len(message) < _HEAD.size:
        return True
    kind, flags, prefix_length, protocol = _HEAD.unpack_from(message)
    if kind not in {_RTM_NEWROUTE, _RTM_DELROUTE}:
        return True
    return protocol == ROUTE_PROTOCOL or prefix_length == 0 or bool(flags & _NLM_F_REPLACE)
