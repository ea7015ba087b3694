"""Peers from the command line: their forms, and the subnets that cannot be."""

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest

from routing.allocator import Subnets
from routing.config import NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac
from routing.route import Route, plan
from routing.stores import StoreError
from routing.stores.static import Peer, StaticStore, parse_peer

MAC = bytes.fromhex("0242ac110002")
SUBNETS = Subnets(IPv4Network("10.244.1.0/24"), IPv6Network("fd00:10:0:1::/64"))
ME = LeaseAttributes(IPv4Address("192.0.2.1"), None, "vxlan")


def config(families="46", backend="vxlan") -> NetworkConfig:
    keys: dict[str, object] = {"EnableIPv4": "4" in families, "EnableIPv6": "6" in families, "Backend": {"Type": backend}}
    return parse_config(json.dumps(keys | {"Network": "10.244.0.0/16", "IPv6Network": "fd00:10::/48"}))


@pytest.mark.parametrize(
    ("text", "subnet", "address", "mac"),
    [
        ("10.244.2.0/24=192.0.2.2", "10.244.2.0/24", "192.0.2.2", "02fdc0000202"),
        ("10.244.2.0/24=192.0.2.2,02:42:ac:11:00:02", "10.244.2.0/24", "192.0.2.2", "0242ac110002"),
        (" 10.244.2.0/24 = 192.0.2.2 , 02:42:AC:11:00:02 ", "10.244.2.0/24", "192.0.2.2", "0242ac110002"),
        ("10.244.2.4/30=192.0.2.2", "10.244.2.4/30", "192.0.2.2", "02fdc0000202"),
        ("fd00:10:0:2::/64=192.0.2.2", "fd00:10:0:2::/64", "192.0.2.2", "02fdc0000202"),
        ("fd00:10:0:2::/64=2001:db8::1", "fd00:10:0:2::/64", "2001:db8::1", "061e03d7e1ca"),
        ("10.244.2.0/24=2001:db8::1,02:42:ac:11:00:02", "10.244.2.0/24", "2001:db8::1", "0242ac110002"),
    ],
)
def test_peers(text, subnet, address, mac):
    assert parse_peer(text) == Peer(ip_network(subnet), ip_address(address), bytes.fromhex(mac))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "SUBNET=ADDRESS"),
        ("10.244.2.0/24", "SUBNET=ADDRESS"),
        ("10.244.2.0/24,192.0.2.2", "SUBNET=ADDRESS"),
        ("10.244.2.0/24=192.0.2.2,", "SUBNET=ADDRESS"),
        ("=", "''"),
        ("=192.0.2.2", "''"),
        ("10.244.2.0/24=", "''"),
        ("10.244.2.1/24=192.0.2.2", "host bits"),
        ("10.244.2.0/33=192.0.2.2", "'10.244.2.0/33'"),
        ("10.244.2.0/24=192.0.2.0/24", "'192.0.2.0/24'"),
        ("10.244.2.0/24=example.org", "'example.org'"),
        ("10.244.2.0/24=192.0.2.2=192.0.2.3", "'192.0.2.2=192.0.2.3'"),
        ("192.0.2.2=10.244.2.0/24", "'10.244.2.0/24'"),
        ("10.244.2.0/24=192.0.2.2,02:42", "'02:42'"),
        ("10.244.2.0/24=192.0.2.2,02:42:ac:11:00:02,x", "'02:42:ac:11:00:02,x'"),
        ("10.244.2.0/24=192.0.2.2,02:42:ac:11:00:zz", "'02:42:ac:11:00:zz'"),
    ],
)
def test_what_is_not_a_peer_is_named(text, why):
    with pytest.raises(ValueError, match=r"^'") as caught:
        parse_peer(text)
    assert repr(text) in str(caught.value)
    assert why in str(caught.value)


