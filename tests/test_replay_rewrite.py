"""Captured packets with new addresses: judged by tshark, and by sums computed in full from the RFCs."""

import itertools
import random
import shutil
import struct
import subprocess
from ipaddress import IPv4Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import internet_checksum, pseudo_header
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPerror, IPOption_LSRR, IPOption_NOP, IPOption_RR, UDPerror
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoRequest,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.packet import Raw
from scapy.utils import PcapWriter

from bench.replay import rewrite
from bench.replay.rewrite import Rewriter

OWN = [ip_network("10.9.1.0/24"), ip_network("fd09:0:0:1::/64")]
PEERS = [ip_network(one) for one in ("10.9.2.0/24", "10.9.3.0/24", "fd09:0:0:2::/64", "fd09:0:0:3::/64")]

needs_tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")


def rewriter(own=OWN, peers=PEERS, seed=1, **options) -> Rewriter:
    return Rewriter(own, peers, seed, **options)


def rewritten(packet: bytes, by: Rewriter | None = None) -> bytes:
    buffer = bytearray(packet)
    (by or rewriter()).rewrite(buffer, 0, len(buffer))
    return bytes(buffer)


def addresses(packet: bytes) -> tuple:
    if packet[0] >> 4 == 4:
        return ip_address(packet[12:16]), ip_address(packet[16:20])
    return ip_address(packet[8:24]), ip_address(packet[24:40])


V4 = {"src": "192.168.7.20", "dst": "93.184.216.34"}
V6 = {"src": "2001:db8:1::20", "dst": "2a00:1450:4001::8a"}
DATA = Raw(bytes(range(37)))  # an odd length

PACKETS = {
    "TCP": IP(**V4) / TCP(sport=1, dport=80, options=[("MSS", 1460), ("Timestamp", (1, 2))]) / DATA,
    "UDP": IP(**V4) / UDP(sport=5, dport=6) / DATA,
    "UDP without a checksum": IP(**V4) / UDP(sport=5, dport=6, chksum=0) / DATA,
    "ICMP": IP(**V4) / ICMP(type=8) / DATA,
    "ICMP error": IP(**V4) / ICMP(type=3, code=1) / IPerror(**V4) / UDPerror(sport=5, dport=6),
    "options": IP(**V4, options=[IPOption_RR(length=11, pointer=8, routers=["1.2.3.4", "0.0.0.0"])]) / TCP() / DATA,
    "source route": IP(**V4, options=[IPOption_LSRR(pointer=4, routers=["1.2.3.4", "5.6.7.8"])]) / UDP() / DATA,
    "source route behind others": IP(
        **V4,
        options=[
            IPOption_NOP(),
            IPOption_RR(length=11, pointer=8, routers=["1.2.3.4", "0.0.0.0"]),
            IPOption_LSRR(pointer=4, routers=["5.6.7.8"]),
        ],
    )
    / UDP()
    / DATA,
    "broadcast": IP(src="0.0.0.0", dst="255.255.255.255") / UDP(sport=68, dport=67) / DATA,
    "GRE": IP(**V4, proto=47) / DATA,
    "TCP over IPv6": IPv6(**V6) / TCP(sport=1, dport=80) / DATA,
    "UDP over IPv6": IPv6(**V6) / UDP(sport=5, dport=6) / DATA,
    "ICMPv6": IPv6(**V6) / ICMPv6EchoRequest(data=b"x" * 33),
    "ICMPv6 error": IPv6(**V6) / ICMPv6DestUnreach() / IPv6(**V6) / UDP(sport=5, dport=6),
    "extension headers": IPv6(**V6) / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / TCP() / DATA,
    "routing header": IPv6(**V6) / IPv6ExtHdrRouting(addresses=["2001:db8::7"], segleft=1) / UDP() / DATA,
    "routing header, arrived": IPv6(**V6) / IPv6ExtHdrRouting(addresses=["2001:db8::7"], segleft=0) / UDP() / DATA,
    "atomic fragment": IPv6(**V6) / IPv6ExtHdrFragment(id=7) / UDP() / DATA,
}
AUTHENTICATION = struct.pack("!BBHII12x", 17, 4, 0, 5, 6)  # RFC 4302 2; the transport is UDP


