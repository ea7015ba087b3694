"""UDP sockets: the underlay of a real node.

Theory of operation, for each family: one socket is bound to the underlay address and the VTEPs' port and receives. Sending
goes through a pool of sockets on other ports, chosen by the inner flow's hash, so that routers and receive queues can tell
flows apart (RFC 7348 section 5 asks for an entropy source port); with an empty pool the receiving socket sends too, as
flannel's udp backend does. All of them send with path MTU discovery, so that a datagram larger than the path comes back as
EMSGSIZE and the inner sender can be told; one more socket sends without it, for datagrams that may be cut up.

One send takes a whole train (UDP_SEGMENT) and one receive a whole run of datagrams (UDP_GRO). A kernel, or the device
that a packet leaves by, may refuse the first at run time with EIO or EINVAL; then the refused train and all later
ones are sent datagram by datagram; with EINVAL it takes several such refusals. EMSGSIZE is no such refusal: it is about
the path.

When the address goes away, sockets that are bound to it stay: IPv4 refuses to send from it (ENETUNREACH, older kernels
EINVAL), IPv6 sends all the same where there is a route, and nothing arrives. When the address is back all works again, as
it does after the link was down. Only another address needs other sockets (`UdpUnderlay.rebind`).

Checksums of the outer UDP header are the kernel's default: always present, over IPv6 mandatory.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from dataplane.batch import Batch
from dataplane.kernel import IN_RUN, Kernel, Road
from dataplane.offload import Offload, Offloads
from dataplane.outbound import MAX_SEGMENTS
from dataplane.syscalls import sockaddr
from dataplane.underlay import UnderlayError
from dataplane.verdict import Verdict
from routing.config import Address
from routing.table import UNKNOWN_VTEP, Endpoint

__all__ = ["SOURCE_PORTS", "UdpUnderlay", "UnderlayError", "open_udp"]

log = logging.getLogger(__name__)

BUFFER_BYTES = 7 << 20
SOURCE_PORTS = 8
DOUBTS = 8
"""How many batches may have a run refused with EINVAL, its datagrams sent singly, before no more runs are tried."""

_FORWARDED = int(Verdict.FORWARDED)
_REFUSES_SEGMENTS = frozenset({errno.EIO, errno.EINVAL})
_NO_ROOM = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
# Linux numbers that the socket module lacks (include/uapi/linux/in.h, in6.h, asm-generic/socket.h).
_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU = 10, 14, 23, 24
_PMTUDISC_DONT, _PMTUDISC_DO = 0, 2
_UDP_SEGMENT, _UDP_GRO = 103, 104
_SO_ATTACH_FILTER, _SO_MEMINFO, _BPF_RET = 26, 55, 0x06
_MEMINFO_BYTES, _MEMINFO_DROPS = 36, 8  # include/uapi/linux/sock_diag.h, SK_MEMINFO_DROPS
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


@dataclass(frozen=True)
class _Family:
    """The sockets of one family, and the address that they are bound to."""

    address: Address
    receiver: socket.socket
    senders: list[socket.socket]
    fragmenting: socket.socket

    def all(self) -> list[socket.socket]:
        """Every socket once."""
        return list(dict.fromkeys([self.receiver, *self.senders, self.fragmenting]))

    @property
    def source_ports(self) -> int:
        """The size of its pool for sending; 0: the receiver sends."""
        return 0 if self.receiver in self.senders else len(self.senders)

    def close(self) -> None:
        """Close all sockets."""
        for one in self.all():
            one.close()


class _Numbers(dict[int, int]):
    """VTEP numbers by source address as a number, of one `family`; what a table's `origins` know is asked for once.

    Strangers are not kept: there may be any number of them.
    """

    def __init__(self, origins: Mapping[str, int], family: int) -> None:
        super().__init__()
        self._origins = origins
        self._address: Callable[[int], Address] = IPv4Address if family == 4 else IPv6Address

    def __missing__(self, source: int) -> int:
        number = self._origins.get(str(self._address(source)), UNKNOWN_VTEP)
        if number != UNKNOWN_VTEP:
            self[source] = number
        return number


class _Roads(dict[int, Road]):
    """By row of a table: the sockets of the endpoint's family, and its struct sockaddr, made when first asked for."""

    def __init__(self, endpoints: Sequence[Endpoint], senders: Mapping[int, Sequence[socket.socket]]) -> None:
        super().__init__()
        self._endpoints = endpoints
        self._senders = senders

    def __missing__(self, row: int) -> Road:
        endpoint = self._endpoints[row]
        road = self[row] = (self._senders[4 if len(endpoint) == 2 else 6], sockaddr(endpoint))
        return road


