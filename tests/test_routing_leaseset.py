"""The difference between snapshots: a renewal is none, a MAC is one, the own lease never is."""

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.lease import Lease, LeaseAttributes, VtepData
from routing.leaseset import Changes, LeaseSet


def lease(number: int, mac: int = 1, host: int | None = None, expiration: float | None = None) -> Lease:
    address = IPv4Address(f"192.0.2.{host or number}")
    data = VtepData(bytes([2, 0, 0, 0, 0, mac]), 1)
    return Lease(IPv4Network(f"10.5.{number}.0/24"), None, LeaseAttributes(address, None, "vxlan", data), expiration)


OWN = lease(99)


def test_the_first_snapshot_is_all_new():
    peers = LeaseSet(OWN.key)
    assert peers.peers == ()
    assert peers.replace([lease(2), OWN, lease(1)]) == Changes(added=(lease(2), lease(1)))
    assert peers.peers == (lease(1), lease(2))


def test_removal_and_addition():
    peers = LeaseSet(OWN.key)
    peers.replace([lease(1), lease(2)])
    assert peers.replace([lease(2), lease(3)]) == Changes(added=(lease(3),), removed=(lease(1),))
    assert peers.replace([]) == Changes(removed=(lease(2), lease(3)))
    assert peers.peers == ()


def test_a_renewal_is_no_change():
    peers = LeaseSet(OWN.key)
    peers.replace([lease(1, expiration=10.0), lease(2, expiration=10.0)])
    changes = peers.replace([lease(2, expiration=99.0), lease(1, expiration=None)])
    assert changes == Changes()
    assert not changes
    assert [peer.key for peer in peers.peers] == [lease(1).key, lease(2).key]


@pytest.mark.parametrize(
    "new",
    [
        lease(1, mac=2),
        lease(1, host=7),
        replace(lease(1), attributes=replace(lease(1).attributes, public_ipv6=IPv6Address("fd00::1"))),
        replace(lease(1), attributes=replace(lease(1).attributes, backend_type="udp")),
        replace(lease(1), attributes=replace(lease(1).attributes, backend_data=None)),
        replace(lease(1), attributes=replace(lease(1).attributes, backend_v6_data=VtepData(b"\2\0\0\0\0\1"))),
        replace(lease(1), attributes=replace(lease(1).attributes, backend_data=VtepData(b"\2\0\0\0\0\1", 2))),
    ],
)
def test_whatever_else_a_lease_says_is_a_change(new):
    peers = LeaseSet(OWN.key)
    peers.replace([lease(1), lease(2)])
    changes = peers.replace([new, lease(2)])
    assert changes == Changes(changed=(new,))
    assert changes
    assert peers.peers == (new, lease(2))


def test_another_pair_of_subnets_is_another_lease():
    peers = LeaseSet(OWN.key)
    peers.replace([lease(1)])
    dual = replace(lease(1), ipv6_subnet=IPv6Network("fc00:0:0:1::/64"))
    assert peers.replace([dual]) == Changes(added=(dual,), removed=(lease(1),))


def test_the_own_lease_never_appears():
    peers = LeaseSet(OWN.key)
    assert not peers.replace([OWN])
    assert not peers.replace([replace(OWN, attributes=lease(1, mac=5).attributes)])
    assert not peers.replace([])
    assert peers.peers == ()


LEASES = st.builds(
    lease,
    st.sampled_from([1, 2, 3, 10, 99]),
    st.integers(1, 2),
    st.sampled_from([None, 50]),
    st.sampled_from([None, 1.0, 2.0]),
)
SNAPSHOTS = st.lists(LEASES, max_size=5, unique_by=lambda one: one.key)


def said(leases) -> dict[str, Lease]:
    """By key, without what does not count."""
    return {one.key: replace(one, expiration=None) for one in leases}


@given(st.lists(SNAPSHOTS, max_size=6))
def test_after_any_sequence_the_peers_are_the_last_snapshot_without_the_own(snapshots):
    peers = LeaseSet(OWN.key)
    followed: dict[str, Lease] = {}
    for snapshot in snapshots:
        expected = said(one for one in snapshot if one.key != OWN.key)
        changes = peers.replace(iter(snapshot))
        assert said(peers.peers) == expected
        assert [one.key for one in peers.peers] == sorted(expected)
        assert said(changes.added).keys() == expected.keys() - followed.keys()
        assert said(changes.removed).keys() == followed.keys() - expected.keys()
        assert said(changes.changed).keys() == {
            key for key in expected.keys() & followed.keys() if expected[key] != followed[key]
        }
        assert bool(changes) == (expected != followed)
        assert all(followed[key] == one for key, one in said(changes.removed).items())
        for one in changes.removed:
            del followed[one.key]
        followed |= said((*changes.added, *changes.changed))
        assert followed == expected
