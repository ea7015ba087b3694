"""Former addresses: accepted exactly during the grace, and never when another peer has the address."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address

from hypothesis import given
from hypothesis import strategies as st

from routing.grace import Grace
from routing.lease import Lease, LeaseAttributes
from routing.leaseset import Changes, LeaseSet

SECONDS = 5.0


def lease(number: int, *hosts: int) -> Lease:
    """Lease `number`, whose node has the IPv4 address number hosts[0], and the IPv6 address hosts[1] if that is there."""
    ipv6 = IPv6Address(f"2001:db8::{hosts[1]}") if len(hosts) > 1 else None
    return Lease(IPv4Network(f"10.5.{number}.0/24"), None, LeaseAttributes(address(hosts[0]), ipv6, "vxlan"))


def address(number: int) -> IPv4Address:
    return IPv4Address(f"192.0.2.{number}")


def test_a_changed_address_counts_for_the_time_of_grace():
    grace = Grace(SECONDS)
    grace.follow(Changes(added=(lease(1, 1, 1),)), 100.0)
    assert (grace.former(100.0), grace.next_end) == ({}, None)
    grace.follow(Changes(changed=(lease(1, 2, 1),)), 110.0)
    assert grace.next_end == 115.0
    assert grace.former(110.0) == grace.former(114.999) == {"10.5.1.0-24": (address(1),)}
    grace.follow(Changes(changed=(lease(1, 3),)), 112.0)
    assert grace.former(112.0) == {"10.5.1.0-24": (address(1), address(2), IPv6Address("2001:db8::1"))}
    assert grace.former(115.0) == {"10.5.1.0-24": (address(2), IPv6Address("2001:db8::1"))}
    assert grace.next_end == 117.0
    assert (grace.former(117.0), grace.next_end) == ({}, None)


def test_a_lease_that_ends_believes_nobody():
    grace = Grace(SECONDS)
    grace.follow(Changes(added=(lease(1, 1), lease(2, 9))), 0.0)
    grace.follow(Changes(changed=(lease(1, 2),)), 1.0)
    grace.follow(Changes(removed=(lease(1, 2),)), 2.0)
    assert (grace.former(2.0), grace.next_end) == ({}, None)
    grace.follow(Changes(added=(lease(1, 3),)), 3.0)
    assert grace.former(3.0) == {}


SETS = st.dictionaries(st.integers(1, 4), st.integers(1, 4), max_size=4)
STEPS = st.lists(st.tuples(SETS, st.floats(0.1, 4.0).map(lambda x: round(x, 1))), max_size=12)


@given(STEPS)
def test_exactly_during_the_grace_and_never_an_address_of_another_peer(steps):
    peers, grace, now = LeaseSet("none"), Grace(SECONDS), 0.0
    given_up: dict[tuple[int, int], float] = {}
    have: dict[int, int] = {}
    for wanted, pause in steps:
        grace.follow(peers.replace([lease(number, host) for number, host in wanted.items()]), now)
        for number in {number for number, _ in given_up} - set(wanted):
            given_up = {key: until for key, until in given_up.items() if key[0] != number}
        for number, host in have.items():
            if wanted.get(number, host) != host:
                given_up[number, host] = now + SECONDS
        have = wanted
        for moment in (now, now + pause / 2):
            expected = {
                (number, host) for (number, host), until in given_up.items() if until > moment and host not in have.values()
            }
            former = grace.former(moment)
            assert {(int(key.split(".")[2]), int(one) & 255) for key, ones in former.items() for one in ones} == expected
        left = [until for until in given_up.values() if until > now + pause / 2]
        assert grace.next_end == (min(left) if left else None)
        now += pause