class UdpUnderlay:
    """An `Underlay` on kernel sockets. Made by `open_udp`."""

    def __init__(
        self, families: Mapping[int, _Family], offloads: Offloads | None = None, kernel: Kernel | None = None
    ) -> None:
        self._families = dict(families)
        self._kernel = kernel or Kernel()
        self._origins: Mapping[str, int] | None = None
        self._receivers: list[tuple[socket.socket, _Numbers, bool]] = []
        self._endpoints: Sequence[Endpoint] | None = None
        self._roads = _Roads((), {})
        self._offloads = offloads or Offloads.none()
        self.lanes = max(len(family.senders) for family in families.values())
        self.max_segments = MAX_SEGMENTS if self._offloads.is_on(Offload.UDP_SEGMENT) else 1
        self._doubts = 0
        self._ready: Callable[[], None] | None = None
        """Who watches."""
        self.last_errors: dict[str, int] = {}
        """How often sending failed, by the error's name; for status and logs."""

    @property
    def families(self) -> frozenset[int]:
        """Those that sockets were opened for."""
        return frozenset(self._families)

    @property
    def port(self) -> int:
        """The UDP port that is listened on; that of the first family, if it was left to the kernel."""
        return int(next(iter(self._families.values())).receiver.getsockname()[1])

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """One recvmsg a run of datagrams. The family that fills the batch is the last one to be asked next time."""
        if origins is not self._origins:
            self._origins = origins
            self._receivers = [
                (family.receiver, _Numbers(origins, number), number == 4) for number, family in self._families.items()
            ]
        for turn, (receiver, numbers, is_ipv4) in enumerate(self._receivers):
            # What it stops with is of no interest: nothing left, or an error that concerns a datagram sent before.
            self._kernel.receive_datagrams(receiver, batch, numbers, is_ipv4)
            if batch.is_full:
                self._receivers.append(self._receivers.pop(turn))
                return

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """One sendmsg a train, or for several of a lane."""
        if endpoints is not self._endpoints:
            self._endpoints = endpoints
            self._roads = _Roads(endpoints, {number: family.senders for number, family in self._families.items()})
        if self._kernel.send_trains(batch, self._roads, self.lanes, self.max_segments):
            self._doubt_runs({self._settle(batch, index) for index in range(batch.count) if batch.verdict[index] < 0})
        return batch.count_of(_FORWARDED)

    def _settle(self, batch: Batch, index: int) -> int:
        """Give a train that was refused its verdict; what may be about the run that it went in is tried singly.

        That is so where the kernel refuses runs, and for a datagram that went with longer ones, too long for the path.
        Returns the errno with which the kernel refused a run although its datagrams went singly, else 0.
        """
        in_run, error = divmod(-batch.verdict[index], IN_RUN)
        is_single = batch.stride[index] >= batch.length[index]
        if not in_run or not (error in _REFUSES_SEGMENTS or (error == errno.EMSGSIZE and is_single)):
            batch.verdict[index] = self._refused(error)
            return 0
        senders, to = self._roads[batch.peer[index]]
        verdict, sent = self._send_singly(senders[batch.flow[index] % len(senders)], batch, index, to)
        batch.verdict[index] = verdict
        # If nothing went it is not about runs: a path too small (EINVAL of older kernels), a route that refuses everything.
        return error if sent and error in _REFUSES_SEGMENTS else 0

    def _doubt_runs(self, refusals: set[int]) -> None:
        """Send no more runs once the kernel refuses them: EIO says so, EINVAL only if it comes again and again.

        EINVAL is also what older kernels say of an address of ours that is gone; if it comes back between the run and the
        single datagrams, it looks as if the run had been the trouble.
        """
        if errno.EINVAL in refusals:
            self._doubts += 1
        if errno.EIO in refusals or self._doubts >= DOUBTS:
            error = errno.EIO if errno.EIO in refusals else errno.EINVAL
            self.max_segments = 1
            self._offloads.refused(Offload.UDP_SEGMENT, f"{errno.errorcode[error]} on a send")

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """Through the socket that leaves DF off, or over IPv6 lets the kernel fragment at the source."""
        sender = self._families[4 if len(endpoint) == 2 else 6].fragmenting
        batch.verdict[index], _ = self._send_singly(sender, batch, index, sockaddr(endpoint))

    def _send_singly(self, sender: socket.socket, batch: Batch, index: int, to: bytes) -> tuple[int, int]:
        """Send a train datagram by datagram; the verdict of the last refusal, or FORWARDED, and how many were sent."""
        train, size = batch.packet(index), max(batch.stride[index], 1)
        verdict, done = _FORWARDED, 0
        for at in range(0, max(len(train), 1), size):
            length = min(size, len(train) - at)
            sent = self._kernel.send(sender, train, at, length, length, to)
            if sent < 0:
                verdict = self._refused(-sent)
            else:
                done += 1
        return verdict, done

    def _refused(self, error: int) -> int:
        if error == errno.EMSGSIZE:
            return Verdict.TOO_BIG
        name = errno.errorcode.get(error, "unknown")
        self.last_errors[name] = self.last_errors.get(name, 0) + 1
        return Verdict.QUEUE_FULL if error in _NO_ROOM else Verdict.SEND_ERROR

    def path_mtu(self, endpoint: Endpoint) -> int:
        """What the kernel's routing cache knows of the path: a connected socket is asked, and closed again."""
        ipv4 = len(endpoint) == 2
        kind = socket.AF_INET if ipv4 else socket.AF_INET6
        level, option = (socket.IPPROTO_IP, _IP_MTU) if ipv4 else (socket.IPPROTO_IPV6, _IPV6_MTU)
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind((str(self._families[4 if ipv4 else 6].address), 0))
            probe.connect(endpoint)
            return probe.getsockopt(level, option)

    def drops(self) -> int:
        """Datagrams that the kernel dropped because the receiving sockets were full."""
        told = [
            family.receiver.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO_BYTES) for family in self._families.values()
        ]
        return sum(struct.unpack("=9I", one)[_MEMINFO_DROPS] for one in told)

    def report(self) -> dict[str, Any]:
        """See `Underlay`."""
        source_ports = {
            f"ipv{number}": [sender.getsockname()[1] for sender in family.senders]
            for number, family in self._families.items()
        }
        return {"send_errors": dict(self.last_errors), "socket_drops": self.drops(), "source_ports": source_ports}

    def watch(self, ready: Callable[[], None]) -> None:
        """By the loop's poll on the receiving sockets."""
        for family in self._families.values():
            asyncio.get_running_loop().add_reader(family.receiver, ready)
        self._ready = ready

    def unwatch(self) -> None:
        """See `Underlay`."""
        if self._ready is not None:
            for family in self._families.values():
                asyncio.get_running_loop().remove_reader(family.receiver)
            self._ready = None

    def rebind(self, addresses: Sequence[Address]) -> None:
        """See `Underlay`. The new sockets are there before the old ones go; the pool's source ports are others then."""
        port, source_ports = self._as_opened()
        there: dict[int, _Family] = {}
        if not addresses:
            raise UnderlayError("no address to bind to")
        with contextlib.ExitStack() as undo:
            for address in addresses:
                family = self._families.get(address.version)
                if family is None or family.address != address:
                    family = _open_family(address, port, source_ports)
                    undo.callback(family.close)
                    _probe(family, self._offloads)
                there[address.version] = family
            undo.pop_all()
        self._move(there)

    def _as_opened(self) -> tuple[int, int]:
        """The port and the size of the pool. Raises UnderlayError if all is closed."""
        family = next(iter(self._families.values()))
        if family.receiver.fileno() < 0:
            raise UnderlayError("the sockets are closed")
        return self.port, family.source_ports

    def _move(self, families: dict[int, _Family]) -> None:
        """Use the sockets of `families` from now on, and close those of before that are not among them.

        A descriptor is unwatched before it is closed: its number may be the next socket's, and an event loop that still
        has it would watch that one instead.
        """
        ready, gone = self._ready, [family for family in self._families.values() if family not in families.values()]
        self.unwatch()
        self._families = families
        self._origins = self._endpoints = None
        self._receivers, self._roads = [], _Roads((), {})
        if not self._offloads.is_on(Offload.UDP_SEGMENT):
            self.max_segments = 1
        if ready is not None:
            self.watch(ready)
        for family in gone:
            family.close()

    def close(self) -> None:
        """Close all sockets."""
        self.unwatch()
        for family in self._families.values():
            family.close()