V4_PEER = parse_peer("10.244.2.0/24=192.0.2.2")
V6_PEER = parse_peer("fd00:10:0:2::/64=192.0.2.2")
V4_OVER_V6 = parse_peer("10.244.3.0/24=2001:db8::3,02:42:ac:11:00:02")
V6_OVER_V6 = parse_peer("fd00:10:0:3::/64=2001:db8::3,02:42:ac:11:00:02")
A4, A6 = IPv4Address("192.0.2.2"), IPv6Address("2001:db8::3")
DATA4, DATA6 = VtepData(derive_vtep_mac(A4)), VtepData(MAC)


@pytest.mark.parametrize(
    ("peer", "backend", "lease"),
    [
        (V4_PEER, "vxlan", Lease(V4_PEER.subnet, None, LeaseAttributes(A4, None, "vxlan", DATA4))),
        (V6_PEER, "vxlan", Lease(None, V6_PEER.subnet, LeaseAttributes(A4, None, "vxlan", DATA4))),
        (V4_OVER_V6, "vxlan", Lease(V4_OVER_V6.subnet, None, LeaseAttributes(None, A6, "vxlan", None, DATA6))),
        (V6_OVER_V6, "vxlan", Lease(None, V6_OVER_V6.subnet, LeaseAttributes(None, A6, "vxlan", None, DATA6))),
        (V4_PEER, "udp", Lease(V4_PEER.subnet, None, LeaseAttributes(A4, None, "udp"))),
        (V6_OVER_V6, "udp", Lease(None, V6_OVER_V6.subnet, LeaseAttributes(None, A6, "udp"))),
    ],
)
def test_a_peer_as_a_lease(peer, backend, lease):
    assert peer.lease(backend) == lease
    routes, unreachable = plan([lease], "vxlan" if backend == "vxlan" else "ip", (4, 6))
    assert routes == [Route(peer.subnet, peer.address, peer.mac if backend == "vxlan" else b"", (peer.address,))]
    assert unreachable == []


async def test_the_snapshot_holds_the_peers_in_their_order():
    peers = [V6_PEER, V4_PEER, V4_OVER_V6]
    watch = StaticStore(config(), SUBNETS, peers).watch()
    assert await anext(watch) == [peer.lease("vxlan") for peer in peers]
    await watch.aclose()
    watch = StaticStore(config(backend="udp"), SUBNETS, peers).watch()
    assert await anext(watch) == [peer.lease("udp") for peer in peers]
    await watch.aclose()


async def test_no_peers_at_all():
    watch = StaticStore(config(), SUBNETS, []).watch()
    assert await anext(watch) == []
    await watch.aclose()


@pytest.mark.parametrize("previous", [Subnets(), Subnets(IPv4Network("10.244.9.0/24"))])
async def test_the_own_lease_is_the_one_given_and_never_ends(previous):
    store = StaticStore(config(), SUBNETS, [V4_PEER])
    lease = await store.acquire(await store.config(), ME, previous)
    assert lease == Lease(SUBNETS.ipv4, SUBNETS.ipv6, ME, None)
    assert await store.renew(lease) is lease
    await store.release(lease)
    assert await store.acquire(await store.config(), ME, previous) == lease


async def test_the_configuration_is_the_one_given():
    given = config()
    assert await StaticStore(given, SUBNETS, []).config() is given


