"""From capture files to chunks, and to a file of datagrams: what is in them does not depend on how they are cut."""

import shutil
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from packets import udp
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw
from scapy.utils import PcapWriter
from test_replay_paths import FRAMINGS, HOSTS, decapsulating, kernel_datagram, loader, sides
from test_replay_traces import BAD

from bench.replay import capture
from bench.replay.chunk import ALIGNMENT, Chunk
from bench.replay.loading import Loader
from bench.replay.rewrite import Rewriter
from bench.replay.sides import MAX_LEASES, MAX_PEERS, RECEIVERS, SENDER
from bench.replay.traces import TRACES, generate, write
from bench.replay.wire import write_underlay

SMALLEST = 70_000
"""Bytes of a chunk in which any packet fits."""

needs_tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")


def tshark(path, *fields: str, decode: str, where: str = "") -> list[list[str]]:
    """The fields of each datagram; checksums are verified, and sequence numbers of a part of a connection are not."""
    command = ["tshark", "-n", "-r", str(path), "-d", decode, "-o", "tcp.analyze_sequence_numbers:FALSE", "-T", "fields"]
    for layer in ("ip", "udp", "tcp"):
        command += ["-o", f"{layer}.check_checksum:TRUE"]
    for field in fields:
        command += ["-e", field]
    done = subprocess.run([*command, *(["-Y", where] if where else [])], capture_output=True, text=True, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


def packets(source: Loader) -> list[tuple[int, bytes]]:
    return [(chunk.time_ns[i], chunk.packet(i)) for chunk in source.chunks() for i in range(len(chunk))]


@pytest.fixture
def reads(monkeypatch) -> list[tuple]:
    """How often the capture was read."""
    found = []
    real = capture.read_all

    def read_all(paths, trouble):
        found.append(tuple(paths))
        return real(paths, trouble)

    monkeypatch.setattr(capture, "read_all", read_all)
    return found


class TestChunk:
    def test_packets_lie_aligned_and_can_be_read_back(self):
        chunk = Chunk(200)
        for length in (0, 1, 16, 17):
            chunk.append(bytes(range(length)), length)
        assert [chunk.packet(i) for i in range(4)] == [bytes(range(length)) for length in (0, 1, 16, 17)]
        assert all(at % ALIGNMENT == 0 for at in chunk.offset)
        assert list(chunk.time_ns) == [0, 1, 16, 17]

    def test_what_does_not_fit_is_refused(self):
        chunk = Chunk(32)
        chunk.append(b"x" * 17, 0)
        assert not chunk.has_room(1)
        with pytest.raises(ValueError, match="full"):
            chunk.append(b"x", 0)
        chunk.clear()
        assert len(chunk) == 0
        assert chunk.has_room(32)


@pytest.mark.parametrize("name", TRACES)
def test_the_size_of_chunks_makes_no_difference(tmp_path, name, reads):
    write(tmp_path / "a.pcap", name, 1, 600)
    ends = sides("vxlan", peers=4)
    whole, cut = (loader([tmp_path / "a.pcap"], ends, chunk_bytes=size) for size in (64 << 20, SMALLEST))
    everything = packets(whole)
    assert packets(cut) == packets(cut) == packets(whole) == everything
    assert cut.trace("a") == whole.trace("a")
    assert cut.trace("a").packets == len(everything)
    assert (cut.records, cut.skipped) == (whole.records, whole.skipped)
    assert cut.records == 600 == len(everything) + cut.skipped.total()
    is_small = sum(len(packet) + ALIGNMENT for _, packet in everything) < SMALLEST
    assert len(reads) == (2 if is_small else 3)  # what is one chunk is read once


def test_packets_keep_what_is_not_an_address(tmp_path):
    write(tmp_path / "a.pcap", "dual", 1, 200)
    found = packets(loader([tmp_path / "a.pcap"], sides("vxlan")))
    for (time_ns, made), (at, packet) in zip(generate("dual", 1, 200), found, strict=True):
        assert at == time_ns
        assert len(packet) == len(made)
        network = SENDER[0] if packet[0] >> 4 == 4 else SENDER[1]
        own = packet[12:16] if packet[0] >> 4 == 4 else packet[8:24]
        assert int(network.network_address) <= int.from_bytes(own, "big") <= int(network.broadcast_address)
        assert packet[-8:] == made[-8:] or len(packet) < 60


def test_files_follow_each_other(tmp_path):
    for number, name in enumerate(("small", "dual")):
        write(tmp_path / f"{number}.pcap", name, 1, 100)
    paths = [tmp_path / "0.pcap", tmp_path / "1.pcap"]
    both = packets(loader(paths, sides("vxlan")))
    assert both == [one for path in paths for one in packets(loader([path], sides("vxlan")))]
    assert len(both) == 200


def test_reasons_for_leaving_out_are_counted(tmp_path):
    with PcapWriter(str(tmp_path / "a.pcap"), linktype=1) as file:
        file.write(Ether(type=0x800) / Raw(udp()))
        file.write(Ether() / ARP())
        file.write(Ether() / ARP())
        file.write(Ether(type=0x800) / Raw(udp()[:-1]))
        whole = bytes(Ether(type=0x800) / Raw(udp()))
        file.write_packet(whole[:40], caplen=40, wirelen=len(whole))
    with PcapWriter(str(tmp_path / "b.pcap"), linktype=147) as file:
        file.write(udp())
    source = loader([tmp_path / "a.pcap", tmp_path / "b.pcap"], sides("vxlan"))
    for _ in range(2):
        assert len(packets(source)) == 1
        assert dict(source.skipped) == {"not_ip": 2, "malformed": 1, "cut": 1, "unknown_link_type": 1}
    assert source.trace("x").packets_skipped_by_reason == dict(source.skipped)


def test_an_empty_capture_is_one_empty_chunk(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 0)
    source = loader([tmp_path / "a.pcap"], sides("vxlan"))
    assert [len(chunk) for chunk in source.chunks()] == [len(chunk) for chunk in source.chunks()] == [0]
    assert source.trace("a").packets == 0


def test_a_broken_file_gives_what_is_before_the_break_in_every_loop(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 500)
    data = (tmp_path / "a.pcap").read_bytes()
    (tmp_path / "b.pcap").write_bytes(data[: len(data) // 2])
    said: list[str] = []
    ends = sides("vxlan")
    for size, times in ((64 << 20, 1), (SMALLEST, 3)):
        said.clear()
        fit = Rewriter(SENDER, ends.peer_subnets, 0)
        source = Loader([tmp_path / "b.pcap"], fit, trouble=said.append, chunk_bytes=size)
        counts = [len(packets(source)) for _ in range(3)]
        assert 100 < counts[0] == counts[1] == counts[2] < 500
        assert len(said) == times
        assert "what follows is left out" in said[0]


def test_memory_is_that_of_one_chunk(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 20_000)
    assert (tmp_path / "a.pcap").stat().st_size > 6 << 20
    source = loader([tmp_path / "a.pcap"], sides("vxlan"), chunk_bytes=1 << 18)
    chunks, blocks = set(), set()
    tracemalloc.start()
    try:
        for chunk in source.chunks():
            chunks.add(id(chunk))
            blocks.add(id(chunk.data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(chunks) == len(blocks) == 1
    assert peak < 2 << 20


def test_reading_is_timed_the_first_time_only(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 500)
    source = loader([tmp_path / "a.pcap"], sides("vxlan"), chunk_bytes=SMALLEST)
    packets(source)
    took = source.read_ns
    packets(source)
    assert 0 < took == source.read_ns


# --- the tables


@pytest.mark.parametrize(("peers", "leases"), [(1, 1), (3, 1), (4, 100), (MAX_PEERS, 1)])
def test_every_peer_has_a_place_in_the_receivers_subnets(peers, leases):
    ends = sides("vxlan", peers=peers, leases=leases)
    assert len(set(ends.peer_subnets)) == 2 * peers
    for subnet in ends.peer_subnets:
        assert subnet.subnet_of(RECEIVERS[0] if subnet.version == 4 else RECEIVERS[1])
    assert len(ends.sending.routes) == 2 * peers + max(leases - peers, 0)


@pytest.mark.parametrize(("peers", "leases"), [(0, 1), (MAX_PEERS + 1, 1), (1, -1), (1, MAX_LEASES + 1)])
def test_numbers_out_of_range_are_refused(peers, leases):
    with pytest.raises(ValueError, match="there may be"):
        sides("vxlan", peers=peers, leases=leases)


# --- the file of datagrams


def underlay_file(tmp_path, name: str, framing: str, count: int = 400):
    write(tmp_path / "a.pcap", name, 1, count)
    ends = sides(framing, peers=3, port=8472 if framing == "vxlan" else 8285)
    source = loader([tmp_path / "a.pcap"], ends, chunk_bytes=SMALLEST)
    written = write_underlay(tmp_path / "b.pcapng", source, ends, HOSTS)
    return tmp_path / "b.pcapng", written


@needs_tshark
@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("name", ["dual", "imix", "bulk"])
def test_tshark_opens_what_was_written(tmp_path, name, framing):
    path, written = underlay_file(tmp_path, name, framing)
    decode = "udp.port==8472,vxlan" if framing == "vxlan" else "udp.port==8285,ip"
    wrong = f"{BAD} || _ws.malformed || _ws.expert.severity >= Warning"
    assert written == 400
    assert tshark(path, "frame.number", "_ws.expert.message", where=wrong, decode=decode) == []
    rows = tshark(path, "frame.time_epoch", "vxlan.vni", "udp.dstport", "ip.src", "ip.version", decode=decode)
    times = [row[0] for row in rows]
    assert times == [f"{at // 10**9}.{at % 10**9:09}" for at, _ in generate(name, 1, 400)]
    assert {row[1] for row in rows} == {"1" if framing == "vxlan" else ""}
    assert all(row[2].startswith("8472" if framing == "vxlan" else "8285") for row in rows)
    sources = Counter(row[3].partition(",")[0] for row in rows)
    assert sources == {"127.0.0.1": 400}
    inner = tshark(path, "frame.number", where="ip.src == 10.1.0.0/16 || ipv6.src == fd00:0:1::/48", decode=decode)
    assert len(inner) == 400


def test_what_is_not_carried_is_not_written(tmp_path):
    write(tmp_path / "a.pcap", "hostile", 1, 400)
    _, written = underlay_file(tmp_path, "hostile", "ip")
    source = loader([tmp_path / "a.pcap"], sides("ip"))
    total = len(packets(source))
    assert 0 < written < total  # TTLs of 1, and multicast


def test_a_folder_that_is_not_there(tmp_path):
    ends = sides("vxlan")
    with pytest.raises(OSError, match="No such file"):
        write_underlay(tmp_path / "x" / "b.pcapng", loader([tmp_path / "a.pcap"], ends), ends, HOSTS)


def test_a_full_disk_is_told(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 100)
    ends = sides("vxlan")
    with pytest.raises(OSError, match="No space left"):
        write_underlay(Path("/dev/full"), loader([tmp_path / "a.pcap"], ends), ends, HOSTS)


# --- datagrams


def test_the_size_of_chunks_makes_no_difference_to_datagrams_either(tmp_path):
    with PcapWriter(str(tmp_path / "a.pcap"), linktype=1) as file:
        for number in range(300):
            file.write(kernel_datagram(number, 4789))
    found = [packets(decapsulating([tmp_path / "a.pcap"], "vxlan", chunk_bytes=size)[0]) for size in (1 << 20, 1 << 11)]
    assert found[0] == found[1]
    assert len(found[0]) == 300
    mac = sides("vxlan").receiving.identity.vtep_mac
    assert {(packet[4:7], packet[8:14]) for _, packet in found[0]} == {(b"\0\0\1", mac)}
    assert {packet[14:20] for _, packet in found[0]} == {bytes.fromhex("4a0000000001")}  # the sender's stays


def test_an_ip_datagram_has_no_header_to_change(tmp_path):
    with PcapWriter(str(tmp_path / "a.pcap"), linktype=1) as file:
        file.write(Ether() / IP() / UDP(dport=8285) / udp(payload=b"text"))
        file.write(Ether() / IP() / UDP(dport=8285))
    (_, first), (_, second) = packets(decapsulating([tmp_path / "a.pcap"], "ip")[0])
    assert first[-4:] == b"text"
    assert second == b""