def authenticated() -> bytes:
    """A UDP datagram behind an authentication header, whose length is in other units than those of its like."""
    packet = bytearray(bytes(PACKETS["UDP over IPv6"]))
    packet[4:6] = (len(packet) - 40 + len(AUTHENTICATION)).to_bytes(2, "big")
    packet[6] = 51
    packet[40:40] = AUTHENTICATION
    return bytes(packet)


STATUS = (
    "ip.checksum.status",
    "tcp.checksum.status",
    "udp.checksum.status",
    "icmp.checksum.status",
    "icmpv6.checksum.status",
)
PREFERENCES = ("ip.check_checksum", "tcp.check_checksum", "udp.check_checksum", "ip.defragment", "ipv6.defragment")
GOOD, BAD = "1", "0"


def checksums(path, packets: list[bytes]) -> list[list[str]]:
    """The status of every checksum in each packet, as tshark sees it; it is to put fragments together."""
    with PcapWriter(str(path), linktype=101) as writer:
        for packet in packets:
            writer.write(packet)
    options = [part for name in PREFERENCES for part in ("-o", f"{name}:TRUE")]
    fields = [part for name in STATUS for part in ("-e", name)]
    command = ["tshark", "-n", "-r", path, *options, "-T", "fields", "-E", "separator=|", *fields]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[one for field in line.split("|") for one in field.split(",") if one] for line in done.stdout.splitlines()]


@needs_tshark
def test_an_authentication_header_is_stepped_over(tmp_path):
    assert checksums(tmp_path / "out.pcap", [authenticated(), rewritten(authenticated())]) == [[GOOD], [GOOD]]


@needs_tshark
def test_what_was_valid_is_valid_and_what_was_not_is_not(tmp_path):
    before = [bytes(packet) for packet in PACKETS.values()]
    broken = []
    for packet in before:
        wrong = bytearray(packet)
        wrong[-1] ^= 0x5A
        broken.append(bytes(wrong))
    by = rewriter()
    packets = [rewritten(packet, by) for packet in before + broken]
    told = checksums(tmp_path / "before.pcap", before + broken)
    assert checksums(tmp_path / "after.pcap", packets) == told
    valid = dict(zip(PACKETS, told, strict=False))
    assert not any(BAD in one for one in valid.values())
    assert valid["TCP"] == valid["UDP"] == valid["options"] == valid["source route"] == [GOOD, GOOD]
    assert valid["source route behind others"] == [GOOD, GOOD]
    assert valid["TCP over IPv6"] == valid["ICMPv6"] == valid["extension headers"] == valid["routing header"] == [GOOD]
    assert (
        sum(BAD in one for one in told[len(before) :]) == len(before) - 2
    )  # neither GRE nor UDP without a checksum has any over its data


@needs_tshark
@pytest.mark.parametrize("version", [4, 6])
def test_fragments_are_put_together_to_a_valid_datagram(version, tmp_path):
    from scapy.layers.inet import fragment
    from scapy.layers.inet6 import fragment6

    payload = Raw(random.Random(3).randbytes(2999))
    if version == 4:
        parts = fragment(IP(**V4, id=7) / UDP(sport=5, dport=6) / payload, 800)
    else:
        parts = fragment6(IPv6(**V6) / IPv6ExtHdrFragment(id=7) / UDP(sport=5, dport=6) / payload, 800)
    assert len(parts) > 3
    by = rewriter()
    packets = [rewritten(bytes(part), by) for part in parts]
    assert len({addresses(packet) for packet in packets}) == 1
    whole = checksums(tmp_path / "out.pcap", packets)[-1]
    assert whole == [GOOD] * (2 if version == 4 else 1)
    for part, packet in list(zip(parts, packets, strict=True))[1:]:
        header = 20 if version == 4 else 40
        assert bytes(part)[header:] == packet[header:]  # the checksum went with the first


CHECKSUM_AT = {
    "TCP": 36, "UDP": 26, "options": 48, "source route": 38, "source route behind others": 46, "broadcast": 26,
    "TCP over IPv6": 56, "UDP over IPv6": 46, "ICMPv6": 42, "ICMPv6 error": 42, "extension headers": 72,
    "routing header": 70, "routing header, arrived": 70, "atomic fragment": 54, "authentication header": 70,
}  # fmt: skip
"""Where the transport checksum of each packet is; the others have none that covers addresses."""


