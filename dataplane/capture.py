"""What passes a device or an underlay, in a pcapng file for tshark and Wireshark.

Theory of operation: a `Recorder` owns the file. Packets of a device stand on one interface of it as they are, superpackets
whole and their checksums maybe left to do, as tcpdump shows them on a TUN. Datagrams stand on another one; what we see of
them is the UDP payload, so their outer headers are made again (`outer_packet`), with lengths and checksums that are right
and with what we cannot know left at 0: the sender's port, TOS, identification and DF; the TTL is 64.

What was to be transmitted and was refused is recorded too, with its verdict as the packet's comment: that a packet is
missing somewhere is seldom what one needs to be told.

Blocks are collected, and written when there are enough of them or when `flush` is called, which the node does every
second. The file ends with a whole block whatever happens: at its limit, and when the disk is full, recording ends with one
warning, and what was written in part is cut off again. Packets are carried on as if nothing had been.

Recording happens between packets, so it may never wait. A pipe is written without blocking: a reader that falls behind by
more than the pipe holds ends the recording, as a full disk does.

The path may lie in a folder where others can put things, and we may be root. What lies there already is looked at when it
is open and before it is changed: it must be ours, no symbolic link, and have no other name.
"""

import contextlib
import errno
import fcntl
import functools
import io
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, BinaryIO

from dataplane import pcapng
from dataplane.batch import Batch
from dataplane.device import Device
from dataplane.tap import DeviceTap, UdpEnd, UnderlayTap
from dataplane.underlay import Underlay
from encap import checksum, fields
from encap.fields import IPV4_HEADER_LENGTH, IPV6_HEADER_LENGTH, PROTOCOL_UDP, UDP_CHECKSUM, UDP_HEADER_LENGTH, Octets

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30
FLUSH_SECONDS = 1.0
LARGEST_PAYLOAD = 65535 - IPV4_HEADER_LENGTH - UDP_HEADER_LENGTH
"""What a UDP datagram can hold, over IPv4; over IPv6 it would be twenty bytes more."""

_BUFFER_BYTES = 1 << 18
_BUFFERS_IN_PIPE = 4
_PIPE_BYTES = _BUFFERS_IN_PIPE * _BUFFER_BYTES
"""As much as Linux lets anybody have (fs.pipe-max-size)."""

_TTL = 64
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_UDP = struct.Struct("!HHHH")


