"""The underlay as a program: carries frames between the hosts' outer ends, each ordered pair over its own link.

Theory of operation. A packet socket on each outer end reads what its host sends. `Switch` learns which MAC address lives
behind which port, as a bridge does, and lets each frame cross the `Link` from its source to its target; one for nobody in
particular (broadcast, multicast, or a target not yet seen) crosses the link to every other port. What a link says arrives
later waits in a heap. One thread, one `select`: it gives the timeout in microseconds, where epoll has milliseconds.

What crosses the link is what is behind the Ethernet header, so that a link's MTU is that of the IP packet and damage
spares the addresses of the frame. Damage stands for what the frame check sequence of a real wire let through; ARP has no
checksum of its own, so a damaged ARP packet is dropped instead of teaching a host a wrong address.

A frame that crossed may still not arrive. If the target's interface is too small for it, its link counts it as oversize
instead of delivered; if that interface is down, as lost. Overruns are what the machine was too slow for.

Chance is seeded by the lab's seed and the names of the pair: a link decides alike in each run for its first frame, its
second frame, and so on.
"""

import contextlib
import errno
import heapq
import itertools
import os
import random
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from dataplane.underlay.link import Link, LinkCounts, LinkSpec

_ETHERNET_HEADER_LENGTH = 14
_HAVE_CHECKSUMS = (b"\x08\x00", b"\x86\xdd")  # EtherTypes of IPv4 and IPv6
_MOST_MACS = 4096
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOBUFS})
_FRAMES_PER_TURN = 64
_LONGEST_FRAME = 1 << 17
_RECEIVE_BUFFER = 32 << 20
_ETH_P_ALL = 3
_SOL_PACKET = 263  # linux/socket.h
_PACKET_STATISTICS = 6  # linux/if_packet.h
_PACKET_IGNORE_OUTGOING = 23  # Linux 4.20
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h


class Switch:
    """Which way frames go, and what happens to them on it. Ports are named; no sockets, no clock."""

    def __init__(self, default: LinkSpec, seed: int) -> None:
        self._default = default
        self._seed = seed
        self._links: dict[str, dict[str, Link]] = {}
        self._port_of_mac: dict[bytes, str] = {}

    def add_port(self, name: str) -> None:
        """One more port, with the default link from and to each of the others."""
        for other, links in self._links.items():
            links[name] = self._new_link(other, name)
        self._links[name] = {other: self._new_link(name, other) for other in self._links}

    def _new_link(self, source: str, target: str) -> Link:
        return Link(self._default, random.Random(f"{self._seed} {source} {target}"))

    def impair(self, source: str, target: str, spec: LinkSpec) -> None:
        """Change one link."""
        self._links[source][target].spec = spec

    def counts(self) -> dict[tuple[str, str], LinkCounts]:
        """What became of the frames, by source and target."""
        return {(source, target): link.counts for source, links in self._links.items() for target, link in links.items()}

    def undelivered(self, source: str, target: str, *, is_oversize: bool) -> None:
        """A frame that crossed was not taken at its end; `is_oversize`: because it is larger than the interface there."""
        counts = self._links[source][target].counts
        counts.delivered -= 1
        counts.oversize += is_oversize
        counts.lost += not is_oversize

    def forward(self, now: float, source: str, frame: bytes) -> list[tuple[float, str, bytes]]:
        """When which frame arrives at which port, if `frame` leaves `source` at `now`."""
        header, body = frame[:_ETHERNET_HEADER_LENGTH], frame[_ETHERNET_HEADER_LENGTH:]
        self._learn(header[6:12], source)
        links = self._links[source]
        target = self._port_of_mac.get(header[:6])
        if target == source:
            return []
        return [
            (arrival, name, header + carried)
            for name in (links if target is None else (target,))
            for arrival, carried in links[name].cross(now, body)
            if header[12:14] in _HAVE_CHECKSUMS or carried == body
        ]

    def _learn(self, mac: bytes, port: str) -> None:
        """A host may move; forged addresses without end are not remembered."""
        if self._port_of_mac.get(mac) == port or mac[0] & 1:
            return
        if mac in self._port_of_mac or len(self._port_of_mac) < _MOST_MACS:
            self._port_of_mac[mac] = port


