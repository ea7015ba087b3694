"""The lookup table against the slow twin, and its columns row by row."""

import random
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from encap import vxlan
from routing.route import Route
from routing.table import NO_ROW, Identity, Table, build

OWN_MAC, OWN_MAC6 = b"\2\0\0\0\0\1", b"\6\0\0\0\0\1"
LOW = 2**64 - 1


def identity(**keys) -> Identity:
    values = {
        "framing": "vxlan",
        "subnet": IPv4Network("10.5.1.0/24"),
        "ipv6_subnet": IPv6Network("fc00:0:0:1::/64"),
        "port": 8472,
        "vni": 1,
        "vtep_mac": OWN_MAC,
        "vtep_mac_v6": OWN_MAC6,
    }
    return Identity(**values | keys)


def route(subnet, number: int = 2, *, public=None, via=None) -> Route:
    """A route to `subnet` over the host 192.0.2.`number`, or to `public` hosts, of which `via` (or the first) is used."""
    hosts = tuple(ip_address(one) for one in public or [f"192.0.2.{number}"])
    network = ip_network(subnet) if isinstance(subnet, str) else subnet
    return Route(network, ip_address(via) if via else hosts[0], bytes([2, 0, 0, 0, 1, number]), hosts)


def find(table: Table, address) -> int:
    number = int(address)
    return table.find4(number) if address.version == 4 else table.find6(number >> 64, number & LOW)


def prefixes(kind, bits, bases):
    """Networks of all lengths, most of them overlapping since they grow around a few addresses."""
    return st.builds(
        lambda base, length, noise, noisy: kind(
            (((base ^ (noise if noisy else 0)) >> (bits - length)) << (bits - length), length)
        ),
        st.sampled_from(bases),
        st.integers(0, bits),
        st.integers(0, bits - 1).map(lambda bit: 1 << bit),
        st.booleans(),
    )


BASES4 = [0x0A050203, 0x0A05FF00, 0, 0xFFFFFFFF]
BASES6 = [0xFC000000000000010000000000000001, 0xFC00000000000001FFFFFFFFFFFFFFFF, 0, 2**128 - 1]
NETWORKS = st.lists(
    prefixes(IPv4Network, 32, BASES4) | prefixes(IPv6Network, 128, BASES6),
    max_size=24,
).map(lambda found: found + found[::5])  # duplicates


def probes(networks, noise):
    """Addresses at, beside and inside the edges of networks, and others."""
    for network in networks:
        first, last = int(network.network_address), int(network.broadcast_address)
        top = int(network.broadcast_address.__class__(2**network.max_prefixlen - 1))
        kind = network.network_address.__class__
        inside = first + noise % network.num_addresses
        yield from (kind(number) for number in (first, last, inside, max(first - 1, 0), min(last + 1, top)))
    yield from (IPv4Address(noise % 2**32), IPv6Address(noise))
    yield from (IPv4Address(base) for base in BASES4)
    yield from (IPv6Address(base) for base in BASES6)


@settings(max_examples=150)
@given(NETWORKS, st.integers(0, 2**128 - 1))
def test_the_longest_prefix_counts_and_of_equal_ones_the_later(networks, noise):
    routes = [route(network, number) for number, network in enumerate(networks)]
    table = build(identity(), routes)
    assert len({one.subnet for one in table.routes}) == len(table.routes) == len(set(networks))
    for address in probes(networks, noise):
        # the twin prefers the earlier of equal networks, so it gets them from the back
        index = reference.longest_match(networks[::-1], address)
        row = find(table, address)
        if index < 0:
            assert row == NO_ROW
            assert table.route_to(address) is None
        else:
            assert table.routes[row] is table.route_to(address) is routes[len(routes) - 1 - index]


def test_of_two_routes_for_one_subnet_the_later_counts():
    table = build(identity(), [route("10.5.2.0/24", 2), route("10.5.3.0/24", 3), route("10.5.2.0/24", 4)])
    assert len(table.routes) == 2
    assert table.route_to(IPv4Address("10.5.2.9")) == route("10.5.2.0/24", 4)
    assert "192.0.2.2" not in table.origins


