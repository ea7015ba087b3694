"""What is captured is what passed: judged by tshark, by what crossed the network in memory, and when the file fails."""

import asyncio
import contextlib
import errno
import fcntl
import io
import logging
import os
import random
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest
import test_cli
from packets import octets, table_of, tcp, udp, underlay_host
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw
from scapy.utils import RawPcapNgReader
from test_node import Machine, World

from dataplane.batch import Batch
from dataplane.capture import (
    LARGEST_PAYLOAD,
    CapturingDevice,
    CapturingUnderlay,
    Recorder,
    open_recorder,
    outer_packet,
)
from dataplane.control import ControlError
from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.faults import FaultyUnderlay
from dataplane.inbound import unpack
from dataplane.node import NodeError
from dataplane.tap import MAX_STRANGERS, is_run, pieces
from dataplane.trace import Tracer, TracingUnderlay
from dataplane.underlay.fake import FakeNetwork
from dataplane.underlay.link import parse_link
from dataplane.verdict import Verdict
from encap import vnet

TIME = 1_700_000_000_000_000_000
PORTS = {"vxlan": 8472, "ip": 8285}
HEADER_LENGTHS = {"vxlan": 22, "ip": 0}

started = test_cli.started  # a fixture
kept_privileges = test_cli.kept_privileges  # as well
needs_tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")


class Clock:
    """Wall time that passes by one nanosecond a look."""

    def __init__(self) -> None:
        self.time = TIME

    def __call__(self) -> int:
        self.time += 1
        return self.time


class Captured:
    """A node on a fake network, pumped by hand, with a capture of both its sides in memory."""

    def __init__(self, network: FakeNetwork, node: int, framing: str, family: int = 4, **options) -> None:
        self.file = Kept()
        self.recorder = Recorder(self.file, now_ns=Clock(), underlay="eth0")
        self.memory = MemoryDevice("flannel.1")
        self.fake = network.attach(PORTS[framing], underlay_host(node, family))
        self.device = CapturingDevice(self.memory, self.recorder)
        self.underlay = CapturingUnderlay(
            self.fake, self.recorder, hosts={family: underlay_host(node, family)}, port=PORTS[framing],
            header_length=HEADER_LENGTHS[framing],
        )  # fmt: skip
        table = table_of(node, [3 - node], framing, family, port=PORTS[framing], **options)
        self.engine = Engine(self.device, self.underlay, table, now=lambda: 0.0)

    def captured(self) -> list:
        """Interface, direction, comment and bytes of each packet."""
        self.recorder.close()
        return read(self.file.content)


class Kept(io.BytesIO):
    """A file in memory whose content outlives it."""

    content = b""

    def close(self) -> None:
        self.content = self.getvalue()


def read(data: bytes) -> list[tuple[str, str, str, bytes]]:
    reader = RawPcapNgReader(io.BytesIO(data))
    found = []
    while True:
        try:
            packet, about = reader._read_packet()
        except EOFError:
            return found
        comment = about.comments[0].decode() if about.comments else ""
        found.append((about.ifname.decode(), {1: "in", 2: "out", None: ""}[about.direction], comment, packet))


def big_tcp(segments: int, size: int = 1000) -> tuple[bytes, bytes]:
    """A TCP superpacket as a TUN delivers it, and its virtio-net header."""
    packet = tcp(payload=b"".join(bytes([i]) * size for i in range(segments)))
    header = bytearray(10)
    vnet.store(header, 0, vnet.FLAG_NEEDS_CSUM, vnet.GSO_TCPV4, 40, size, 20, 16)
    partial = bytearray(packet)
    pseudo = IP(packet)
    partial[36:38] = _pseudo_sum(pseudo, len(packet) - 20)
    return bytes(partial), bytes(header)


def _pseudo_sum(packet: IP, length: int) -> bytes:
    words = bytes(packet)[12:20] + bytes([0, 6]) + length.to_bytes(2, "big")
    total = int.from_bytes(words, "big") % 65535
    return (total or 65535).to_bytes(2, "big")