def open_udp(
    addresses: Sequence[Address], port: int, source_ports: int = SOURCE_PORTS, offloads: Offloads | None = None
) -> UdpUnderlay:
    """Sockets on `port` of each of `addresses` (at most one of each family).

    `source_ports` is the size of the pool for sending; 0 sends from `port`. Of `offloads` (none if not given) those that
    the kernel does not have are noted as lacking. A family that fails is logged and left out;
    raises UnderlayError if all do.
    """
    families: dict[int, _Family] = {}
    failures: list[UnderlayError] = []
    for address in addresses:
        try:
            families[address.version] = _open_family(address, port, source_ports)
        except UnderlayError as error:
            failures.append(error)
    if not families:
        raise failures[0] if failures else UnderlayError("no address to bind to")
    for failure in failures:
        log.error("one family is left out of the underlay: %s", failure)
    offloads = offloads or Offloads.none()
    for family in families.values():
        _probe(family, offloads)
    return UdpUnderlay(families, offloads)


def _probe(family: _Family, offloads: Offloads) -> None:
    """Turn UDP_GRO on where it is wanted, and ask whether there is UDP_SEGMENT."""
    if offloads.is_on(Offload.UDP_SEGMENT):
        try:
            family.senders[0].getsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT)
        except OSError as error:
            offloads.lacking(Offload.UDP_SEGMENT, f"the kernel does not have it ({error.strerror})")
    if offloads.is_on(Offload.UDP_GRO):
        try:
            family.receiver.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
            # Before Linux 5.12 it cannot be read back, and is not to be trusted (wireguard-go, commit c92064f).
            if not family.receiver.getsockopt(socket.IPPROTO_UDP, _UDP_GRO):
                raise OSError(errno.EOPNOTSUPP, "it does not stay on")
        except OSError as error:
            offloads.lacking(Offload.UDP_GRO, f"the kernel does not have it ({error.strerror})")


