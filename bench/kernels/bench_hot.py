"""What one call of each hot function costs; run by ``./dev bench kernels``, compiled and with PYFLANNEL_DP_PURE=1.

Batches hold 64 packets, so a time divided by 64 is the time of a packet. Lookup cost is to be the same with 10, 1 000 and
100 000 leases: the destinations are random, so that larger tables pay for their cache misses here, too.
"""

import random
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

import pytest

from dataplane.batch import HEADROOM, Batch
from dataplane.inbound import coalesce, decapsulate, unpack
from dataplane.outbound import Outbound, judge_batch
from encap.coalesce import Coalescer
from encap.segment import segment
from routing.lease import derive_vtep_mac
from routing.route import Route
from routing.table import Identity, Table, build

PACKETS = 64
FIRST_SUBNET = int(IPv4Address("10.0.0.0"))
FIRST_HOST = int(IPv4Address("172.16.0.0"))


def table_with(leases: int, framing: str) -> Table:
    routes = []
    for number in range(leases):
        host = ip_address(FIRST_HOST + number)
        subnet = IPv4Network((FIRST_SUBNET + (number << 7), 25))
        routes.append(Route(subnet, host, derive_vtep_mac(host), (host,)))
    identity = Identity(framing, IPv4Network("11.0.0.0/24"), None, 8472, vtep_mac=derive_vtep_mac(ip_address("192.0.2.1")))
    return build(identity, routes)


def packet(source: int, destination: int, length: int) -> bytes:
    """An IPv4 UDP packet of `length` bytes; its checksums are of no interest here."""
    header = bytes([0x45, 0]) + length.to_bytes(2, "big") + bytes([0, 0, 0, 0, 64, 17, 0, 0])
    addresses = source.to_bytes(4, "big") + destination.to_bytes(4, "big")
    return (header + addresses + bytes([3, 232, 7, 208]) + (length - 20).to_bytes(2, "big")).ljust(length, b"\0")


def tcp_packet(length: int) -> bytes:
    """An IPv4 TCP packet with timestamps, `length` bytes long, ACK set."""
    ip = bytes([0x45, 0]) + length.to_bytes(2, "big") + bytes([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 5, 11, 0, 0, 5])
    tcp = bytes([3, 232, 7, 208, *bytes(8), 0x80, 0x10, 1, 0, 0, 0, 0, 0, 1, 1, 8, 10, *bytes(8)])
    return (ip + tcp).ljust(length, b"x")


@pytest.fixture(scope="module", params=[10, 1_000, 100_000], ids=lambda n: f"{n}-leases")
def leases(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def table(leases: int) -> Table:
    return table_with(leases, "vxlan")


def test_lookup_of_64(benchmark: Any, table: Table, leases: int) -> None:
    rng = random.Random(7)
    addresses = [FIRST_SUBNET + (rng.randrange(leases) << 7) + 5 for _ in range(PACKETS)]
    find = table.find4

    def look_up() -> None:
        for address in addresses:
            find(address)

    benchmark(look_up)


def test_encapsulate_64(benchmark: Any, table: Table, leases: int) -> None:
    rng = random.Random(7)
    own = int(IPv4Address("11.0.0.5"))
    batch = Batch(PACKETS)
    for _ in range(PACKETS):
        batch.put(packet(own, FIRST_SUBNET + (rng.randrange(leases) << 7) + 5, 64))
    layout = Outbound()

    def encapsulate() -> int:
        forwarded = judge_batch(batch, table)
        layout.start(8, 64)
        layout.lay_out(batch, table)
        return forwarded

    assert benchmark(encapsulate) == PACKETS


def test_decapsulate_64(benchmark: Any, leases: int) -> None:
    rng = random.Random(7)
    identity = Identity("vxlan", IPv4Network("11.0.0.0/24"), None, 8472, vtep_mac=b"\2\0\0\0\0\1")
    here = build(identity, table_with(leases, "vxlan").routes)
    batch = Batch(PACKETS)
    pieces = Batch(PACKETS, batch.data)
    for _ in range(PACKETS):
        peer = rng.randrange(leases)
        inner = packet(FIRST_SUBNET + (peer << 7) + 5, int(IPv4Address("11.0.0.5")), 64)
        vxlan = bytes.fromhex("0800000000000100") + b"\2\0\0\0\0\1" + bytes(6) + b"\x08\0"
        batch.put(vxlan + inner, here.vtep[peer])

    def decapsulate_all() -> int:
        unpack(batch, pieces, here, 0)
        return decapsulate(pieces, here)

    assert benchmark(decapsulate_all) == PACKETS


def test_segment_of_61000(benchmark: Any) -> None:
    """A TCP superpacket cut into 44 packets of 1450 bytes."""
    superpacket = tcp_packet(52 + 44 * 1398)
    target = bytearray(2048)

    def cut() -> None:
        for index in range(44):
            segment(superpacket, 0, len(superpacket), 52, 20, 1398, index, target, 0)

    benchmark(cut)


def test_coalesce_of_44(benchmark: Any) -> None:
    """What arrives of that superpacket, merged again."""
    superpacket = tcp_packet(52 + 44 * 1398)
    batch = Batch(44)
    pieces = Batch(44, batch.data)
    buffer = bytearray(44 * 1450)
    for index in range(44):
        segment(superpacket, 0, len(superpacket), 52, 20, 1398, index, buffer, index * 1450)
    coalescer = Coalescer()

    def filled() -> tuple[tuple[Batch, Coalescer, int], dict[str, Any]]:
        batch.clear()
        batch.slots[0][: len(buffer)] = buffer
        pieces.count = 44
        for index in range(44):
            pieces.offset[index], pieces.length[index] = HEADROOM + index * 1450, 1450
            pieces.verdict[index], pieces.head[index], pieces.last[index] = 1, index, HEADROOM + 65535
        return (pieces, coalescer, 1450), {}

    assert benchmark.pedantic(coalesce, setup=filled, rounds=1000) == 43


def test_build_of_a_table(benchmark: Any, table: Table) -> None:
    benchmark.pedantic(build, args=(table.identity, table.routes), rounds=3)