def test_a_default_route_and_holes_in_it():
    table = build(identity(), [route("0.0.0.0/0", 2), route("10.5.2.0/24", 3), route("10.5.2.7/32", 4)])
    found = [table.route_to(IPv4Address(text)).address for text in ("10.5.2.7", "10.5.2.8", "10.5.3.8", "255.255.255.255")]
    assert [str(address) for address in found] == ["192.0.2.4", "192.0.2.3", "192.0.2.2", "192.0.2.2"]


def test_families_do_not_see_each_other():
    table = build(identity(), [route("0.0.0.0/0", 2)])
    assert table.find6(0, 0) == NO_ROW
    table = build(identity(), [route("::/0", 2)])
    assert table.find4(0) == NO_ROW
    assert table.find6(LOW, LOW) == 0


@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_an_empty_table(framing):
    table = build(identity(framing=framing), [])
    assert table.routes == ()
    assert table.origins == {}
    assert table.endpoints == []
    for number in (0, 1, 0x0A050203, 2**32 - 1):
        assert table.find4(number) == NO_ROW
        assert table.find6(number, number) == NO_ROW
    assert table.route_to(IPv4Address("10.5.2.1")) is None
    assert table.route_to(IPv6Address("fc00::1")) is None
    assert table.is_own4(0x0A050101)


@given(
    st.none() | prefixes(IPv4Network, 32, BASES4),
    st.none() | prefixes(IPv6Network, 128, BASES6),
    st.integers(0, 2**128 - 1),
)
def test_own_addresses(subnet, ipv6_subnet, noise):
    table = build(identity(subnet=subnet, ipv6_subnet=ipv6_subnet), [])
    for address in probes([network for network in (subnet, ipv6_subnet) if network], noise):
        if address.version == 4:
            assert bool(table.is_own4(int(address))) is (subnet is not None and address in subnet)
        else:
            own = table.is_own6(int(address) >> 64, int(address) & LOW)
            assert bool(own) is (ipv6_subnet is not None and address in ipv6_subnet)


@pytest.mark.parametrize(
    ("network", "broadcast"), [(None, 0xFFFFFFFF), ("10.5.0.0/16", 0x0A05FFFF), ("10.0.0.0/8", 0x0AFFFFFF)]
)
def test_the_broadcast_address_of_the_overlay(network, broadcast):
    table = build(identity(network=IPv4Network(network) if network else None), [])
    assert table.broadcast4 == broadcast


def test_what_the_loops_read_of_the_identity():
    table = build(identity(vni=77, check_sources=False), [])
    assert table.identity == identity(vni=77, check_sources=False)
    assert (table.is_vxlan, table.header_length, table.vni, table.check_sources) == (True, 22, 77, False)
    assert (table.mac_a, table.mac_b) == (0x020000000001, 0x060000000001)
    plain = build(identity(framing="ip", vtep_mac=None, vtep_mac_v6=None), [])
    assert (plain.is_vxlan, plain.header_length, plain.check_sources) == (False, 0, True)
    assert plain.mac_a >= 2**48, "a MAC that no frame carries"
    assert plain.mac_b >= 2**48


# columns


ROUTES = [
    route("10.5.2.0/24", 2),
    route("fc00:0:0:2::/64", 2),
    route("10.5.3.0/24", 3, public=["192.0.2.3", "2001:db8::3"]),
    route("fc00:0:0:3::/64", 3, public=["192.0.2.3", "2001:db8::3"], via="2001:db8::3"),
    route("fc00:0:0:4::/64", 4, public=["2001:db8::4"]),
    route("10.5.4.0/24", 4, public=["2001:db8::4"]),
]


def test_endpoints_are_socket_addresses():
    table = build(identity(port=4789), ROUTES)
    assert table.endpoints == [
        ("192.0.2.2", 4789),
        ("192.0.2.2", 4789),
        ("192.0.2.3", 4789),
        ("2001:db8::3", 4789, 0, 0),
        ("2001:db8::4", 4789, 0, 0),
        ("2001:db8::4", 4789, 0, 0),
    ]