@needs_tshark
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_both_sides_of_both_nodes_as_they_crossed(tmp_path, framing, family):
    network = FakeNetwork()
    a, b = Captured(network, 1, framing, family), Captured(network, 2, framing, family)
    plain = [udp(payload=b"x" * 7), udp(version=6), tcp(), tcp(version=6)]
    superpacket, header = big_tcp(5)
    for packet in plain:
        a.memory.inject(packet)
    a.memory.inject(superpacket, header)
    a.engine.pump_outbound()
    b.engine.pump_inbound()

    of_a, of_b = a.captured(), b.captured()
    assert [one for one in of_a if one[0] == "flannel.1"] == [
        ("flannel.1", "out", "", packet) for packet in [*plain, superpacket]
    ]
    layer, tunnel = (IP, IPv6)[family == 6], HEADER_LENGTHS[framing]
    sent = [one for one in of_a if one[0] == "eth0"]
    assert len(sent) == 9
    for (_, direction, comment, packet), crossed in zip(sent, network.crossed, strict=True):
        outer = layer(packet)
        assert (direction, comment) == ("out", "")
        assert (outer.src, outer.dst) == (underlay_host(1, family), underlay_host(2, family))
        assert (outer[UDP].sport, outer[UDP].dport) == (crossed.source_port, PORTS[framing])
        assert bytes(outer[UDP].payload) == crossed.payload
    received = [one for one in of_b if one[0] == "eth0"]
    assert [direction for _, direction, _, _ in received] == ["in"] * 9
    length = (20 if family == 4 else 40) + 8
    assert [packet[length:] for *_, packet in received] == [one.payload for one in network.crossed]
    assert {layer(packet)[UDP].sport for *_, packet in received} == {0}
    assert {(layer(packet).src, layer(packet).dst) for *_, packet in received} == {
        (underlay_host(1, family), underlay_host(2, family))
    }

    delivered = [packet for name, _, _, packet in of_b if name == "flannel.1"]
    assert len(delivered) == b.memory.writes
    path = tmp_path / "b.pcapng"
    path.write_bytes(b.file.content)
    rows = decoded(path, framing, "eth0")
    assert [row["udp.checksum.status"].split(",")[0] for row in rows] == ["1"] * 9  # good
    assert all(not row["_ws.malformed"] for row in rows)
    assert all(not row["_ws.expert.severity"] for row in rows), rows
    if framing == "vxlan":
        assert {row["vxlan.vni"] for row in rows} == {"1"}
    for row, crossed in zip(rows, network.crossed, strict=True):
        inner = crossed.payload[tunnel:]
        source = IPv6(inner).src if inner[0] >> 4 == 6 else IP(inner).src
        found = [part for name in ("ip", "ipv6") for part in row[f"{name}.src"].split(",") if part]
        assert sorted(found) == sorted([underlay_host(1, family), source])


