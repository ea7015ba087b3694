"""Replay between two network namespaces with real devices: through two nodes, or through kernel VXLAN.

Theory of operation: packets go into the sending host's device by a packet socket, as the host's own would behind its
routing, and are caught by another one on the receiving host's device. What comes out is recognised by its bytes, so that
loss, reordering within a flow and damage are told apart; packets that are alike are taken to keep their order. The
receiving host drops what it gets behind the socket, where nobody lives. The nodes merge nothing into superpackets on the
way in, or a packet would come out as part of a larger one. The underlay is large enough for inner packets of 1500 bytes,
which is what captures hold. A replay in this mode measures this program's own sending and receiving, too.
"""

import errno
import select
import socket
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.replay.chunk import Chunk
from bench.replay.pacing import Pacer
from bench.replay.paths import ReplayPath
from bench.replay.sides import RECEIVERS, SENDER, make_sides
from dataplane.control import ask
from dataplane.lab import Host, Lab, LabError, inside, missing
from dataplane.verdict import Verdict
from encap.checksum import replace_word
from encap.fields import IPV4_CHECKSUM, IPV4_DESTINATION, IPV4_TTL, IPV6_DESTINATION, IPV6_HOP_LIMIT, load16, store16
from encap.ip import flow_hash, ttl
from encap.overhead import overhead
from encap.vxlan import HEADER_LENGTH
from routing.lease import parse_mac
from routing.route import FRAMING_IP

NODE, KERNEL = "node", "kernel"
_IPV4_NETWORK, _IPV6_NETWORK = "10.0.0.0/8", "fd00::/16"
_ETH_P_IP, _ETH_P_IPV6, _ETH_P_ALL = 0x0800, 0x86DD, 0x0003
_PACKET_OUTGOING = 4
_START_SECONDS = 15.0
_QUIET_SECONDS = 0.3
_IN_FLIGHT = 256
_INNER_MTU = 1500
_FLOWS = (
    1 << 12
)  # kept apart by as many of the hash's bits; a node's lanes are fewer, and what shares a lane stays in order
_RECEIVE_BUFFER = 8 << 20
_SO_RCVBUFFORCE = 33


class TunnelError(Exception):
    """The two hosts cannot be set up; the text says why."""