@pytest.mark.parametrize(
    ("mac", "mac6", "over4", "over6"),
    [
        (OWN_MAC, OWN_MAC6, OWN_MAC, OWN_MAC6),
        (OWN_MAC, None, OWN_MAC, OWN_MAC),
        (None, OWN_MAC6, OWN_MAC6, OWN_MAC6),
    ],
)
@pytest.mark.parametrize("vni", [0, 1, 2**24 - 1])
def test_headers_row_by_row(mac, mac6, over4, over6, vni):
    table = build(identity(vni=vni, vtep_mac=mac, vtep_mac_v6=mac6), ROUTES)
    headers = bytes(table.headers)
    assert len(headers) == 22 * len(ROUTES)
    for row, one in enumerate(table.routes):
        ethertype = 0x0800 if one.subnet.version == 4 else 0x86DD
        source = over4 if one.address.version == 4 else over6
        assert headers[22 * row : 22 * row + 22] == vxlan.header(vni, one.mac, source, ethertype)


def test_one_header_in_bytes():
    table = build(identity(vni=0xABCDEF), [route("10.5.2.0/24", 7)])
    assert bytes(table.headers).hex() == "08000000" + "abcdef00" + "020000000107" + "020000000001" + "0800"


def test_the_ip_framing_has_no_headers():
    table = build(identity(framing="ip", vtep_mac=None, vtep_mac_v6=None), ROUTES)
    assert table.header_length == 0
    assert [table.find4(int(IPv4Address(f"10.5.{n}.1"))) for n in (2, 3, 4)] == [0, 2, 5]


@pytest.mark.parametrize("keys", [{"vni": 2**24}, {"vni": -1}, {"vtep_mac": b"\2", "vtep_mac_v6": None}])
def test_an_identity_that_cannot_be_written_is_refused(keys):
    with pytest.raises(ValueError, match=r"VNI|MAC"):
        build(identity(**keys), ROUTES)


# origins


def test_all_addresses_of_a_host_share_a_number_and_no_two_hosts_do():
    table = build(identity(), ROUTES)
    assert set(table.origins) == {"192.0.2.2", "192.0.2.3", "2001:db8::3", "2001:db8::4"}
    assert table.origins["192.0.2.3"] == table.origins["2001:db8::3"]
    assert len(set(table.origins.values())) == 3
    assert [table.vtep[row] for row in range(len(ROUTES))] == [table.origins[str(one.address)] for one in ROUTES]
    assert table.vtep[0] == table.vtep[1]


def test_hosts_that_a_later_route_joins_share_a_number():
    a, b = "192.0.2.2", "2001:db8::2"
    routes = [
        route("10.5.2.0/24", 2, public=[a]),
        route("fc00:0:0:2::/64", 2, public=[b]),
        route("10.5.3.0/24", 2, public=[a, b]),
    ]
    table = build(identity(), routes)
    assert table.origins[a] == table.origins[b]


HOSTS = ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8::4"]


@given(st.lists(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=2, unique=True), max_size=8))
def test_origins_are_the_hosts_that_routes_join(publics):
    table = build(identity(), [route(f"10.5.{n}.0/24", n, public=public) for n, public in enumerate(publics)])
    joined: list[set[str]] = []
    for public in publics:
        touched = [group for group in joined if group & set(public)]
        joined = [group for group in joined if group not in touched] + [set(public).union(*touched)]
    by_number: dict[int, set[str]] = {}
    for host, number in table.origins.items():
        by_number.setdefault(number, set()).add(host)
    assert sorted(map(sorted, by_number.values())) == sorted(map(sorted, joined))
    assert [table.vtep[row] for row in range(len(publics))] == [table.origins[public[0]] for public in publics]
    assert all(number >= 0 for number in by_number), "UNKNOWN_VTEP is -1"


# size


COUNT = 100_000


def test_100_000_leases():
    """All /25 of 10.0.0.0/8 in order, spread over 250 hosts."""
    hosts = [IPv4Address(f"192.0.2.{n}") for n in range(250)]
    routes = [
        Route(IPv4Network((0x0A000000 + (n << 7), 25)), host := hosts[n % 250], b"\2\0\0\0\0\2", (host,))
        for n in range(COUNT)
    ]
    table = build(identity(), routes)
    rng = random.Random(1)
    for _ in range(2000):
        row = rng.randrange(COUNT)
        address = 0x0A000000 + (row << 7) + rng.randrange(128)
        assert table.find4(address) == row
        assert table.endpoints[row] == (f"192.0.2.{row % 250}", 8472)
    for _ in range(2000):
        address = rng.randrange(2**32)
        row = (address - 0x0A000000) >> 7
        assert table.find4(address) == (row if 0 <= row < COUNT else NO_ROW)
    assert len(set(table.origins.values())) == 250
    assert table.vtep[COUNT - 1] == table.origins["192.0.2.249"]