def _open_family(address: Address, port: int, source_ports: int) -> _Family:
    """All sockets of a family, or none of them."""
    with contextlib.ExitStack() as undo:
        receiver = undo.enter_context(_bind(address, port))
        deaf = [undo.enter_context(_bind(address, 0)) for _ in range(source_ports)]
        fragmenting = undo.enter_context(_bind(address, 0, discover=_PMTUDISC_DONT))
        for one in (*deaf, fragmenting):
            _deafen(one)
        senders = deaf or [receiver]
        undo.pop_all()
    return _Family(address, receiver, senders, fragmenting)


def _bind(address: Address, port: int, discover: int = _PMTUDISC_DO) -> socket.socket:
    try:
        one = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError as error:
        raise UnderlayError(f"cannot open a UDP socket: {error.strerror}") from error
    try:
        one.setblocking(False)
        if address.version == 4:
            one.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, discover)
        else:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, discover)
        _enlarge(one, socket.SO_SNDBUF, _SO_SNDBUFFORCE)
        _enlarge(one, socket.SO_RCVBUF, _SO_RCVBUFFORCE)
        one.bind((str(address), port))
    except OSError as error:
        one.close()
        raise UnderlayError(
            f"cannot bind UDP port {port} of {address}: {error.strerror}", port_taken=error.errno == errno.EADDRINUSE
        ) from error
    return one


def _deafen(one: socket.socket) -> None:
    """Let a socket that only sends drop what is sent to it: nobody would read it, and it would fill kernel memory.

    A classic BPF program of one instruction, "return 0", drops everything (socket(7), SO_ATTACH_FILTER).
    """
    instruction = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RET, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)


def _enlarge(one: socket.socket, option: int, force_option: int) -> None:
    """Ask for a large buffer, and insist where we may (CAP_NET_ADMIN); a small one only drops earlier."""
    one.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, force_option, BUFFER_BYTES)