class Recorder:
    """Records packets in `file`, which is written from where it stands, and closed by `close`.

    `now_ns` is a wall clock in nanoseconds since 1970. `underlay` and `description` name the interface of the datagrams.
    After `limit` bytes recording ends. `buffer` is how many bytes are collected at most before they are written.
    """

    def __init__(
        self,
        file: BinaryIO | io.RawIOBase,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        limit: int = LIMIT_BYTES,
        buffer: int = _BUFFER_BYTES,
        name: str = "the capture file",
        underlay: str = "underlay",
        description: str = "UDP payloads, their outer headers made again",
    ) -> None:
        self.now_ns = now_ns
        self.packets = 0
        """How many were recorded."""
        self.written = 0
        """How many bytes of it are in the file."""
        self.stopped = ""
        """Why recording has ended; empty while it goes on."""
        self._file = file
        self._start = _position(file)
        self._limit = limit
        self._buffer_bytes = buffer
        self._name = name
        self._underlay = underlay
        self._description = description
        self._buffer = io.BytesIO()
        self._writer = pcapng.Writer(self._buffer, application="pyflannel-dp")
        self._interfaces: dict[str, int] = {}
        self._has_name = self._links() > 0

    def datagram(
        self,
        source_host: str,
        source_port: int,
        destination_host: str,
        destination_port: int,
        payload: Octets,
        *,
        time_ns: int,
        comment: str | None = None,
        outbound: bool | None = None,
    ) -> None:
        """Record one datagram, its outer headers made for hosts in the text form of ``ipaddress``, both of one family."""
        if self.stopped:
            return
        if len(payload) > LARGEST_PAYLOAD:
            comment = f"{comment + '; ' if comment else ''}only {LARGEST_PAYLOAD} of its {len(payload)} bytes are here"
            payload = payload[:LARGEST_PAYLOAD]
        packet = outer_packet(source_host, source_port, destination_host, destination_port, payload)
        self.packet(
            self._underlay, packet, time_ns=time_ns, comment=comment, outbound=outbound, description=self._description
        )

    def packet(
        self,
        interface: str,
        packet: Octets,
        *,
        time_ns: int,
        comment: str | None = None,
        outbound: bool | None = None,
        description: str = "",
    ) -> None:
        """Record an IP packet of `interface`, which `description` describes when it is first named."""
        if self.stopped:
            return
        start = self._buffer.tell()
        number = self._interfaces.get(interface)
        if number is None:
            number = self._writer.add_interface(interface, pcapng.LINKTYPE_RAW, description)
            self._interfaces[interface] = number
        self._writer.packet(number, time_ns, packet, outbound=outbound, comment=comment or "")
        if self.written + self._buffer.tell() > self._limit:
            self._buffer.seek(start)
            self._buffer.truncate()
            self.flush()
            self._stop(f"it has reached its limit of {self._limit} bytes")
            return
        self.packets += 1
        if self._buffer.tell() >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if self.stopped:
            return
        blocks = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        try:
            self._write(blocks)
        except (OSError, ValueError) as error:  # ValueError: somebody has closed the file
            self._stop(getattr(error, "strerror", None) or str(error))
            return
        self.written += len(blocks)
        if self._has_name and self._links() == 0:
            self._stop("it was removed")

    def _write(self, blocks: bytes) -> None:
        """All of `blocks`: a file without a buffer may take less than it is given, and a pipe that is full nothing."""
        rest = memoryview(blocks)
        while rest:
            taken = self._file.write(rest)
            if not taken:
                raise BlockingIOError("it takes nothing more; a pipe does so while its reader does not keep up")
            rest = rest[taken:]
        self._file.flush()

    def _links(self) -> int:
        """How many names the file has; 0 for one in memory. A file that was removed could be written for ever, unseen."""
        try:
            return os.fstat(self._file.fileno()).st_nlink
        except (OSError, ValueError):
            return 0

    def _stop(self, reason: str) -> None:
        """Record nothing more, leave a file of whole blocks, and say so once."""
        self.stopped = reason
        log.warning("%s: nothing more is recorded: %s", self._name, reason)
        with contextlib.suppress(OSError, ValueError):  # a pipe cannot be cut
            self._file.truncate(self._start + self.written)
        self._close_file()

    def _close_file(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # what a file had buffered and cannot write was reported before
            self._file.close()

    def close(self) -> None:
        """Write the rest and close the file. May be called twice."""
        if not self.stopped:
            self.flush()
        if not self.stopped:
            self.stopped = "closed"
            self._close_file()

    def report(self) -> dict[str, Any]:
        """For status."""
        return {"file": self._name, "packets": self.packets, "bytes": self.written, "stopped": self.stopped or None}


def open_recorder(path: Path, *, now_ns: Callable[[], int] = time.time_ns, underlay: str = "underlay") -> Recorder:
    """A recorder on the file `path`, which is made, or emptied if it exists. Raises OSError, also for what is not ours.

    A named pipe must have a reader, otherwise opening it would wait for one. Packets are other people's business, so
    nobody else may read the file.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    buffer = _BUFFER_BYTES
    with contextlib.ExitStack() as undo:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(os.close, fd)
        except FileExistsError:
            fd = _open_existing(path, flags)
            undo.callback(os.close, fd)
            kind = _require_ours(path, fd)
            if kind == stat.S_IFREG:
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, 0)
            elif kind == stat.S_IFIFO:
                buffer = _enlarge(fd) // _BUFFERS_IN_PIPE
        undo.pop_all()
    return Recorder(open(fd, "wb", buffering=0), now_ns=now_ns, buffer=buffer, name=str(path), underlay=underlay)


def _open_existing(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise _refusal(path, errno.ELOOP, "it is a symbolic link; name the file itself") from error
        raise


def _require_ours(path: Path, fd: int) -> int:
    """What kind of file `fd` is. Raises OSError for one that somebody else has put there, or has another name for."""
    found = os.fstat(fd)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFCHR:  # /dev/null is for everybody
        return kind
    if kind not in {stat.S_IFREG, stat.S_IFIFO}:
        raise _refusal(path, errno.EINVAL, "it is neither a file nor a named pipe")
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, and we are user {os.geteuid()}; remove it, or choose another name"
        raise _refusal(path, errno.EPERM, reason)
    if found.st_nlink > 1:
        raise _refusal(path, errno.EPERM, "it has another name, too (a hard link); remove it, or choose another name")
    return kind


def _enlarge(pipe: int) -> int:
    """Make a pipe hold more, if this user's pipes do not hold too much already; returns what it holds then."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def _refusal(path: Path, number: int, reason: str) -> OSError:
    return OSError(number, reason, str(path))


def _position(file: BinaryIO | io.RawIOBase) -> int:
    """Where `file` stands; 0 for a pipe, which cannot tell."""
    try:
        return file.tell()
    except (OSError, ValueError):
        return 0


def outer_packet(source: str, source_port: int, destination: str, destination_port: int, payload: Octets) -> bytes:
    """`payload` in UDP in IP, the version that of the addresses. Raises ValueError if they are of two families."""
    ends = _packed(source), _packed(destination)
    if len(ends[0]) != len(ends[1]):
        raise ValueError(f"{source} and {destination} are of two families")
    udp_length = UDP_HEADER_LENGTH + len(payload)
    udp_header = _UDP.pack(source_port, destination_port, udp_length, 0)
    if len(ends[0]) == 4:
        header = _IPV4.pack(0x45, 0, IPV4_HEADER_LENGTH + udp_length, 0, 0, _TTL, PROTOCOL_UDP, 0, *ends)
        at, addresses, addresses_length = IPV4_HEADER_LENGTH, fields.IPV4_SOURCE, 8
    else:
        header = _IPV6.pack(6 << 28, udp_length, PROTOCOL_UDP, _TTL, *ends)
        at, addresses, addresses_length = IPV6_HEADER_LENGTH, fields.IPV6_SOURCE, 32
    packet = bytearray(b"".join((header, udp_header, payload)))
    if len(ends[0]) == 4:
        checksum.write_ipv4_header_checksum(packet, 0, IPV4_HEADER_LENGTH)
    pseudo = checksum.pseudo_sum(packet, addresses, addresses_length, PROTOCOL_UDP, udp_length)
    fields.store16(packet, at + UDP_CHECKSUM, pseudo)
    checksum.finish(packet, at, len(packet), at + UDP_CHECKSUM)
    return bytes(packet)


@functools.lru_cache(maxsize=4096)
def _packed(host: str) -> bytes:
    return ip_address(host).packed


class CapturingDevice(DeviceTap):
    """A `Device` whose packets `recorder` records, on an interface of the device's name."""

    def __init__(self, inner: Device, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def _see(self, batch: Batch, index: int, *, outbound: bool, remark: str) -> None:
        recorder = self._recorder
        recorder.packet(self.name, batch.packet(index), time_ns=recorder.now_ns(), comment=remark, outbound=outbound)


class CapturingUnderlay(UnderlayTap):
    """An `Underlay` whose datagrams `recorder` records. The rest is as for `UnderlayTap`."""

    def __init__(
        self, inner: Underlay, recorder: Recorder, *, hosts: Mapping[int, str], port: int, header_length: int
    ) -> None:
        super().__init__(inner, hosts=hosts, port=port, header_length=header_length)
        self._recorder = recorder

    def _see(self, source: UdpEnd, destination: UdpEnd, payload: memoryview, *, outbound: bool, remark: str) -> None:
        recorder = self._recorder
        recorder.datagram(*source, *destination, payload, time_ns=recorder.now_ns(), comment=remark, outbound=outbound)
