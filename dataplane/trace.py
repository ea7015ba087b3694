"""One readable line for each packet that passes a device or an underlay.

Theory of operation: the taps (``dataplane.tap``) see a packet, ``dataplane.describe`` puts its headers into words, and the
`Tracer` writes the line: local time as the log has it, direction, where, what. `out` is from the device to the underlay,
`in` the other way. What was to be transmitted and was refused is traced with its verdict.

A line costs more than the packet, so this is for little traffic. A reader that is gone ends the trace, not the node.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping

from dataplane.batch import Batch
from dataplane.describe import describe_packet, describe_payload, one_line
from dataplane.device import Device
from dataplane.tap import UNKNOWN_PORT, DeviceTap, UdpEnd, UnderlayTap
from dataplane.underlay import Underlay
from encap import segment, vnet

log = logging.getLogger(__name__)

_NANOSECONDS = 1_000_000_000


def to_stderr(line: str) -> None:
    """Where the node's log goes, too."""
    sys.stderr.write(f"{line}\n")


class Tracer:
    """Gives lines to `write`. `now_ns` is a wall clock in nanoseconds since 1970."""

    def __init__(self, write: Callable[[str], object] = to_stderr, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._write: Callable[[str], object] | None = write
        self._now_ns = now_ns

    @property
    def has_ended(self) -> bool:
        """Whether nobody reads any more."""
        return self._write is None

    def line(self, where: str, text: str, *, outbound: bool, remark: str) -> None:
        """Write that `text` passed `where`."""
        if self._write is None:
            return
        seconds, rest = divmod(self._now_ns(), _NANOSECONDS)
        clock = time.strftime("%H:%M:%S", time.localtime(seconds))
        tail = f" [{remark}]" if remark else ""
        try:
            self._write(f"{clock}.{rest // 1000:06d} {'out' if outbound else 'in ':3s} {where}: {text}{tail}")
        except (OSError, ValueError) as error:  # ValueError: closed
            self._write = None
            log.warning("nothing more is traced: %s", error)


class TracingDevice(DeviceTap):
    """A `Device` whose packets are traced under its name."""

    def __init__(self, inner: Device, tracer: Tracer) -> None:
        super().__init__(inner)
        self._tracer = tracer

    def _see(self, batch: Batch, index: int, *, outbound: bool, remark: str) -> None:
        if self._tracer.has_ended:
            return
        packet = bytes(batch.packet(index))
        text = one_line(describe_packet(packet)) + _superpacket(packet, batch.vnet_header(index))
        self._tracer.line(self.name, text, outbound=outbound, remark=remark)


class TracingUnderlay(UnderlayTap):
    """An `Underlay` whose datagrams are traced, each with its ends. The rest is as for `UnderlayTap`."""

    def __init__(self, inner: Underlay, tracer: Tracer, *, hosts: Mapping[int, str], port: int, header_length: int) -> None:
        super().__init__(inner, hosts=hosts, port=port, header_length=header_length)
        self._tracer = tracer
        self._is_vxlan = header_length > 0

    def _see(self, source: UdpEnd, destination: UdpEnd, payload: memoryview, *, outbound: bool, remark: str) -> None:
        if self._tracer.has_ended:
            return
        where = f"{_end(source)} → {_end(destination)}"
        text = one_line(describe_payload(bytes(payload), is_vxlan=self._is_vxlan))
        self._tracer.line(where, text, outbound=outbound, remark=remark)


def _end(end: UdpEnd) -> str:
    """``host:port``, as people write it; without a port that is not known."""
    host, port = end
    if port == UNKNOWN_PORT:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _superpacket(packet: bytes, vnet_header: memoryview) -> str:
    """What the virtio-net header says of segmentation; nothing for an ordinary packet."""
    header = vnet.parse(vnet_header, 0)
    if not header.gso_type or not packet:
        return ""
    length = segment.check(packet, 0, len(packet), header.gso_type, header.gso_size, header.csum_start)
    if length < 0:
        return ", a superpacket whose virtio-net header contradicts it"
    return f", {segment.count(len(packet), length, header.gso_size)} segments of {header.gso_size} bytes"