@pytest.mark.parametrize("name", [*PACKETS, "authentication header"])
def test_nothing_but_addresses_and_checksums_changes(name):
    """A sum alone does not show where it was changed: it is as right if the difference went into the data."""
    before = bytes(PACKETS[name]) if name in PACKETS else authenticated()
    after = rewritten(before)
    assert len(after) == len(before)
    version = before[0] >> 4
    changed = {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    changed -= {*range(10, 20)} if version == 4 else {*range(8, 40)}
    checksum = CHECKSUM_AT.get(name)
    assert changed <= ({checksum, checksum + 1} if checksum else set())
    assert changed or not checksum
    source, destination = addresses(after)
    assert source in OWN[version == 6]
    assert any(destination in peer for peer in PEERS if peer.version == version)


# --- sums in full


def transport(version: int, protocol: int, checksum: int, source: int, destination: int, payload: bytes) -> bytes:
    """A packet whose transport checksum is what is given, right or wrong."""
    field = {6: 16, 17: 6, 33: 6, 136: 6, 58: 2}[protocol]
    body = bytearray(20) + payload
    body[field : field + 2] = checksum.to_bytes(2, "big")
    if version == 4:
        header = (
            bytearray.fromhex("4500 0000 0001 0000 4000 0000") + source.to_bytes(4, "big") + destination.to_bytes(4, "big")
        )
        header[2:4] = (20 + len(body)).to_bytes(2, "big")
        header[9] = protocol
        header[10:12] = internet_checksum(bytes(header)).to_bytes(2, "big")
    else:
        header = bytearray.fromhex("6000 0000 0000 0040") + source.to_bytes(16, "big") + destination.to_bytes(16, "big")
        header[4:6] = len(body).to_bytes(2, "big")
        header[6] = protocol
    return bytes(header + body)


def remainder(packet: bytes) -> int:
    """What a receiver finds when it sums pseudo-header and transport: 0 if the checksum is right."""
    source, destination = addresses(packet)
    start, protocol = (20, packet[9]) if packet[0] >> 4 == 4 else (40, packet[6])
    body = packet[start:]
    return internet_checksum(pseudo_header(str(source), str(destination), protocol, len(body)) + body) % 0xFFFF


@given(
    version=st.sampled_from([4, 6]),
    protocol=st.sampled_from([6, 17, 33, 136, 58]),
    checksum=st.one_of(st.sampled_from([0, 1, 0xFFFE, 0xFFFF]), st.integers(0, 0xFFFF)),
    data=st.data(),
    payload=st.binary(max_size=30),
)
def test_the_remainder_of_a_checksum_stays_what_it_was(version, protocol, checksum, data, payload):
    address = st.integers(0, (1 << (32 if version == 4 else 128)) - 1)
    before = transport(version, protocol, checksum, data.draw(address), data.draw(address), payload)
    after = rewritten(before)
    if version == 4:
        assert internet_checksum(after[:20]) == 0
    if version == 4 and protocol == 58:
        assert after[20:] == before[20:]  # not what ICMPv6 means by a checksum
    elif protocol in {17, 136} and checksum == 0:
        assert after[-len(payload) - 20 :] == before[-len(payload) - 20 :]
    else:
        assert remainder(after) == remainder(before)


def test_a_udp_checksum_that_becomes_0_is_sent_as_all_ones():
    by = rewriter()
    seen = set()
    for checksum in range(1, 0x10000):
        packet = rewritten(transport(4, 17, checksum, 0x0A000001, 0x0A000002, b""), by)
        seen.add(packet[26:28])
    assert b"\0\0" not in seen
    assert b"\xff\xff" in seen


# --- where addresses go


def flow_of(packet: bytes) -> tuple:
    return (*addresses(packet), packet[9], packet[20:24])


def udp_flow(source: int, destination: int, ports: bytes) -> bytes:
    packet = bytearray(transport(4, 17, 0, source, destination, b""))
    packet[20:24] = ports
    return bytes(packet)


@pytest.mark.parametrize("length", [16, 20, 24])
def test_flows_stay_apart(length):
    """As a capture has them: some clients in a /24, many servers anywhere, ephemeral ports."""
    rng = random.Random(length)
    clients = [int(IPv4Address("192.168.7.0")) + host for host in rng.sample(range(1, 255), 60)]
    servers = [rng.getrandbits(32) for _ in range(800)]
    flows = set()
    while len(flows) < 4000:
        ports = rng.randint(32768, 60999).to_bytes(2, "big") + rng.choice([53, 80, 443]).to_bytes(2, "big")
        flows.add((rng.choice(clients), rng.choice(servers), ports))
    own = [ip_network(f"10.9.0.0/{length}")]
    peers = [ip_network(f"10.{10 + i}.0.0/{length}") for i in range(3)]
    by = rewriter(own, peers)
    assert len({flow_of(rewritten(udp_flow(*flow), by)) for flow in flows}) == len(flows)


def test_flows_that_differ_in_their_addresses_alone_stay_apart_too():
    sources = [int(IPv4Address("192.168.7.0")) + i for i in range(1, 61)]
    destinations = [int(IPv4Address("172.16.8.0")) + i for i in range(1, 61)]
    by = rewriter()
    pairs = list(itertools.product(sources, destinations))
    assert len({flow_of(rewritten(udp_flow(*pair, b"abcd"), by)) for pair in pairs}) == len(pairs)


def test_unrelated_addresses_meet_as_often_as_is_told():
    rng = random.Random(5)
    by = rewriter(seed=5)
    flows = {(rng.getrandbits(32), rng.getrandbits(32)) for _ in range(20000)}
    met = len(flows) - len({flow_of(rewritten(udp_flow(*flow, b"abcd"), by)) for flow in flows})
    expected = len(flows) ** 2 / 2 / (2 * 254**2)
    assert met == pytest.approx(expected, rel=0.15)


def test_hosts_of_a_subnet_stay_apart_and_are_hosts():
    by = rewriter([ip_network("10.9.1.0/24")], [ip_network("10.9.2.0/24")])
    network = int(IPv4Address("203.0.113.0"))
    packets = [rewritten(udp_flow(network + i, network + i, b"abcd"), by) for i in range(1, 255)]
    hosts = {4: set(ip_network("10.9.1.0/24").hosts()), 5: set(ip_network("10.9.2.0/24").hosts())}
    assert {addresses(packet)[0] for packet in packets} == hosts[4]
    assert {addresses(packet)[1] for packet in packets} == hosts[5]
    for i in (0, 255):
        source, destination = addresses(rewritten(udp_flow(network + i, network + i, b"abcd"), by))
        assert source in hosts[4]
        assert destination in hosts[5]


def test_what_is_an_edge_only_in_the_new_subnet_is_a_host_as_any_other():
    """In a /16, 172.16.3.0 and 172.16.3.255 are hosts; they must not always meet the same neighbour."""
    by = rewriter([ip_network("10.9.1.0/24")], [ip_network("10.9.2.0/24")])

    def host(third, last):
        return addresses(rewritten(udp_flow(0xAC100000 + 256 * third + last, 1, b"abcd"), by))[0]

    for edge in (0, 255):
        for inner in (1, 254):
            assert sum(host(third, edge) == host(third, inner) for third in range(100)) <= 4


@pytest.mark.parametrize("length", [30, 31, 32])
def test_the_smallest_subnets_do(length):
    by = rewriter([ip_network(f"10.9.1.4/{length}")], [ip_network(f"10.9.2.4/{length}")])
    found = {addresses(rewritten(udp_flow(i, i, b"abcd"), by)) for i in range(600)}
    assert {one for one, _ in found} == set(ip_network(f"10.9.1.4/{length}").hosts())
    assert {one for _, one in found} == set(ip_network(f"10.9.2.4/{length}").hosts())


def test_peers_get_equal_shares():
    peers = [ip_network(f"10.{i}.0.0/24") for i in range(10)]
    by = rewriter([ip_network("10.99.0.0/24")], peers)
    counts = [0] * 10
    for i in range(5000):
        counts[addresses(rewritten(udp_flow(1, 0xC0A80000 + i, b"abcd"), by))[1].packed[1]] += 1
    assert min(counts) > 400
    assert max(counts) < 600


def test_an_address_is_the_same_host_throughout_the_capture(monkeypatch):
    monkeypatch.setattr(rewrite, "_PAIRS", 5)
    rng = random.Random(6)
    by, again = rewriter(), rewriter()
    hosts = [rng.getrandbits(32) for _ in range(20)]
    seen = {}
    for _ in range(2000):
        source, destination = rng.choice(hosts), rng.choice(hosts)
        packet = rewritten(udp_flow(source, destination, b"abcd"), by)
        assert packet == rewritten(udp_flow(source, destination, b"abcd"), again)
        for role, old, new in zip("sd", (source, destination), addresses(packet), strict=True):
            assert seen.setdefault((role, old), new) == new
        assert len(by._pairs) <= 5


def test_the_seed_decides():
    packets = {rewritten(udp_flow(1, 2, b"abcd"), rewriter(seed=seed)) for seed in (-1, 0, 1, 2, 1 << 200)}
    assert len(packets) == 5


def test_the_mapping_is_the_same_in_every_version_of_the_program():
    """Or a baseline of last year would have replayed other flows."""
    packet = rewritten(udp_flow(0xC0A80714, 0x5DB8D822, b"abcd"), rewriter(seed=1))
    assert addresses(packet) == (ip_address("10.9.1.216"), ip_address("10.9.2.9"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("broadcast", {"dst": "255.255.255.255"}), ("TCP over IPv6", {"dst": "ff02::fb"}), ("UDP", {"dst": "224.0.0.251"})],
)
@pytest.mark.parametrize("keep", [True, False])
def test_multicast_is_kept_if_wanted(name, changes, keep):
    packet = PACKETS[name].copy()
    packet.dst = changes["dst"]
    source, destination = addresses(rewritten(bytes(packet), rewriter(keep_multicast=keep)))
    assert (destination == ip_address(changes["dst"])) is keep
    assert source in OWN[source.version == 6]


def test_a_family_that_the_overlay_lacks_is_not_touched():
    by = rewriter(OWN[:1], PEERS[:2])
    assert by.versions == {4}
    packet = bytes(PACKETS["TCP over IPv6"])
    assert rewritten(packet, by) == packet
    assert rewritten(bytes(PACKETS["TCP"]), by) != bytes(PACKETS["TCP"])


@pytest.mark.parametrize(("own", "peers"), [(OWN, PEERS[:2]), (OWN[:1], PEERS), ([], PEERS)])
def test_senders_without_receivers_are_refused(own, peers):
    with pytest.raises(ValueError, match="families"):
        rewriter(own, peers)


def test_a_header_that_is_shorter_than_a_header_is_not_touched():
    packet = b"\x44" + bytes(PACKETS["TCP"])[1:]
    assert rewritten(packet) == packet


# --- whatever there is


@given(
    head=st.sampled_from([b"", b"\x45", b"\x46", b"\x4f", b"\x40", b"\x60", b"\x6f"]),
    rest=st.one_of(st.binary(max_size=90), st.binary(min_size=40, max_size=120)),
    extension=st.sampled_from([None, 0, 6, 17, 43, 44, 51, 58, 60]),
    at=st.integers(0, 5),
    view=st.booleans(),
)
def test_anything_at_all_is_survived_and_nothing_around_it_is_touched(head, rest, extension, at, view):
    packet = bytearray(head + rest)
    if extension is not None and len(packet) > 9:
        packet[6] = packet[9] = extension
    buffer = bytearray(b"\xa5" * at + packet + b"\xa5" * 64)
    rewriter().rewrite(memoryview(buffer) if view else buffer, at, len(packet))
    assert len(buffer) == at + len(packet) + 64
    assert buffer[:at] == b"\xa5" * at
    assert buffer[at + len(packet) :] == b"\xa5" * 64
    if not packet or packet[0] >> 4 not in {4, 6} or len(packet) < 20:
        assert buffer[at : at + len(packet)] == packet


@pytest.mark.parametrize("name", PACKETS)
def test_a_packet_cut_off_anywhere_is_safe(name):
    whole = bytes(PACKETS[name])
    full = rewritten(whole)
    for length in range(len(whole)):
        buffer = bytearray(whole)
        rewriter().rewrite(buffer, 0, length)
        assert buffer[length:] == whole[length:]
        if length >= (20 if whole[0] >> 4 == 4 else 40):
            assert addresses(bytes(buffer)) == addresses(full)