class Relay:
    """Sockets around a `Switch`. `turn` does what is to be done now, and waits for it at most until `timeout`."""

    def __init__(self, switch: Switch, clock: Callable[[], float] = time.monotonic) -> None:
        self._switch = switch
        self._clock = clock
        self._selector = selectors.SelectSelector()
        self._sockets: dict[str, socket.socket] = {}
        self._flying: list[tuple[float, int, str, str, bytes]] = []
        """When, which in order, whence, whither, what."""
        self._sequence = itertools.count()
        self._buffer = bytearray(_LONGEST_FRAME)
        self._overruns = 0

    def add_port(self, name: str, interface: str) -> None:
        """Carry the frames of `interface`. Raises OSError."""
        opened = _open(interface)
        self._sockets[name] = opened
        self._selector.register(opened, selectors.EVENT_READ, lambda: self._pump(name, opened))
        self._switch.add_port(name)

    def watch(self, file: Connection, answer: Callable[[], None]) -> None:
        """Call `answer` when there is something to read from `file`."""
        self._selector.register(file, selectors.EVENT_READ, answer)

    def turn(self) -> None:
        """Wait until something is to be done, and do it."""
        timeout = max(0.0, self._flying[0][0] - self._clock()) if self._flying else None
        for key, _ in self._selector.select(timeout):
            key.data()
        self._deliver(self._clock())

    def _pump(self, source: str, opened: socket.socket) -> None:
        """Take a number of frames in; each port gets its turn."""
        view = memoryview(self._buffer)
        for _ in range(_FRAMES_PER_TURN):
            try:
                length = opened.recv_into(self._buffer)
            except OSError:  # nothing more, or the device was taken down, which is told once
                return
            now = self._clock()
            self._deliver(now)
            if length >= _ETHERNET_HEADER_LENGTH:
                for arrival, target, frame in self._switch.forward(now, source, bytes(view[:length])):
                    if arrival <= now:
                        self._send(source, target, frame)
                    else:
                        heapq.heappush(self._flying, (arrival, next(self._sequence), source, target, frame))

    def _deliver(self, now: float) -> None:
        """What is due."""
        while self._flying and self._flying[0][0] <= now:
            _, _, source, target, frame = heapq.heappop(self._flying)
            self._send(source, target, frame)

    def _send(self, source: str, target: str, frame: bytes) -> None:
        try:
            self._sockets[target].send(frame)
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._overruns += 1
            else:  # larger than the interface, or that is down
                self._switch.undelivered(source, target, is_oversize=error.errno == errno.EMSGSIZE)

    def overruns(self) -> int:
        """Frames that were not read in time, or that the target's socket had no room for."""
        for opened in self._sockets.values():
            _, dropped = struct.unpack("=II", opened.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
            self._overruns += dropped  # reading starts the kernel's count anew
        return self._overruns

    def close(self) -> None:
        """Close the sockets; frames on their way are lost."""
        self._selector.close()
        for opened in self._sockets.values():
            opened.close()


def _open(interface: str) -> socket.socket:
    """A packet socket that reads what comes in by `interface` and not what we send there."""
    with contextlib.ExitStack() as undo:
        opened = undo.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        opened.setblocking(False)
        opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        try:
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        except PermissionError:  # in a user namespace; then as much as the system allows
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        opened.bind((interface, _ETH_P_ALL))
        undo.pop_all()
    return opened


def _serve(connection: Connection) -> None:
    """Answer questions and carry frames until the other end is closed."""
    number, _, default, seed = connection.recv()
    connection.send((number, True, None))
    switch = Switch(default, seed)
    relay = Relay(switch)
    verbs: dict[str, Callable[..., Any]] = {
        "add_port": relay.add_port,
        "impair": switch.impair,
        "counts": switch.counts,
        "overruns": relay.overruns,
    }

    def answer() -> None:
        number, verb, *arguments = connection.recv()
        try:
            connection.send((number, True, verbs[verb](*arguments)))
        except OSError as error:
            connection.send((number, False, str(error)))

    relay.watch(connection, answer)
    with contextlib.closing(relay):
        while True:
            relay.turn()


def main() -> None:
    """The socket to the lab is standard input. Ctrl-C is meant for the lab, which closes that socket when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(os.dup(0)) as connection, contextlib.suppress(EOFError, ConnectionError):
        _serve(connection)


if __name__ == "__main__":
    main()