class TunnelPath(ReplayPath):
    """Real devices. `outbound` counts what was handed to the device, or refused by it; `inbound` what came out."""

    def __init__(
        self, sending: socket.socket, receiving: socket.socket, to: tuple[str, bytes], *, is_ip_framing: bool,
        peers: int, now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:  # fmt: skip
        hosts = SENDER[0].network_address, RECEIVERS[0].network_address
        sides = make_sides(framing="vxlan", peers=peers, leases=1, sender_host=hosts[0], peer_hosts=(hosts[1],), port=8472)
        super().__init__(sides, ("send", "receive"), now)
        self._sending = sending
        self._receiving = receiving
        self._device, self._mac = to
        self._hops = 2 if is_ip_framing else 0
        self._waiting: dict[bytes, deque[tuple[int, int, int]]] = {}
        self._in_flight = 0
        self._sequence = 0
        self._latest = array("q", [-1]) * _FLOWS
        self._poll = select.poll()
        self._poll.register(receiving, select.POLLIN)

    def carry(self, chunk: Chunk, pacer: Pacer) -> int:
        """See `ReplayPath`."""
        packets = memoryview(chunk.data)
        pacer.load(chunk)
        pacer.start()
        started = finished = self._now()
        position = 0
        while position < len(chunk):
            moment = pacer.wait(position)
            count = pacer.due(position, _IN_FLIGHT // 4, moment)
            begun = self._now()
            for i in range(position, position + count):
                self._send(packets[chunk.offset[i] : chunk.offset[i] + chunk.length[i]])
            self.stages_ns["send"] += self._now() - begun
            pacer.sent(position, count, moment)
            position += count
            finished = self._drain(_IN_FLIGHT) or finished
        finished = self._drain(0) or finished
        self.lost += self._in_flight
        self._waiting.clear()
        self._in_flight = 0
        pacer.stop()
        packets.release()
        return finished - started

    def _send(self, packet: memoryview) -> None:
        protocol = _ETH_P_IP if packet[0] >> 4 == 4 else _ETH_P_IPV6
        self.outbound.received += 1
        refusal = self._refusal(packet)
        if refusal:
            self.outbound.verdicts[refusal] += 1
            return
        try:
            self._sending.sendto(packet, (self._device, protocol, 0, 0, self._mac))
        except OSError as error:
            too_big = error.errno == errno.EMSGSIZE
            self.outbound.verdicts[Verdict.TOO_BIG if too_big else Verdict.DEVICE_ERROR] += 1
            return
        self.outbound.verdicts[Verdict.FORWARDED] += 1
        flow = flow_hash(packet, 0, len(packet)) & (_FLOWS - 1)
        self._waiting.setdefault(self._as_delivered(packet), deque()).append((self._sequence, flow, self._now()))
        self._sequence += 1
        self._in_flight += 1

    def _refusal(self, packet: memoryview) -> int:
        """The verdict on what no router carries, or 0. It is not sent: it would look like a packet that was lost."""
        if self._hops and ttl(packet, 0) <= self._hops:
            return Verdict.TTL_EXPIRED
        if packet[0] >> 4 == 6:
            return Verdict.MULTICAST if packet[IPV6_DESTINATION] == 0xFF else 0
        is_broadcast = packet[IPV4_DESTINATION : IPV4_DESTINATION + 4] == b"\xff" * 4
        return Verdict.MULTICAST if is_broadcast or packet[IPV4_DESTINATION] >> 4 == 0xE else 0

    def _as_delivered(self, packet: memoryview) -> bytes:
        """What `packet` will look like: two routers on the way take from its TTL in the ip framing."""
        if not self._hops:
            return bytes(packet)
        changed = bytearray(packet)
        if changed[0] >> 4 == 6:
            changed[IPV6_HOP_LIMIT] -= self._hops
            return bytes(changed)
        old = load16(changed, IPV4_TTL)
        changed[IPV4_TTL] -= self._hops
        store16(changed, IPV4_CHECKSUM, replace_word(load16(changed, IPV4_CHECKSUM), old, load16(changed, IPV4_TTL)))
        return bytes(changed)

    def _drain(self, allowed: int) -> int:
        """Receive until at most `allowed` packets are on their way, or nothing comes any more; when the last one came."""
        last = 0
        begun = self._now()
        while self._in_flight > allowed:
            if not self._poll.poll(_QUIET_SECONDS * 1000):
                break
            last = self._receive() or last
        self.stages_ns["receive"] += self._now() - begun
        if self._in_flight > allowed:
            self.lost += self._in_flight
            self._waiting.clear()
            self._in_flight = 0
        return last

    def _receive(self) -> int:
        last = 0
        try:
            while True:
                packet, source = self._receiving.recvfrom(65536)
                if source[2] == _PACKET_OUTGOING or source[1] not in {_ETH_P_IP, _ETH_P_IPV6}:
                    continue
                last = self._now()
                self._arrived(packet, last)
        except BlockingIOError:
            return last

    def _arrived(self, packet: bytes, moment: int) -> None:
        found = self._waiting.get(packet)
        if not found:
            self.corrupted += 1
            return
        sequence, flow, sent = found.popleft()
        if not found:
            del self._waiting[packet]
        self._in_flight -= 1
        self.reordered += sequence < self._latest[flow]
        self._latest[flow] = max(self._latest[flow], sequence)
        self.inbound.received += 1
        self.inbound.verdicts[Verdict.FORWARDED] += 1
        self.inbound.forwarded_bytes += len(packet)
        self.latency.record(moment - sent)


@contextmanager
def open_tunnel(framing: str, via: str, peers: int) -> Iterator[TunnelPath]:
    """Two hosts and what carries packets between them. Raises TunnelError."""
    reason = missing()
    if reason is not None:
        raise TunnelError(f"mode tun: {reason}")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="pyflannel-dp-replay-") as folder,
            Lab("replay", _INNER_MTU + overhead(HEADER_LENGTH, 6)) as lab,
        ):
            first, second = lab.add_host(), lab.add_host()
            device, mac = _kernel(first, second) if via == KERNEL else _nodes(first, second, framing, Path(folder))
            second.ip(*(f"route add blackhole {network}" for network in RECEIVERS))
            with _socket(first, device) as sending, _socket(second, device) as receiving:
                receiving.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
                yield TunnelPath(sending, receiving, (device, mac), is_ip_framing=framing == FRAMING_IP, peers=peers)
    except LabError as error:
        raise TunnelError(str(error)) from error


def _socket(host: Host, device: str) -> socket.socket:
    """A packet socket on `device`, for packets without their link header."""
    with inside(host.name):
        made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
        made.bind((device, _ETH_P_ALL))
    made.setblocking(False)
    return made


def _kernel(first: Host, second: Host) -> tuple[str, bytes]:
    """Kernel VXLAN devices: name, and the MAC to send to."""
    macs = [host.add_kernel_vxlan(subnet, mtu=_INNER_MTU) for host, subnet in ((first, SENDER[0]), (second, RECEIVERS[0]))]
    first.add_kernel_peer(RECEIVERS[0], second.ipv4, macs[1])
    second.add_kernel_peer(SENDER[0], first.ipv4, macs[0])
    return "flannel.1", parse_mac(macs[1])


def _nodes(first: Host, second: Host, framing: str, folder: Path) -> tuple[str, bytes]:
    """Two nodes, each in a process of its own."""
    processes = []
    for host, own, peer, other in ((first, SENDER, RECEIVERS, second), (second, RECEIVERS, SENDER, first)):
        command = [
            sys.executable, "-m", "dataplane.cli", "--store", "static", "--framing", framing, "--no-tun-gro",
            "--network", _IPV4_NETWORK, "--ipv6-network", _IPV6_NETWORK,
            "--subnet", str(own[0]), "--ipv6-subnet", str(own[1]),
            "--peer", f"{peer[0]}={other.ipv4}", "--peer", f"{peer[1]}={other.ipv4}",
            "--run-dir", str(folder / f"run{host.number}"),
        ]  # fmt: skip
        with open(folder / f"log{host.number}", "w", encoding="utf-8") as log:
            processes.append(host.popen(command, stdout=log, stderr=log))
    deadline = time.monotonic() + _START_SECONDS
    for host, process in zip((first, second), processes, strict=True):
        while not (folder / f"run{host.number}" / "subnet.env").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise TunnelError(f"a node does not start: {(folder / f'log{host.number}').read_text(encoding='utf-8')}")
            time.sleep(0.02)
    return ask(folder / "run1", "status")["device"]["name"], b""