def test_10_000_leases_of_ipv6():
    host = IPv6Address("2001:db8::2")
    base = 0xFC00 << 112
    routes = [Route(IPv6Network((base + (n << 64), 64)), host, b"\2\0\0\0\0\2", (host,)) for n in range(10_000)]
    table = build(identity(), routes)
    rng = random.Random(1)
    for _ in range(2000):
        row = rng.randrange(10_000)
        assert table.find6((base >> 64) + row, rng.randrange(2**64)) == row
        assert table.find6((base >> 64) + 10_000 + row, rng.randrange(2**64)) == NO_ROW


# A table seen by another node


@given(NETWORKS, st.data())
def test_what_another_node_sees_is_what_its_own_table_would_be_without_its_subnets(networks, data):
    unique = list(dict.fromkeys(networks))
    own4 = data.draw(st.sampled_from([None, *(net for net in unique if net.version == 4)]))
    own6 = data.draw(st.sampled_from([None, *(net for net in unique if net.version == 6)]))
    over = data.draw(st.sampled_from(["192.0.2.{}", "2001:db8::{}"]))
    routes = [route(net, 2 + i % 200, public=[over.format(2 + i)]) for i, net in enumerate(unique)]
    other = identity(subnet=own4, ipv6_subnet=own6, vtep_mac=b"\2\0\0\0\0\7", vtep_mac_v6=b"\6\0\0\0\0\7")
    seen = build(identity(), routes).seen_by(other)
    own = build(other, [one for one in routes if one.subnet not in (own4, own6)])
    for net in unique:
        for address in (net.network_address, net.broadcast_address):
            mine, its = find(own, address), find(seen, address)
            if mine == NO_ROW:
                assert its == NO_ROW
                continue
            assert seen.routes[its] == own.routes[mine]
            assert seen.endpoints[its] == own.endpoints[mine]
            length = seen.header_length
            assert bytes(seen.headers[its * length :][:length]) == bytes(own.headers[mine * length :][:length])
    for one in routes:
        assert seen.vtep[seen.routes.index(one)] == seen.origins[str(one.public[0])]
    assert (seen.own4, seen.mac_a, seen.identity) == (own.own4, own.mac_a, other)


def test_the_table_that_is_looked_at_stays_as_it_is():
    routes = [route("10.5.1.0/24"), route("10.5.2.0/24", 3), route("fc00:0:0:2::/64", 3, public=["2001:db8::3"])]
    base = build(identity(subnet=None, ipv6_subnet=None), routes)
    headers = bytes(base.headers)
    seen = base.seen_by(identity(vtep_mac=b"\2\7\7\7\7\7"))
    assert bytes(base.headers) == headers
    assert base.route_to(IPv4Address("10.5.1.7")) is not None
    assert seen.route_to(IPv4Address("10.5.1.7")) is None
    assert bytes(seen.headers)[14:20] == b"\2\7\7\7\7\7"
    assert bytes(seen.headers)[44 + 14 : 44 + 20] == OWN_MAC6


@pytest.mark.parametrize("keys", [{"framing": "ip"}, {"port": 4789}, {"vni": 2}])
def test_a_node_that_could_not_talk_to_the_others_needs_a_table_of_its_own(keys):
    with pytest.raises(ValueError, match="table of its own"):
        build(identity(), [route("10.5.2.0/24")]).seen_by(identity(**keys))


def test_in_the_ip_framing_there_is_no_header_to_change():
    table = build(identity(framing="ip"), [route("10.5.1.0/24"), route("10.5.2.0/24", 3)])
    seen = table.seen_by(identity(framing="ip", vtep_mac=None, vtep_mac_v6=None))
    assert find(seen, IPv4Address("10.5.1.1")) == NO_ROW
    assert find(seen, IPv4Address("10.5.2.1")) == 1