@pytest.mark.parametrize(
    ("families", "subnets", "peers", "named"),
    [
        ("4", Subnets(IPv4Network("10.245.1.0/24")), [], ["--subnet 10.245.1.0/24", "10.244.0.0/16"]),
        ("4", Subnets(IPv4Network("10.0.0.0/8")), [], ["--subnet 10.0.0.0/8", "10.244.0.0/16"]),
        ("4", Subnets(IPv4Network("10.244.0.0/15")), [], ["--subnet 10.244.0.0/15", "inside the network 10.244.0.0/16"]),
        ("46", SUBNETS, ["fd00:10::/47=192.0.2.2"], ["--peer fd00:10::/47", "inside the network fd00:10::/48"]),
        ("46", Subnets(None, IPv6Network("fd00:11::/64")), [], ["--subnet fd00:11::/64", "fd00:10::/48"]),
        ("4", Subnets(None, IPv6Network("fd00:10::/64")), [], ["--subnet fd00:10::/64", "IPv6"]),
        ("6", Subnets(IPv4Network("10.244.1.0/24")), [], ["--subnet 10.244.1.0/24", "IPv4"]),
        ("46", SUBNETS, ["10.245.2.0/24=192.0.2.2"], ["--peer 10.245.2.0/24", "10.244.0.0/16"]),
        ("46", SUBNETS, ["10.0.0.0/8=192.0.2.2"], ["--peer 10.0.0.0/8", "10.244.0.0/16"]),
        ("46", SUBNETS, ["fd00::/16=192.0.2.2"], ["--peer fd00::/16", "fd00:10::/48"]),
        ("4", Subnets(SUBNETS.ipv4), ["fd00:10:0:2::/64=192.0.2.2"], ["--peer fd00:10:0:2::/64", "IPv6"]),
        ("6", Subnets(None, SUBNETS.ipv6), ["10.244.2.0/24=192.0.2.2"], ["--peer 10.244.2.0/24", "IPv4"]),
        ("46", SUBNETS, ["10.244.1.0/24=192.0.2.2"], ["--peer 10.244.1.0/24", "own subnet 10.244.1.0/24"]),
        ("46", SUBNETS, ["10.244.1.128/25=192.0.2.2"], ["--peer 10.244.1.128/25", "own subnet 10.244.1.0/24"]),
        ("46", SUBNETS, ["10.244.0.0/23=192.0.2.2"], ["--peer 10.244.0.0/23", "own subnet 10.244.1.0/24"]),
        ("46", SUBNETS, ["fd00:10::/63=192.0.2.2"], ["--peer fd00:10::/63", "own subnet fd00:10:0:1::/64"]),
        (
            "46",
            SUBNETS,
            ["10.244.2.0/24=192.0.2.2", "10.244.1.0/26=192.0.2.3"],
            ["--peer 10.244.1.0/26", "own subnet 10.244.1.0/24"],
        ),
    ],
)
def test_subnets_that_cannot_be(families, subnets, peers, named):
    with pytest.raises(StoreError) as caught:
        StaticStore(config(families), subnets, [parse_peer(peer) for peer in peers])
    assert [part for part in named if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("families", "subnets", "peers"),
    [
        ("46", SUBNETS, ["10.244.2.0/24=192.0.2.2", "fd00:10:0:2::/64=192.0.2.2"]),
        ("4", Subnets(IPv4Network("10.244.0.0/16")), []),
        ("4", Subnets(SUBNETS.ipv4), ["10.244.0.0/24=192.0.2.2", "10.244.2.0/26=192.0.2.3", "10.244.2.64/26=192.0.2.4"]),
        ("6", Subnets(None, SUBNETS.ipv6), ["fd00:10::/64=2001:db8::2"]),
        ("46", Subnets(SUBNETS.ipv4), ["fd00:10:0:1::/64=192.0.2.2"]),
        ("4", Subnets(SUBNETS.ipv4), ["10.244.2.0/23=192.0.2.2", "10.244.2.0/24=192.0.2.3"]),
    ],
)
def test_subnets_that_can(families, subnets, peers):
    StaticStore(config(families), subnets, [parse_peer(peer) for peer in peers])


def test_two_peers_with_one_subnet():
    """Their leases would have one key, of which a LeaseSet keeps one: a peer would be dropped in silence."""
    peers = [parse_peer("10.244.2.0/24=192.0.2.2"), parse_peer("10.244.2.0/24=192.0.2.3")]
    with pytest.raises(StoreError, match=r"--peer 10\.244\.2\.0/24"):
        StaticStore(config(), SUBNETS, peers)