def decoded(path, framing: str, interface: str) -> list[dict[str, str]]:
    """What tshark finds in the packets of one interface, all checksums verified."""
    names = ["udp.checksum.status", "vxlan.vni", "ip.src", "ipv6.src", "_ws.expert.severity", "_ws.malformed"]
    command = ["tshark", "-n", "-r", path, "-Y", f'frame.interface_name == "{interface}"']
    command += ["-T", "fields", "-E", "separator=|", "-d", f"udp.port=={PORTS[framing]},{framing}"]
    for preference in ("ip.check_checksum:TRUE", "udp.check_checksum:TRUE", "tcp.check_checksum:TRUE"):
        command += ["-o", preference]
    command += ["-o", "tcp.analyze_sequence_numbers:FALSE"]  # our TCP packets are no conversation
    for name in names:
        command += ["-e", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [dict(zip(names, line.split("|"), strict=True)) for line in done.stdout.splitlines()]


def test_a_superpacket_that_is_delivered_stands_there_whole(tmp_path):
    network = FakeNetwork()
    a, b = Captured(network, 1, "vxlan"), Captured(network, 2, "vxlan")
    a.memory.inject(*big_tcp(4))
    a.engine.pump_outbound()
    b.engine.pump_inbound()
    assert len(b.memory.delivered) == 4
    delivered = [packet for name, direction, _, packet in b.captured() if (name, direction) == ("flannel.1", "in")]
    assert len(delivered) == b.memory.writes == 1
    assert len(IP(delivered[0])[TCP].payload) == 4000


def test_what_is_refused_is_there_with_its_verdict():
    network = FakeNetwork()
    a, b = Captured(network, 1, "vxlan"), Captured(network, 2, "vxlan")
    a.fake.refuse[underlay_host(2)] = Verdict.SEND_ERROR
    a.memory.inject(udp())
    a.engine.pump_outbound()
    a.fake.refuse.clear()
    a.memory.inject(udp())
    a.engine.pump_outbound()
    b.memory.room = 0
    b.engine.pump_inbound()
    assert [one[:3] for one in a.captured()] == [
        ("flannel.1", "out", ""),
        ("eth0", "out", "not sent: send_error (the underlay refused the datagram)"),
        ("flannel.1", "out", ""),
        ("eth0", "out", ""),
    ]
    assert [one[:3] for one in b.captured()] == [
        ("eth0", "in", ""),
        ("flannel.1", "in", "not delivered: queue_full (the socket or device had no room)"),
    ]


def test_what_goes_in_fragments_is_shown_whole_and_says_so():
    a = Captured(FakeNetwork(mtu=1400), 1, "vxlan")
    a.memory.inject(udp(payload=b"x" * 1400))
    a.engine.pump_outbound()
    comments = [comment for name, _, comment, _ in a.captured() if name == "eth0"]
    assert comments == [
        "not sent: too_big (larger than the path, and not to be fragmented)",
        "sent in fragments where the path asks for it",
    ]


def test_a_stranger_is_shown_with_its_address_and_stays_a_stranger():
    network = FakeNetwork()
    a, stranger = Captured(network, 1, "vxlan"), Captured(network, 2, "vxlan")
    a.engine.table = table_of(1, [3])
    stranger.memory.inject(udp(source=2, destination=1))
    stranger.engine.pump_outbound()
    a.engine.pump_inbound()
    assert a.engine.inbound.verdicts[Verdict.UNKNOWN_VTEP] == 1
    (name, direction, comment, packet), *others = a.captured()
    assert (name, direction, comment, others) == ("eth0", "in", "from a host that is in no lease", [])
    assert (IP(packet).src, IP(packet).dst) == (underlay_host(2), underlay_host(1))


@pytest.mark.parametrize("from_lease", [False, True])
def test_taps_and_faults_around_one_another_agree_on_who_is_a_stranger(from_lease):
    network = FakeNetwork()
    a, other = Captured(network, 1, "vxlan"), Captured(network, 2, "vxlan")
    lines: list[str] = []
    about = {"hosts": {4: underlay_host(1)}, "port": PORTS["vxlan"], "header_length": HEADER_LENGTHS["vxlan"]}
    traced = TracingUnderlay(a.underlay, Tracer(lines.append), **about)
    faulty = FaultyUnderlay(traced, parse_link("mtu=1500"), random.Random(1), header_length=HEADER_LENGTHS["vxlan"])
    table = table_of(1, [2 if from_lease else 3])
    engine = Engine(a.memory, faulty, table, now=lambda: 0.0)
    other.memory.inject(udp(source=2, destination=1))
    other.engine.pump_outbound()
    engine.pump_inbound()
    assert engine.inbound.verdicts[Verdict.FORWARDED if from_lease else Verdict.UNKNOWN_VTEP] == 1
    remark = "" if from_lease else "from a host that is in no lease"
    assert [comment for _, _, comment, _ in a.captured()] == [remark]
    assert len(lines) == 1
    assert ("[from a host that is in no lease]" in lines[0]) is not from_lease


class Scripted:
    """An underlay that receives what it is told to."""

    families, lanes, max_segments = frozenset({4, 6}), 1, 1

    def __init__(self, *arrivals: tuple[str, bytes, int]) -> None:
        self.arrivals = arrivals

    def report(self) -> dict:
        return {"send_errors": {}, "socket_drops": None, "source_ports": {}}

    def receive(self, batch, origins) -> None:
        for host, run, stride in self.arrivals:
            batch.put(run, origins.get(host, -1), stride)


def received(origins: dict[str, int], *arrivals: tuple[str, bytes, int], tunnel: int = 0) -> tuple[Batch, list]:
    file = Kept()
    recorder = Recorder(file, now_ns=Clock())
    hosts = {4: "192.0.2.1", 6: "2001:db8::1"}
    tap = CapturingUnderlay(Scripted(*arrivals), recorder, hosts=hosts, port=8285, header_length=tunnel)
    batch = Batch(len(arrivals) + 1)
    batch.put(b"was there before", 7)
    tap.receive(batch, origins)
    recorder.close()
    return batch, read(file.content)


def test_a_vtep_with_two_addresses_is_shown_with_the_one_that_it_sent_from():
    origins = {"192.0.2.2": 5, "2001:db8::2": 5, "192.0.2.3": 6}
    batch, found = received(origins, *[(host, b"x", 0) for host in (*origins, "192.0.2.2")])
    assert list(batch.peer) == [7, 5, 5, 6, 5]
    shown = [IP(p) if p[0] >> 4 == 4 else IPv6(p) for *_, p in found]
    assert [(one.src, one.dst) for one in shown] == [
        ("192.0.2.2", "192.0.2.1"), ("2001:db8::2", "2001:db8::1"), ("192.0.2.3", "192.0.2.1"), ("192.0.2.2", "192.0.2.1"),
    ]  # fmt: skip


def test_a_run_is_taken_apart_only_if_its_stride_agrees_with_the_inner_length():
    packets = [udp(payload=bytes([i]) * 50) for i in range(3)]
    whole = udp(payload=b"x" * 200)
    _, found = received({"192.0.2.2": 0}, ("192.0.2.2", b"".join(packets), len(packets[0])), ("192.0.2.2", whole, 100))
    assert [packet[28:] for *_, packet in found] == [*packets, whole]


@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_a_run_is_what_the_dataplane_takes_apart(framing):
    table, tunnel = table_of(1, [2], framing), HEADER_LENGTHS[framing]
    packets = [udp(payload=bytes(50)), tcp(version=6), udp(payload=bytes(30)), udp()[:19], b"", b"\x00" * 60, b"\x45"]
    for first in packets:
        for run in (bytes(tunnel) + first, (bytes(tunnel) + first) * 3, (bytes(tunnel) + first) * 2 + first, first[:9]):
            for stride in {-1, 0, 1, tunnel, tunnel + len(first) - 1, tunnel + len(first), len(run) - 1, len(run), 500}:
                batch = Batch(1)
                batch.put(run, stride=stride)
                found = Batch(512, batch.data)
                unpack(batch, found, table, 0)
                view = batch.packet(0)
                ours = list(pieces(view, stride)) if is_run(view, stride, tunnel) else [view]
                assert [found.packet(i) for i in range(found.count)] == ours, (run, stride)


def test_more_strangers_than_can_be_told_apart_have_no_address():
    arrivals = [(f"10.0.{i >> 8}.{i & 255}", b"x", 0) for i in range(8)]
    sender = CapturingUnderlay(Scripted(*arrivals), Recorder(Kept()), hosts={4: "192.0.2.1"}, port=1, header_length=0)
    sender._senders._strangers = MAX_STRANGERS - 6
    origins = sender._senders.origins
    file = Kept()
    sender._recorder = Recorder(file, now_ns=Clock())
    batch = Batch(8)
    sender.receive(batch, origins)
    sender._recorder.close()
    assert list(batch.peer) == [-1] * 8
    assert [IP(packet).src for *_, packet in read(file.content)] == [host for host, *_ in arrivals[:6]] + ["0.0.0.0"] * 2


@pytest.mark.parametrize("hosts", [("192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::2")])
@pytest.mark.parametrize("size", [0, 1, 2, 1399, LARGEST_PAYLOAD])
def test_outer_headers_are_those_that_scapy_makes(hosts, size):
    layer = IPv6 if ":" in hosts[0] else IP
    about = {"hlim": 64} if layer is IPv6 else {"id": 0}
    payload = os.urandom(size)
    expected = layer(src=hosts[0], dst=hosts[1], **about) / UDP(sport=50000, dport=8472) / Raw(payload)
    assert outer_packet(hosts[0], 50000, hosts[1], 8472, payload) == octets(expected)


def test_a_checksum_of_zero_is_written_as_all_ones():
    packet = outer_packet("192.0.2.1", 1, "192.0.2.2", 2, b"\0\0")
    rest = int.from_bytes(packet[26:28], "big")
    assert outer_packet("192.0.2.1", 1, "192.0.2.2", 2, rest.to_bytes(2, "big"))[26:28] == b"\xff\xff"


def test_hosts_of_two_families_are_refused():
    with pytest.raises(ValueError, match="two families"):
        outer_packet("192.0.2.1", 1, "2001:db8::1", 2, b"")


def test_a_datagram_for_the_network_in_memory(tmp_path):
    file = Kept()
    recorder = Recorder(file, now_ns=lambda: 0)
    recorder.datagram("192.0.2.1", 50000, "192.0.2.2", 8472, b"abc", time_ns=TIME, comment="lost", outbound=True)
    recorder.datagram("2001:db8::1", 1, "2001:db8::2", 2, memoryview(b"abcd"), time_ns=TIME + 5)
    recorder.datagram("192.0.2.1", 1, "192.0.2.2", 2, bytes(LARGEST_PAYLOAD + 9), time_ns=TIME, comment="too_big")
    recorder.close()
    found = read(file.content)
    assert [one[:3] for one in found] == [
        ("underlay", "out", "lost"),
        ("underlay", "", ""),
        ("underlay", "", "too_big; only 65507 of its 65516 bytes are here"),
    ]
    assert [len(packet) for *_, packet in found] == [31, 52, 65535]


# The file


def test_nothing_is_written_before_a_flush_and_everything_then():
    file = Kept()
    recorder = Recorder(file)
    recorder.packet("a", b"x", time_ns=0)
    assert file.getvalue() == b""
    recorder.flush()
    assert len(read(file.getvalue())) == 1
    recorder.packet("a", b"y", time_ns=0)
    recorder.close()
    recorder.close()
    assert len(read(file.content)) == 2
    assert (recorder.packets, recorder.written) == (2, len(file.content))
    recorder.packet("a", b"z", time_ns=0)
    recorder.flush()
    assert recorder.packets == 2


def test_much_is_written_without_a_flush():
    file = Kept()
    recorder = Recorder(file)
    for _ in range(10):
        recorder.packet("a", bytes(60000), time_ns=0)
    assert len(file.getvalue()) > 500_000
    recorder.close()
    assert len(read(file.content)) == 10


def test_an_empty_capture_is_a_capture():
    file = Kept()
    Recorder(file).close()
    assert file.content[:4] == b"\x0a\x0d\x0d\x0a"
    assert read(file.content) == []


def test_a_limit_ends_it_with_one_warning_and_a_whole_block(caplog):
    file = Kept()
    recorder = Recorder(file, limit=1000, name="/x/y.pcapng")
    for _ in range(30):
        recorder.packet("a", bytes(100), time_ns=0)
    recorder.close()
    assert 0 < len(file.content) <= 1000
    assert len(read(file.content)) == recorder.packets > 3
    assert caplog.messages == ["/x/y.pcapng: nothing more is recorded: it has reached its limit of 1000 bytes"]
    assert recorder.report() == {
        "file": "/x/y.pcapng", "packets": recorder.packets, "bytes": len(file.content),
        "stopped": "it has reached its limit of 1000 bytes",
    }  # fmt: skip


class FullDisk(Kept):
    """Takes `room` bytes, the last write in part, as a real file does."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data) -> int:
        taken = min(len(data), self.room)
        if not taken and len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= taken
        return super().write(data[:taken])


@pytest.mark.parametrize("room", [0, 10, 200, 300])
def test_a_full_disk_ends_it_with_one_warning_and_leaves_whole_blocks(caplog, room):
    file = FullDisk(room)
    recorder = Recorder(file)
    for i in range(5):
        recorder.packet("a", bytes([i]) * 60, time_ns=0)
        recorder.flush()
    recorder.close()
    assert caplog.messages == ["the capture file: nothing more is recorded: No space left on device"]
    assert len(file.content) == recorder.written <= room
    if file.content:
        assert len(read(file.content)) >= 1


def test_a_full_disk_stops_no_packet(caplog):
    network = FakeNetwork()
    a, b = Captured(network, 1, "vxlan"), Captured(network, 2, "vxlan")
    a.recorder._file = FullDisk(100)
    packets = [udp(payload=bytes([i]) * 1300) for i in range(1, 100)]
    for _ in range(5):
        for packet in packets:
            a.memory.inject(packet)
        a.engine.pump_outbound()
        b.engine.pump_inbound()
        a.recorder.flush()
    assert b.memory.delivered == packets * 5
    assert len(caplog.records) == 1
    assert a.recorder.stopped == "No space left on device"


def test_slow_files_that_take_a_little_at_a_time_get_everything():
    class Slow(Kept):
        def write(self, data) -> int:
            return super().write(data[:7])

    file = Slow()
    recorder = Recorder(file)
    recorder.packet("a", bytes(100), time_ns=0)
    recorder.close()
    assert len(read(file.content)) == 1


def test_a_file_that_takes_nothing_ends_it(caplog):
    class Deaf(Kept):
        def write(self, data) -> int | None:
            return None

    recorder = Recorder(Deaf())
    recorder.close()
    assert "takes nothing more" in recorder.stopped
    assert len(caplog.records) == 1


def test_a_file_that_somebody_closed_ends_it(caplog):
    file = io.BytesIO()
    recorder = Recorder(file)
    file.close()
    recorder.flush()
    assert "closed file" in recorder.stopped
    recorder.close()
    assert len(caplog.records) == 1


def test_a_file_that_was_removed_with_its_folder_ends_it(tmp_path, caplog):
    path = tmp_path / "there" / "a.pcapng"
    path.parent.mkdir()
    recorder = open_recorder(path)
    recorder.packet("a", b"x", time_ns=0)
    recorder.flush()
    path.unlink()
    path.parent.rmdir()
    recorder.packet("a", b"x", time_ns=0)
    assert not recorder.stopped
    recorder.flush()
    assert recorder.stopped == "it was removed"
    assert caplog.messages == [f"{path}: nothing more is recorded: it was removed"]


def test_a_file_of_ours_is_for_its_owner_and_begins_anew(tmp_path):
    path = tmp_path / "a.pcapng"
    for _ in range(2):
        recorder = open_recorder(path)
        recorder.packet("a", b"x", time_ns=0)
        recorder.close()
    assert len(read(path.read_bytes())) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_can_be_captured_into_and_need_not_be_read_to_its_end(tmp_path, caplog):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):  # nobody reads
        open_recorder(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = open_recorder(path)
    recorder.packet("a", b"x", time_ns=0)
    recorder.flush()
    assert len(read(os.read(reader, 10000))) == 1
    os.close(reader)
    recorder.packet("a", b"x", time_ns=0)
    recorder.flush()
    assert recorder.stopped == "Broken pipe"
    assert len(caplog.records) == 1


def test_a_reader_of_a_pipe_that_pauses_ends_the_capture_and_not_the_node(tmp_path, caplog):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = open_recorder(path)
    assert not os.get_blocking(recorder._file.fileno()), "what follows would wait for ever"
    for _ in range(600):  # some 800 kB are not yet too much
        recorder.packet("a", bytes(1400), time_ns=0)
    recorder.flush()
    assert not recorder.stopped
    assert recorder.packets == 600
    for _ in range(600):
        recorder.packet("a", bytes(1400), time_ns=0)
    recorder.close()
    assert "takes nothing more" in recorder.stopped
    assert len(caplog.records) == 1
    data = bytearray()
    while more := os.read(reader, 1 << 20):
        data += more
    os.close(reader)
    assert len(read(bytes(data))) > 600


def test_a_pipe_that_cannot_be_made_larger_is_filled_in_smaller_portions(tmp_path, monkeypatch):
    def control(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETPIPE_SZ:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return 65536

    monkeypatch.setattr("dataplane.capture.fcntl.fcntl", control)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    recorder = open_recorder(path)
    for _ in range(1000):
        recorder.packet("a", bytes(1400), time_ns=0)
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 65536)
    assert not recorder.stopped
    recorder.close()
    os.close(reader)


def test_a_file_that_others_could_read_is_theirs_no_more(tmp_path):
    path = tmp_path / "a.pcapng"
    path.write_bytes(b"x" * 5000)
    path.chmod(0o666)
    recorder = open_recorder(path)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_size) == (0o600, 0)
    recorder.close()


def test_where_a_link_leads_nothing_is_written(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "soft").symlink_to(victim)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "hard").hardlink_to(victim)
    for name, reason in (("soft", "symbolic link"), ("nowhere", "symbolic link"), ("hard", "another name")):
        with pytest.raises(OSError, match=reason):
            open_recorder(tmp_path / name)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("make", [lambda path: path.write_text("precious"), os.mkfifo], ids=["file", "pipe"])
def test_what_belongs_to_somebody_else_is_left_alone(tmp_path, monkeypatch, make):
    path = tmp_path / "theirs"
    make(path)
    path.chmod(0o666)
    before = path.stat()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    us = os.geteuid() + 1
    monkeypatch.setattr("dataplane.capture.os.geteuid", lambda: us)
    with pytest.raises(OSError, match=f"belongs to user {before.st_uid}, and we are user {us}"):
        open_recorder(path)
    os.close(reader)
    assert (path.stat().st_mode, path.stat().st_size) == (before.st_mode, before.st_size)


def test_only_files_and_pipes_are_written_and_what_swallows_everything(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_recorder(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device"):
            open_recorder(tmp_path / "socket")
    recorder = open_recorder(Path(os.devnull))
    recorder.packet("a", b"x", time_ns=0)
    recorder.close()
    assert (recorder.packets, recorder.stopped) == (1, "closed")


@pytest.mark.parametrize("mode", ["r+b", "ab"])
@pytest.mark.parametrize("buffering", [0, -1])
def test_a_file_that_had_something_in_it_keeps_that_when_recording_ends(tmp_path, mode, buffering):
    path = tmp_path / "a"
    path.write_bytes(b"H" * 1000)
    with open(path, mode, buffering=buffering) as file:
        file.seek(0, os.SEEK_END)
        recorder = Recorder(file, limit=600)
        while not recorder.stopped:
            recorder.packet("a", bytes(100), time_ns=0)
    content = path.read_bytes()
    assert content[:1000] == b"H" * 1000
    assert len(content) == 1000 + recorder.written
    assert len(read(content[1000:])) == recorder.packets > 0


def test_a_full_disk_leaves_what_was_in_the_file_before(caplog):
    file = FullDisk(1010)
    file.write(b"H" * 900)
    recorder = Recorder(file)
    recorder.flush()
    recorder.packet("a", bytes(100), time_ns=0)
    recorder.flush()
    assert len(caplog.records) == 1
    assert len(file.content) == 900 + recorder.written
    assert read(file.content[900:]) == []


@needs_tshark
def test_tshark_reads_a_capture_that_was_stopped_anywhere(tmp_path):
    for room in (300, 1000, 3000):
        file = FullDisk(room)
        recorder = Recorder(file)
        for i in range(100):
            recorder.packet("a", udp(payload=bytes([i]) * 30), time_ns=TIME)
            recorder.flush()
        path = tmp_path / f"{room}.pcapng"
        path.write_bytes(file.content)
        done = subprocess.run(["tshark", "-n", "-r", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == recorder.packets - 1


# The node


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def overlay(source: Machine, destination: Machine, payload: bytes = b"hello") -> bytes:
    hosts = {"src": str(source.subnet.network_address + 5), "dst": str(destination.subnet.network_address + 5)}
    return octets(IP(**hosts) / UDP(sport=1, dport=2) / Raw(payload))


async def test_a_node_captures_flushes_every_second_and_closes(world, tmp_path):
    path = tmp_path / "a.pcapng"
    async with Machine(world, 1, capture=path).running() as a, Machine(world, 2).running() as b:
        await arrive(world, a, 2)
        a.device.inject(overlay(a, b))
        await deliver(b, 1)
        assert read(path.read_bytes()) == []
        world.advance(1.0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert [one[:3] for one in read(path.read_bytes())] == [("flannel.1", "out", ""), ("eth0", "out", "")]
        b.device.inject(overlay(b, a))
        await deliver(a, 1)
        status = a.node.status()
        assert status["capture"] == {"file": str(path), "packets": 4, "bytes": path.stat().st_size, "stopped": None}
        assert status["socket_drops"] is None
        assert status["send_errors"] == {}
        assert b.node.status()["capture"] is None
    assert [one[:2] for one in read(path.read_bytes())] == [
        ("flannel.1", "out"), ("eth0", "out"), ("eth0", "in"), ("flannel.1", "in"),
    ]  # fmt: skip


async def arrive(world: World, machine: Machine, peers: int) -> None:
    """Let `machine` learn of the others: its store looks for changes when time has passed."""
    async with asyncio.timeout(5):
        while len(machine.node.status()["peers"]) < peers - 1:
            world.advance(1.0)
            await asyncio.sleep(0.01)


async def deliver(machine: Machine, count: int) -> None:
    async with asyncio.timeout(5):
        while len(machine.device.delivered) < count:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)


async def test_a_file_that_cannot_be_written_stops_the_start_and_says_so(world, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match=r"cannot write the capture file .*Not a directory"):
        async with Machine(world, 1, capture=tmp_path / "file" / "x").running():
            pass


async def test_a_capture_through_a_link_stops_the_start_and_says_so(world, tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(NodeError, match=r"cannot write the capture file .*/a: it is a symbolic link"):
        async with Machine(world, 1, capture=tmp_path / "a").running():
            pass
    assert (tmp_path / "victim").read_text() == "precious"


async def test_a_second_node_in_one_run_folder_does_not_empty_the_capture_of_the_first(world, tmp_path):
    path = tmp_path / "a.pcapng"
    async with Machine(world, 1, capture=path).running() as a:
        a.node._taps._recorder.flush()
        before = path.read_bytes()
        assert before
        with pytest.raises(ControlError, match="a node is running here"):
            async with Machine(world, 1, capture=path).running():
                pass
        assert path.read_bytes() == before


async def test_a_full_disk_is_in_the_status_and_the_node_goes_on(world, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        async with Machine(world, 1, capture=tmp_path / "a.pcapng").running() as a, Machine(world, 2).running() as b:
            recorder = a.node._taps._recorder
            recorder._close_file()
            recorder._file = FullDisk(5)
            await arrive(world, a, 2)
            a.device.inject(overlay(a, b))
            recorder.flush()
            await deliver(b, 1)
            recorder.flush()
            assert a.node.status()["capture"]["stopped"] == "No space left on device"
            assert a.node.status()["state"] == "running"
    assert sum("nothing more is recorded" in message for message in caplog.messages) == 1


async def test_faults_meet_what_arrives_and_the_capture_shows_what_came(world, tmp_path):
    path = tmp_path / "b.pcapng"
    harmed = Machine(world, 2, faults=parse_link("loss=100%"), capture=path)
    async with Machine(world, 1).running() as a, harmed.running() as b:
        await arrive(world, a, 2)
        await arrive(world, b, 2)
        for _ in range(5):
            a.device.inject(overlay(a, b))
        b.device.inject(overlay(b, a))
        await deliver(a, 1)
        while b.node.status()["link"]["lost"] < 5:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert b.device.delivered == []
        assert b.node.status()["inbound"]["received"] == 0
    found = [(interface, way) for interface, way, *_ in read(path.read_bytes())]
    assert sorted(found) == [("eth0", "in")] * 5 + [("eth0", "out"), ("flannel.1", "out")]


async def test_without_the_flags_nothing_is_wrapped(world):
    async with Machine(world, 1).running() as a:
        assert a.node._state.underlay is a.underlay
        assert a.node._state.device is a.device


# The command line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--capture", "/nowhere/x.pcapng"], "the folder /nowhere does not exist"),
        (["--capture", "/tmp"], "/tmp is a folder, not a file"),
        (["--faults", "loss=11"], "loss"),
        (["--faults", "gravity=1"], "gravity"),
    ],
)
def test_nonsense_is_a_usage_error_that_names_the_option(arguments, part, capsys):
    test_cli.run(*arguments, code=2)
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert part in said


def test_the_flags_reach_the_node(started, tmp_path):
    test_cli.run(*test_cli.STATIC)
    assert started["settings"].capture is None
    assert started["settings"].trace is False
    assert started["settings"].faults is None
    path = tmp_path / "a.pcapng"
    test_cli.run(*test_cli.STATIC, "--capture", str(path), "-trace", "--faults", "loss=10%")
    assert started["settings"].capture == path
    assert started["settings"].trace is True
    assert started["settings"].faults.loss == 0.1


def test_the_environment_has_them_too(started, tmp_path, monkeypatch):
    path = tmp_path / "a.pcapng"
    for name, value in (("CAPTURE", str(path)), ("TRACE", "true"), ("FAULTS", "delay=5ms")):
        monkeypatch.setenv(f"FLANNELD_{name}", value)
    test_cli.run(*test_cli.STATIC)
    settings = started["settings"]
    assert (settings.capture, settings.trace, settings.faults.delay) == (path, True, 0.005)


def test_status_tells_of_them_to_people(monkeypatch, capsys):
    direction = {"received": 0, "verdicts": {}}
    answer = {
        "state": "running", "pid": 1, "uptime_seconds": 1.0, "version": "1", "framing": "vxlan", "vni": 1, "port": 8472,
        "lease": {"subnet": "10.1.1.0/24", "ipv6_subnet": None, "vtep_mac": None, "expiration": None}, "offloads": {},
        "peers": [], "ready": True, "store": {"kind": "static", "away_since": None, "skipped": 0}, "firewall": None,
        "device": {"name": "flannel.1", "mtu": 1450, "queue_drops": 0}, "socket_drops": 0, "unreachable": [],
        "external": {"interface": "eth0", "ipv4": "192.0.2.1", "ipv6": None}, "failures": [], "outbound": direction,
        "inbound": direction, "icmp_errors": {"sent": 0, "suppressed": 0},
        "capture": {"file": "/x.pcapng", "packets": 7, "bytes": 900, "stopped": "it was removed"},
        "link": FaultyUnderlay(Scripted(), parse_link("loss=10%"), random.Random()).report()["link"],
    }  # fmt: skip
    monkeypatch.setattr(test_cli.commands, "ask", lambda *_: answer)
    test_cli.run("status")
    said = capsys.readouterr().out
    assert "capture   /x.pcapng, 7 packets, 900 bytes, stopped: it was removed\n" in said
    assert "faults    loss=10%: of 0 datagrams none harmed\n" in said
    answer["link"] |= {"sent": 9, "lost": 2, "corrupted": 1}
    answer["capture"] = None
    test_cli.run("status")
    said = capsys.readouterr().out
    assert "capture" not in said
    assert "faults    loss=10%: of 9 datagrams 2 lost, 1 corrupted\n" in said
