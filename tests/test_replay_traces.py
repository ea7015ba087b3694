"""Synthetic traces: tshark finds nothing wrong with the valid ones, and everything that should be in the hostile one."""

import itertools
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.replay.capture import read
from bench.replay.linklayer import inner_packet
from bench.replay.traces import BEGINNING_NS, HOSTILE, MTU, TRACES, generate, write
from encap import ip
from encap.fields import load16

VALID = [name for name in TRACES if name != "hostile"]

needs_tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")


def packets(name: str, count: int, seed: int = 1) -> list[bytes]:
    return [packet for _, packet in generate(name, seed, count)]


def tshark(path, *fields: str, where: str = "") -> list[list[str]]:
    """The fields of each packet; checksums are verified."""
    command = ["tshark", "-n", "-r", str(path), "-T", "fields"]
    for layer in ("ip", "udp", "tcp"):
        command += ["-o", f"{layer}.check_checksum:TRUE"]
    for field in fields:
        command += ["-e", field]
    done = subprocess.run([*command, *(["-Y", where] if where else [])], capture_output=True, text=True, check=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


TRANSPORTS = ("udp", "tcp", "icmp", "icmpv6")
BAD = " || ".join(f"{layer}.checksum.status == Bad" for layer in ("ip", *TRANSPORTS))


@pytest.mark.parametrize("name", VALID)
@needs_tshark
def test_tshark_finds_nothing_wrong(tmp_path, name):
    path = tmp_path / "a.pcap"
    write(path, name, 1, 4000)
    wrong = f"{BAD} || _ws.malformed || _ws.expert.severity == error || ip.bogus_header_length || ip.bogus_ip_length"
    assert tshark(path, "frame.number", "_ws.expert.message", where=wrong) == []
    rows = tshark(path, "ip.version", "ip.checksum.status", *(f"{layer}.checksum.status" for layer in TRANSPORTS))
    assert len(rows) == 4000
    assert all(header == "1" for version, header, *_ in rows if version == "4")
    if name != "fragments":
        assert all("1" in transports for _, _, *transports in rows)
    else:
        joined = "(udp || icmp) && (ip.reassembled.length || ipv6.reassembled.length)"
        found = tshark(path, *(f"{layer}.checksum.status" for layer in TRANSPORTS), where=joined)
        assert len(found) > 400
        assert all("1" in row for row in found)


@pytest.mark.parametrize("name", TRACES)
def test_equal_arguments_give_equal_files_and_others_do_not(tmp_path, name):
    def made(number: int, seed: int, count: int = 300) -> bytes:
        write(tmp_path / str(number), name, seed, count)
        return (tmp_path / str(number)).read_bytes()

    first = made(1, 7)
    assert made(2, 7) == first
    assert made(3, 8) != first
    assert first.startswith(made(4, 7, 100))


def test_the_seed_is_all_there_is_to_randomness():
    code = "import zlib; from bench.replay.traces import *\n"
    code += "print([zlib.crc32(packet) for name in TRACES for _, packet in generate(name, 3, 90)])"
    root = Path(__file__).resolve().parent.parent
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, cwd=root, capture_output=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert said[0].stdout == said[1].stdout


@pytest.mark.parametrize("name", TRACES)
def test_a_file_holds_what_was_generated(tmp_path, name):
    write(tmp_path / "a.pcap", name, 5, 500)
    records = list(read(tmp_path / "a.pcap", pytest.fail))
    assert [(record.time_ns, record.data) for record in records] == list(generate(name, 5, 500))
    assert {record.link_type for record in records} == {101}
    times = [BEGINNING_NS, *(record.time_ns for record in records)]
    assert times == sorted(times)
    if name != "hostile":
        assert all(inner_packet(record) == (0, len(record.data)) for record in records)


def test_a_large_file_is_written_in_pieces(tmp_path):
    write(tmp_path / "a.pcap", "bulk", 5, 4000)
    assert (tmp_path / "a.pcap").stat().st_size > 3 << 20
    assert [record.data for record in read(tmp_path / "a.pcap", pytest.fail)] == packets("bulk", 4000, 5)


def test_no_packets_are_a_file_too(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 0)
    assert list(read(tmp_path / "a.pcap", pytest.fail)) == []


def test_an_unknown_name_is_refused_before_a_file_is_made(tmp_path):
    with pytest.raises(ValueError, match="no trace is called 'max'; there are imix, small"):
        write(tmp_path / "a.pcap", "max", 1, 1)
    assert not (tmp_path / "a.pcap").exists()


# --- what each is about


def flows(found: list[bytes]) -> Counter[bytes]:
    """Addresses and ports of IPv4 packets without options."""
    return Counter(packet[9:10] + packet[12:24] for packet in found)


@pytest.mark.parametrize("name", VALID)
def test_packets_fit_the_overlay_and_are_ip(name):
    for packet in packets(name, 2000):
        assert ip.check(packet, 0, len(packet)) == 0
        assert len(packet) <= MTU
        assert ip.ttl(packet, 0) == 64


def test_imix_is_seven_to_four_to_one():
    sizes = Counter(map(len, packets("imix", 12 * 50)))
    assert sizes == {46: 350, 552: 200, 1450: 50}
    assert len(flows(packets("imix", 3000))) == 256


def test_small_is_of_the_smallest_frames_in_many_flows():
    found = packets("small", 20_000)
    assert {len(packet) for packet in found} == {46}
    assert 4000 < len(flows(found)) <= 4096


def test_flows_has_each_of_its_flows_once():
    found = packets("flows", 100_000)
    assert set(flows(found).values()) == {1}
    assert flows(found[:500]) == flows(packets("flows", 500, seed=9))


def test_bulk_is_bursts_of_full_segments_and_acknowledgments_back():
    found = packets("bulk", 20_000)
    there = [packet for packet in found if packet[12:15] == bytes((10, 244, 1))]
    back = [packet for packet in found if packet[16:19] == bytes((10, 244, 1))]
    assert len(there) + len(back) == len(found)
    assert len(flows(there)) == len(flows(back)) == 8
    assert sum(len(packet) == MTU for packet in there) / len(there) > 0.95
    assert {len(packet) for packet in back} == {52}
    assert 0.45 < len(back) / len(there) < 0.56


@needs_tshark
def test_bulk_is_a_conversation_that_tshark_can_follow(tmp_path):
    write(tmp_path / "a.pcap", "bulk", 1, 4000)
    assert tshark(tmp_path / "a.pcap", "frame.number", "_ws.expert.message", where="tcp.analysis.flags") == []
    bytes_in_flight = [int(row[0] or 0) for row in tshark(tmp_path / "a.pcap", "tcp.analysis.bytes_in_flight")]
    assert 40_000 < max(bytes_in_flight) < 70_000


def test_dual_has_both_versions_and_three_protocols():
    found = packets("dual", 3000)
    kinds = Counter((packet[0] >> 4, packet[9] if packet[0] >> 4 == 4 else packet[6]) for packet in found)
    assert set(kinds) == {(4, 1), (4, 6), (4, 17), (6, 6), (6, 17), (6, 58)}
    assert min(kinds.values()) > 60
    assert len({len(packet) for packet in found}) > 1000


def test_fragments_are_of_both_versions_and_some_in_reverse_order():
    found = packets("fragments", 4000)
    four = [load16(packet, 6) for packet in found if packet[0] >> 4 == 4 and ip.is_fragment(packet, 0)]
    six = [load16(packet, 42) for packet in found if packet[0] >> 4 == 6 and packet[6] == 44]
    assert min(len(four), len(six)) > 1000
    for offsets, more in ((four, 0x2000), (six, 1)):
        last = [not offset & more for offset in offsets]
        first = [not offset & ~more for offset in offsets]
        assert 300 < sum(last) < len(offsets)
        assert 300 < sum(first) < len(offsets)
    follows = [b & 0x1FFF for a, b in itertools.pairwise(four) if not a & 0x2000]
    assert any(follows)  # behind a last fragment comes one that is not a first


# --- hostile


def kinds(rounds: int = 1, seed: int = 1) -> list[tuple[str, bytes]]:
    return list(zip(itertools.cycle(HOSTILE), packets("hostile", rounds * len(HOSTILE), seed)))


def fault(packet: bytes) -> str:
    """What `encap.ip` has against a packet's lengths."""
    return {0: "", 2: "not ip", 3: "truncated", 4: "bad length"}[ip.check(packet, 0, len(packet))]


FAULTS = {
    "empty": "truncated", "one byte": "truncated", "IPv4 header cut": "truncated", "IPv6 header cut": "truncated",
    "version 0": "not ip", "version 5": "not ip", "version 15": "not ip",
    "IPv4 header length 0": "bad length", "IPv4 header length 16": "bad length",
    "IPv4 header longer than the packet": "bad length",
    "IPv4 total length 0": "bad length", "IPv4 total length below the header's": "bad length",
    "IPv4 total length too long": "truncated", "IPv4 total length too short": "bad length",
    "IPv6 payload length too long": "truncated", "IPv6 payload length too short": "bad length",
    "IPv6 payload length 0": "bad length", "jumbogram": "bad length",
}  # fmt: skip


def test_every_kind_has_the_fault_that_it_should_and_no_other():
    for name, packet in kinds(rounds=30):
        assert fault(packet) == FAULTS.get(name, ""), name
    assert set(FAULTS) <= set(HOSTILE)


WRONG_CHECKSUMS = {
    "IPv4 checksum wrong": "ip", "UDP checksum wrong": "udp", "TCP checksum wrong": "tcp",
    "IPv6 UDP checksum wrong": "udp", "IPv6 TCP checksum wrong": "tcp",
    # where a length or a header is wrong, so is what the checksum is computed over
    "TCP header longer than the packet": "tcp", "UDP length too short": "udp",
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
@needs_tshark
def test_tshark_finds_the_checksums_wrong_that_should_be(tmp_path, seed):
    write(tmp_path / "a.pcap", "hostile", seed, len(HOSTILE))
    columns = ["ip.checksum.status", "udp.checksum.status", "tcp.checksum.status", "icmp.checksum.status"]
    rows = tshark(tmp_path / "a.pcap", *columns)
    found = {}
    for name, row in zip(HOSTILE, rows, strict=True):
        bad = [column.split(".")[0] for column, value in zip(columns, row, strict=True) if "0" in value.split(",")]
        if bad and name != "TCP header cut":  # it may be cut before or behind the checksum
            found[name] = " ".join(bad)
    assert found == WRONG_CHECKSUMS


SIGHT = {
    "IPv4 header length 0": "ip.bogus_header_length",
    "IPv4 header length 16": "ip.bogus_header_length",
    "IPv4 header longer than the packet": "ip.bogus_ip_length",
    "IPv4 total length below the header's": "ip.bogus_ip_length",
    "UDP checksum 0": "udp.checksum == 0 && ip",
    "IPv6 UDP checksum 0": "udp.checksum == 0 && ipv6",
    "UDP length 0": "udp.length == 0",
    "UDP length 7": "udp.length == 7",
    "UDP length too long": "udp.length == 65535",
    "UDP without payload": "udp.length == 8",
    "TCP header length 0": "tcp.bogus_header_length",
    "TCP with no flags": "tcp.flags == 0 && tcp.hdr_len == 20",
    "TCP with all flags": "tcp.flags == 0xff && tcp.urgent_pointer == 7",
    "TTL 0": "ip.ttl == 0",
    "TTL 1": "ip.ttl == 1",
    "hop limit 0": "ipv6.hlim == 0",
    "hop limit 1": "ipv6.hlim == 1",
    "IPv4 multicast": "ip.dst == 224.0.0.0/4",
    "IPv4 broadcast": "ip.dst == 255.255.255.255",
    "IPv6 multicast": "ipv6.dst == ff00::/8",
    "to 0.0.0.0": "ip.dst == 0.0.0.0",
    "to the loopback": "ip.dst == 127.0.0.1",
    "to IPv6 unspecified": "ipv6.dst == ::",
    "from 0.0.0.0": "ip.src == 0.0.0.0",
    "from the loopback": "ip.src == 127.0.0.1",
    "from IPv4 multicast": "ip.src == 224.0.0.0/4",
    "from elsewhere": "ip.src == 198.51.100.0/24",
    "from an IPv4-mapped address": "ipv6.src == ::ffff:0:0/96",
    "from a link-local address": "ipv6.src == fe80::/10",
    "from its destination": "ip.src == 10.244.2.2 && ip.dst == 10.244.2.2",
    "option: router alert": "ip.opt.ra",
    "option: record route": "ip.opt.type == 7",
    "option: source route": "ip.opt.type == 131",
    "option of length 0": "ip[20:4] == 07:00:04:00",
    "option longer than the header": "ip[20:4] == 07:ff:04:00",
    "extension: hop-by-hop": "ipv6.hopopts && !ipv6.plen == 0 && udp",
    "extension: destination options": "ipv6.dstopts && udp && ipv6.plen == 48",
    "extension: routing type 0": "ipv6.routing.type == 0",
    "extension: atomic fragment": "ipv6.fraghdr.more == 0 && ipv6.fraghdr.offset == 0",
    "extension: 24 of them": "ipv6.plen == 232 && udp",
    "extension longer than the packet": "ipv6.dstopts.len == 255",
    "extension cut": "ipv6.nxt == 60 && ipv6.plen < 8",
    "fragment: first": "ip.flags.mf == 1 && ip.frag_offset == 0 && ip.len == 84 && ip.flags.df == 0",
    "fragment: tiny first": "ip.flags.mf == 1 && ip.len == 28",
    "fragment: first not a multiple of 8": "ip.flags.mf == 1 && ip.len == 33",
    "fragment: overlapping": "ip[6:2] == 20:03",
    "fragment: beyond 65535": "ip[6:2] == 1f:ff",
    "fragment: DF and MF": "ip.flags.mf == 1 && ip.flags.df == 1",
    "reserved flag": "ip.flags.rb == 1",
    "protocol 255": "ip.proto == 255",
    "ICMP error with a cut quote": "icmp.type == 3",
    "IPv4 in IPv4": "ip.proto == 4",
    "65535 bytes": "ip.len == 65535",
    "larger than the MTU": "ip.len == 1451",
    "IPv4 header alone": "ip.len == 20 && ip.proto == 17",
    "IPv6 header alone": "ipv6.plen == 0 && ipv6.nxt == 59",
    "UDP header cut": "ip.proto == 17 && ip.len > 20 && ip.len < 28 && ip.flags.mf == 0",
    "TCP header cut": "ip.proto == 6 && ip.len < 40",
    "TCP header longer than the packet": "tcp && ip.len == 48",
    "jumbogram": "ipv6[4:3] == 00:00:00",
}
UNSEEN = set(FAULTS) | set(WRONG_CHECKSUMS)
"""What the two tests above have seen already."""


@needs_tshark
def test_tshark_sees_every_other_kind_where_it_should_be(tmp_path):
    assert set(SIGHT) | UNSEEN == set(HOSTILE)
    write(tmp_path / "a.pcap", "hostile", 1, len(HOSTILE))
    filters = [f"frame.number == {list(HOSTILE).index(name) + 1} && ({where})" for name, where in SIGHT.items()]
    command = ["tshark", "-n", "-q", "-r", str(tmp_path / "a.pcap"), "-z", ",".join(["io,stat,0", *filters])]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (row,) = [line for line in table.splitlines() if "<>" in line]
    frames = row.replace(" ", "").strip("|").split("|")[1::2]  # beside each number of frames stands one of bytes
    assert len(frames) == len(SIGHT)
    assert [name for name, seen in zip(SIGHT, frames, strict=True) if seen != "1"] == []
