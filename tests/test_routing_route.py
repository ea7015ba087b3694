"""From leases to routes: which address, which MAC, and why not."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from routing.lease import Lease, LeaseAttributes, VtepData
from routing.route import BACKEND_OF_FRAMING, Route, Unreachable, plan

NET4, NET6 = IPv4Network("10.5.2.0/24"), IPv6Network("fc00:0:0:2::/64")
A4, A6 = IPv4Address("192.0.2.2"), IPv6Address("2001:db8::2")
MAC4, MAC6 = b"\2\0\0\0\0\4", b"\2\0\0\0\0\6"
NO_ADDRESS = "it has no address of a family that this node's underlay has"
NO_MAC = "it has no VtepMAC"


def lease(subnets="46", public="46", macs="46", backend="vxlan", expiration=None) -> Lease:
    attributes = LeaseAttributes(
        A4 if "4" in public else None,
        A6 if "6" in public else None,
        backend,
        VtepData(MAC4, 1) if "4" in macs else None,
        VtepData(MAC6, 1) if "6" in macs else None,
    )
    return Lease(NET4 if "4" in subnets else None, NET6 if "6" in subnets else None, attributes, expiration)


@pytest.mark.parametrize(
    ("public", "families", "via4", "via6"),
    [
        ("46", (4, 6), A4, A6),
        ("46", (4,), A4, A4),
        ("46", (6,), A6, A6),
        ("4", (4, 6), A4, A4),
        ("4", (4,), A4, A4),
        ("6", (4, 6), A6, A6),
        ("6", (6,), A6, A6),
        ("4", (6,), None, None),
        ("6", (4,), None, None),
        ("46", (), None, None),
    ],
)
@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_the_underlay_of_each_family(public, families, via4, via6, framing):
    one = lease(public=public, macs="46" if framing == "vxlan" else "", backend=BACKEND_OF_FRAMING[framing])
    addresses = tuple(address for address in (A4, A6) if str(address.version) in public)
    routes, unreachable = plan([one], framing, families)
    if via4 is None:
        assert routes == []
        assert unreachable == [Unreachable(one, NO_ADDRESS), Unreachable(one, NO_ADDRESS)]
        return
    mac = {A4: MAC4, A6: MAC6} if framing == "vxlan" else {A4: b"", A6: b""}
    assert routes == [Route(NET4, via4, mac[via4], addresses), Route(NET6, via6, mac[via6], addresses)]
    assert unreachable == []


@pytest.mark.parametrize("subnets", ["4", "6"])
@pytest.mark.parametrize(
    ("public", "macs", "mac"),
    [
        ("4", "46", MAC4),
        ("4", "4", MAC4),
        ("4", "6", MAC6),
        ("6", "46", MAC6),
        ("6", "4", MAC4),
        ("6", "6", MAC6),
    ],
)
def test_the_mac_goes_with_the_underlay(subnets, public, macs, mac):
    address = A4 if public == "4" else A6
    subnet = NET4 if subnets == "4" else NET6
    assert plan([lease(subnets, public, macs)], "vxlan", (4, 6)) == ([Route(subnet, address, mac, (address,))], [])


@pytest.mark.parametrize("public", ["4", "6", "46"])
def test_without_a_mac_vxlan_has_no_route(public):
    one = lease("4", public, "")
    assert plan([one], "vxlan", (4, 6)) == ([], [Unreachable(one, NO_MAC)])
    two = lease("46", public, "")
    assert plan([two], "vxlan", (4, 6)) == ([], [Unreachable(two, NO_MAC), Unreachable(two, NO_MAC)])


@pytest.mark.parametrize(
    ("framing", "theirs", "ours"),
    [
        ("vxlan", "udp", "vxlan"),
        ("ip", "vxlan", "udp"),
        ("vxlan", "host-gw", "vxlan"),
        ("ip", "", "udp"),
        ("vxlan", "VXLAN", "vxlan"),
    ],
)
def test_another_backend_is_named_once_per_lease(framing, theirs, ours):
    one = lease(backend=theirs)
    reason = f"its BackendType is {theirs!r}, ours is {ours!r}"
    assert plan([one], framing, (4, 6)) == ([], [Unreachable(one, reason)])


def test_one_bad_peer_does_not_harm_the_others():
    good = lease("4", expiration=5.0)
    bad = [lease("6", backend="udp"), lease("6", macs="")]
    routes, unreachable = plan(iter([bad[0], good, bad[1]]), "vxlan", {4, 6})
    assert routes == [Route(NET4, A4, MAC4, (A4, A6))]
    assert [one.lease for one in unreachable] == bad


def test_no_peers():
    assert plan([], "vxlan", (4, 6)) == ([], [])


def test_the_ip_framing_ignores_macs():
    assert plan([lease("4", macs="46", backend="udp")], "ip", (4,)) == ([Route(NET4, A4, b"", (A4, A6))], [])
