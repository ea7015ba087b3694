"""The table that follows changes answers as one that is built anew, and former addresses count for a while."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.lease import Lease, LeaseAttributes, VtepData
from routing.leaseset import Changes, LeaseSet
from routing.planner import Planner
from routing.route import plan
from routing.table import Identity, Table, build

IDENTITY = Identity("vxlan", IPv4Network("10.5.0.0/24"), None, 8472, vtep_mac=b"\2\0\0\0\0\1", vtep_mac_v6=b"\6\0\0\0\0\1")


def lease(number: int, host: int, *, ipv6: int = 0, mac: int = 1, subnets: str = "4", length: int = 24) -> Lease:
    public_ipv6 = IPv6Address(f"2001:db8::{ipv6}") if ipv6 else None
    return Lease(
        IPv4Network(f"10.5.{number}.0/{length}") if "4" in subnets else None,
        IPv6Network(f"fd00:0:0:{number}::/64") if "6" in subnets else None,
        LeaseAttributes(
            IPv4Address(f"192.0.2.{host}") if host else None,
            public_ipv6,
            "vxlan" if mac else "udp",
            VtepData(bytes([2, 0, 0, 0, 0, mac]), 1),
            None,
        ),
    )


def answers(table: Table) -> dict[str, object]:
    """What a table says, without the numbers of rows and VTEPs."""
    size = table.header_length
    rows = {}
    for row, route in enumerate(table.routes):
        header = bytes(table.headers[row * size : (row + 1) * size])
        rows[route.subnet] = (route, table.endpoints[row], header)
        assert table.row_of(route.subnet) == row
        assert table.vtep[row] == table.origins[table.endpoints[row][0]]
    sides: dict[int, set[str]] = {}
    for host, number in table.origins.items():
        sides.setdefault(number, set()).add(host)
    assert len(table.endpoints) == table.count == len(table.routes) == len(rows)
    return {"rows": rows, "vteps": sorted(map(sorted, sides.values())), "count": table.count}


def assert_same_lookups(one: Table, other: Table) -> None:
    for number in range(12):
        for low in (0, 5, 200):
            address = IPv4Address(f"10.5.{number}.{low}")
            assert one.route_to(address) == other.route_to(address)
            address6 = IPv6Address(f"fd00:0:0:{number}::{low}")
            assert one.route_to(address6) == other.route_to(address6)


LEASES = st.builds(
    lease,
    st.integers(1, 9),
    st.integers(0, 6),
    ipv6=st.integers(0, 3),
    mac=st.integers(0, 2),
    subnets=st.sampled_from(["4", "6", "46"]),
    length=st.sampled_from([24, 24, 24, 25]),
)
MANY = [lease(number, number + 90) for number in range(100, 160)]
"""So many that a few changes are few of them."""


@settings(max_examples=200)
@given(st.lists(st.lists(LEASES, max_size=5, unique_by=lambda one: one.key), min_size=1, max_size=6), st.booleans())
def test_a_table_that_follows_changes_is_the_one_that_is_built_anew(snapshots, among_many):
    planner, peers, others = Planner(IDENTITY, {4, 6}, 0.0), LeaseSet("none"), MANY if among_many else []
    for snapshot in [[], *snapshots]:
        before = planner.table
        then = answers(before)
        table = planner.update(peers.replace([*others, *snapshot]), 0.0)
        routes, unreachable = plan(peers.peers, "vxlan", {4, 6})
        anew = build(IDENTITY, routes)
        assert answers(table) == answers(anew)
        assert planner.unreachable == unreachable
        assert_same_lookups(table, anew)
        assert answers(before) == then  # what the hot path may still be reading


def test_small_changes_are_made_to_a_copy_and_keep_the_rows_of_others():
    planner = Planner(IDENTITY, {4})
    first = planner.update(Changes(added=tuple(MANY)), 0.0)
    moved, removed = lease(110, 250), MANY[5]
    second = planner.update(Changes(changed=(moved,), removed=(removed,)), 1.0)
    assert second.count == first.count - 1
    stays = [row for row in range(second.count) if second.routes[row] is first.routes[row]]
    assert len(stays) == first.count - 3  # the changed one, and the last one in the row of the one that is gone
    assert second.route_to(IPv4Address("10.5.110.9")).address == IPv4Address("192.0.2.250")
    assert second.route_to(IPv4Address("10.5.105.9")) is None
    assert planner.update(Changes(), 1.0) is second


def test_a_former_address_is_an_origin_for_a_while():
    planner = Planner(IDENTITY, {4})
    planner.update(Changes(added=(*MANY, lease(1, 1), lease(2, 2))), 0.0)
    old, new, other = "192.0.2.1", "192.0.2.7", "192.0.2.2"
    table = planner.update(Changes(changed=(lease(1, 7),)), 10.0)
    assert table.origins[old] == table.origins[new] != table.origins[other]
    assert table.route_to(IPv4Address("10.5.1.9")).address == IPv4Address(new)
    assert planner.next_update == 15.0
    table = planner.update(Changes(), 15.0)
    assert old not in table.origins
    assert table.origins[new] != table.origins[other]
    assert planner.next_update is None


def test_a_former_address_that_another_peer_takes_is_that_ones():
    planner = Planner(IDENTITY, {4})
    planner.update(Changes(added=(*MANY, lease(1, 1), lease(2, 2))), 0.0)
    planner.update(Changes(changed=(lease(1, 7),)), 10.0)
    table = planner.update(Changes(changed=(lease(2, 1),)), 11.0)
    assert table.origins["192.0.2.1"] == table.origins["192.0.2.2"]  # its own former one
    assert table.origins["192.0.2.1"] != table.origins["192.0.2.7"]


@pytest.mark.parametrize("families", [{4}, {6}, {4, 6}])
def test_a_node_that_becomes_another_keeps_its_peers(families):
    peers = [lease(number, number, ipv6=number % 3, subnets="46") for number in range(1, 9)]
    other = Identity("vxlan", IPv4Network("10.5.77.0/24"), None, 8472, vtep_mac=b"\2\0\0\0\0\7")
    planner = Planner(other, families, 0.0)  # as the node makes one when its own lease is another
    table = planner.update(Changes(added=tuple(peers)), 0.0)
    routes, unreachable = plan(peers, "vxlan", families)
    assert answers(table) == answers(build(other, routes))
    assert planner.unreachable == unreachable
    table = planner.update(Changes(removed=(peers[0],)), 0.0)
    routes, _ = plan(peers[1:], "vxlan", families)
    assert answers(table) == answers(build(other, routes))