def test_a_vxlan_node_without_a_mac_is_refused():
    with pytest.raises(ValueError, match="VTEP MAC"):
        build(identity(), [route("10.5.2.0/24")]).seen_by(identity(vtep_mac=None, vtep_mac_v6=None))


def subnets_of(numbers) -> list:
    """IPv4 and IPv6 subnets of one length each, which stand close together in the slots for some numbers."""
    return [
        ip_network(f"10.{number >> 4}.{number & 15}.0/24") if number & 1 else ip_network(f"fc00:0:{number:x}::/48")
        for number in numbers
    ]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sets(st.integers(0, 400), max_size=16), st.integers(1, 4)), max_size=8), st.integers(2, 64))
def test_a_changed_table_finds_what_a_built_one_does(steps, half):
    """Subnets come and go, at a half-full table and others, so that slots fill, empty and move up again."""
    routes = {subnet: route(subnet, number % 200 + 1) for number, subnet in enumerate(subnets_of(range(2 * half)))}
    table = build(identity(), routes.values())
    for numbers, host in steps:
        toggled = subnets_of(sorted(numbers))
        gone = [subnet for subnet in toggled if subnet in routes and host > 2]
        new = [route(subnet, host) for subnet in toggled if subnet not in gone]
        before, kept = table, dict(routes)
        table = table.changed([*gone, ip_network("10.99.0.0/24")], new)
        routes = {subnet: one for subnet, one in routes.items() if subnet not in gone} | {one.subnet: one for one in new}
        for one, expected in ((table, routes), (before, kept)):
            assert set(one.routes) == set(expected.values())
            for subnet in {*expected, *toggled}:
                row = one.row_of(subnet)
                assert find(one, subnet.network_address + 1) == row
                assert (one.routes[row] if row >= 0 else None) == expected.get(subnet)
                assert row < 0 or one.vtep[row] == one.origins[one.endpoints[row][0]]
        assert len(table.origins) == len({one.address for one in routes.values()})


def test_few_changes_leave_all_other_rows_where_they_are():
    routes = [route(subnet, number) for number, subnet in enumerate(subnets_of(range(100)), 1)]
    table = build(identity(), routes)
    other = route(routes[4].subnet, 250)
    changed = table.changed([routes[1].subnet, routes[99].subnet, routes[2].subnet], [other])
    assert changed.count == 97
    assert {row for row in range(97) if changed.routes[row] is not routes[row]} == {1, 2, 4}
    assert {changed.routes[1], changed.routes[2], changed.routes[4]} == {routes[97], routes[98], other}
    assert table.changed([], []) is table
    assert table.changed([ip_network("10.99.0.0/24")], []) is table


def test_a_half_full_table_has_room_again_for_what_has_left():
    subnets = [ip_network(f"10.1.{number}.0/24") for number in range(65)]
    full = build(identity(), [route(subnet, number) for number, subnet in enumerate(subnets[:64], 1)])
    table = full.changed(subnets[3:4], []).changed([], [route(subnets[64], 200)])
    assert table.origins["192.0.2.200"] >= 64  # a table that is built anew numbers its VTEPs anew, too
    grown = full.changed([], [route(subnets[64], 200)])
    assert (grown.count, find(grown, subnets[64].network_address)) == (65, 64)


def test_a_table_seen_by_another_node_changes_without_that_ones_subnets():
    routes = [route(subnet, number) for number, subnet in enumerate(subnets_of(range(40)), 1)]
    own = routes[3].subnet
    seen = build(identity(), routes).seen_by(identity(subnet=own))
    changed = seen.changed([routes[5].subnet], [])
    assert set(changed.routes) == set(routes) - {routes[3], routes[5]}
    assert find(changed, own.network_address + 1) == NO_ROW


@pytest.mark.parametrize("subnet", ["10.5.2.0/24", "10.5.0.0/16", "0.0.0.0/0", "fc00::/7", "fc00:0:0:2::/64"])
def test_the_row_of_exactly_a_subnet(subnet):
    networks = ["10.5.0.0/16", "10.5.0.0/24", "10.5.2.0/24", "fc00:0:0:2::/64", "fc00:0:0:2::/80"]
    table = build(identity(), [route(one, number) for number, one in enumerate(networks, 1)])
    assert table.row_of(ip_network(subnet)) == (networks.index(subnet) if subnet in networks else NO_ROW)
