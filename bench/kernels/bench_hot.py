"""What one call of each hot function costs; run by ``./dev bench kernels``, compiled and with PYFLANNEL_DP_PURE=1.

Batches hold 64 packets, so a time divided by 64 is the time of a packet. Lookup cost is to be the same with 10, 1 000 and
100 000 leases: the destinations are random, so that larger tables pay for their cache misses here, too.
"""

import random
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

import pytest

from dataplane.batch import Batch
from dataplane.inbound import decapsulate
from dataplane.outbound import encapsulate
from encap import checksum
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
    packets = [packet(own, FIRST_SUBNET + (rng.randrange(leases) << 7) + 5, 64) for _ in range(PACKETS)]
    batch = Batch(PACKETS)

    def filled() -> tuple[tuple[Batch, Table], dict[str, Any]]:
        batch.clear()
        for one in packets:
            batch.put(one)
        return (batch, table), {}

    assert benchmark.pedantic(encapsulate, setup=filled, rounds=2000) == PACKETS


def test_decapsulate_64(benchmark: Any, leases: int) -> None:
    rng = random.Random(7)
    here = build(
        Identity("vxlan", IPv4Network("11.0.0.0/24"), None, 8472, vtep_mac=b"\2\0\0\0\0\1"),
        table_with(leases, "vxlan").routes,
    )
    frames = []
    for _ in range(PACKETS):
        peer = rng.randrange(leases)
        inner = packet(FIRST_SUBNET + (peer << 7) + 5, int(IPv4Address("11.0.0.5")), 64)
        vxlan = bytes.fromhex("0800000000000100") + b"\2\0\0\0\0\1" + bytes(6) + b"\x08\0"
        frames.append((vxlan + inner, here.vtep[peer]))
    batch = Batch(PACKETS)

    def filled() -> tuple[tuple[Batch, Table, int], dict[str, Any]]:
        batch.clear()
        for frame, vtep in frames:
            batch.put(frame, vtep)
        return (batch, here, 1450), {}

    assert benchmark.pedantic(decapsulate, setup=filled, rounds=2000) == PACKETS


@pytest.mark.parametrize("length", [64, 1500, 65535])
def test_checksum(benchmark: Any, length: int) -> None:
    data = bytes(range(256)) * 256
    benchmark(checksum.internet_checksum, data, 0, length)


def test_build_of_a_table(benchmark: Any, table: Table) -> None:
    benchmark.pedantic(build, args=(table.identity, table.routes), rounds=3)
