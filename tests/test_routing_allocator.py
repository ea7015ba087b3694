"""Which subnet a node gets: the order of the choices, and a slow model of what is free."""

import random
import time
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.allocator import Decision, NoFreeSubnetError, Subnets, decide, fits
from routing.config import Backend, NetworkConfig, Pool
from routing.lease import Lease, LeaseAttributes

ME = LeaseAttributes(IPv4Address("192.0.2.1"), None, "vxlan")
OTHER = LeaseAttributes(IPv4Address("192.0.2.2"), None, "vxlan")


def pool(network: str, length: int, minimum: str, maximum: str) -> Pool:
    return Pool(ip_network(network), length, ip_address(minimum), ip_address(maximum))


POOL4 = pool("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0")
POOL6 = pool("fc00::/48", 64, "fc00:0:0:1::", "fc00:0:0:ffff::")
V4 = NetworkConfig(POOL4, None, Backend())
V6 = NetworkConfig(None, POOL6, Backend())
DUAL = NetworkConfig(POOL4, POOL6, Backend())
SMALL = NetworkConfig(pool("10.5.0.0/28", 30, "10.5.0.4", "10.5.0.12"), None, Backend())


def v4(text: str) -> IPv4Network:
    return IPv4Network(text)


def v6(text: str) -> IPv6Network:
    return IPv6Network(text)


def held(subnet=None, ipv6_subnet=None, by=OTHER, expiration: float | None = 9.0) -> Lease:
    return Lease(v4(subnet) if subnet else None, v6(ipv6_subnet) if ipv6_subnet else None, by, expiration)


NO_HINT = Subnets()


def choices(config, leases=(), previous=NO_HINT, attributes=ME, seeds=2000):
    """All that the random choice may give."""
    return {decide(config, leases, attributes, previous, random.Random(seed)).subnets for seed in range(seeds)}


def test_an_own_lease_that_fits_is_reused_before_anything_else():
    own = held("10.5.7.0/24", by=ME)
    found = decide(V4, [held("10.5.6.0/24"), own], ME, Subnets(v4("10.5.9.0/24")), random.Random(1))
    assert found == Decision(Subnets(v4("10.5.7.0/24")), own, ())


def test_a_second_own_lease_is_obsolete():
    first, second = held("10.5.7.0/24", by=ME), held("10.5.8.0/24", by=ME)
    assert decide(V4, [first, second], ME, Subnets(), random.Random(1)) == Decision(Subnets(first.subnet), first, (second,))


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (V4, held("10.6.7.0/24", by=ME)),
        (V4, held("10.5.7.0/25", by=ME)),
        (V4, held("10.5.0.0/24", by=ME)),
        (V4, held("10.5.7.0/24", "fc00:0:0:5::/64", by=ME)),
        (V4, held(None, "fc00:0:0:5::/64", by=ME)),
        (DUAL, held("10.5.7.0/24", by=ME)),
        (DUAL, held("10.5.7.0/24", "fc00:0:0:0::/64", by=ME)),
        (V6, held("10.5.7.0/24", "fc00:0:0:5::/64", by=ME)),
    ],
)
def test_an_own_lease_that_does_not_fit_is_obsolete(config, own):
    found = decide(config, [own], ME, Subnets(), random.Random(1))
    assert found.reuse is None
    assert found.obsolete == (own,)
    assert fits(config, found.subnets.ipv4, found.subnets.ipv6)


def test_the_subnets_of_an_obsolete_lease_are_free():
    config = NetworkConfig(pool("10.5.0.0/16", 24, "10.5.7.0", "10.5.7.0"), None, Backend())
    own = held("10.5.7.0/25", by=ME)
    assert decide(config, [own], ME, Subnets(), random.Random(1)) == Decision(Subnets(v4("10.5.7.0/24")), None, (own,))


def test_a_lease_that_does_not_fit_does_not_hide_one_that_does():
    bad, good = held("10.6.7.0/24", by=ME), held("10.5.7.0/24", by=ME, expiration=None)
    found = decide(V4, [bad, good], ME, Subnets(), random.Random(1))
    assert found == Decision(Subnets(v4("10.5.7.0/24")), good, (bad,))


def test_the_previous_subnet_is_taken_if_it_is_free():
    assert choices(V4, [held("10.5.6.0/24")], Subnets(v4("10.5.200.0/24")), seeds=20) == {Subnets(v4("10.5.200.0/24"))}


@pytest.mark.parametrize(
    "previous",
    [
        "10.5.6.0/24",  # taken
        "10.5.8.0/24",  # half taken
        "10.5.16.0/24",  # inside a larger one
        "10.6.0.0/24",  # another network
        "10.5.0.0/24",  # below the first
        "10.5.9.0/25",  # another length
    ],
)
def test_a_previous_subnet_that_is_taken_or_does_not_fit_is_not_taken(previous):
    leases = [held("10.5.6.0/24"), held("10.5.8.128/25"), held("10.5.16.0/20")]
    found = choices(V4, leases, Subnets(v4(previous)), seeds=20)
    assert Subnets(v4(previous)) not in found
    assert len(found) > 1


def test_the_choice_is_among_the_first_hundred():
    leases = [held("10.5.2.0/24"), held("10.5.4.0/24")]
    expected = {Subnets(v4(f"10.5.{third}.0/24")) for third in range(1, 103) if third not in (2, 4)}
    assert len(expected) == 100
    assert choices(V4, leases) == expected


def test_the_same_seed_gives_the_same_subnet():
    assert decide(V4, [], ME, Subnets(), random.Random(7)) == decide(V4, [], ME, Subnets(), random.Random(7))


def test_all_are_found_where_there_are_fewer():
    assert choices(SMALL, seeds=50) == {Subnets(v4(f"10.5.0.{last}/30")) for last in (4, 8, 12)}


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        (["10.5.0.4/30"], [8, 12]),
        (["10.5.0.5/32"], [8, 12]),
        (["10.5.0.7/32", "10.5.0.8/32"], [12]),
        (["10.5.0.8/29"], [4]),
        (["10.5.0.0/29"], [8, 12]),
        (["10.4.0.0/16", "10.6.0.0/16", "10.5.0.16/28"], [4, 8, 12]),
        (["10.5.0.8/29", "10.5.0.8/32"], [4]),
    ],
)
def test_leases_of_other_lengths_cover_what_they_overlap(taken, left):
    found = choices(SMALL, [held(subnet) for subnet in taken], seeds=50)
    assert found == {Subnets(v4(f"10.5.0.{last}/30")) for last in left}


@pytest.mark.parametrize(
    "taken",
    [["0.0.0.0/0"], ["10.5.0.0/28"], ["10.5.0.4/30", "10.5.0.8/30", "10.5.0.12/30"], ["10.5.0.5/32", "10.5.0.8/29"]],
)
@pytest.mark.parametrize("previous", [None, "10.5.0.8/30"])
def test_exhaustion(taken, previous):
    leases = [held(subnet) for subnet in taken]
    with pytest.raises(NoFreeSubnetError) as caught:
        decide(SMALL, leases, ME, Subnets(v4(previous) if previous else None), random.Random(1))
    assert str(caught.value) == "all subnets of /30 between 10.5.0.4 and 10.5.0.12 are taken"


def test_an_own_lease_is_found_in_a_full_network():
    leases = [held(f"10.5.0.{last}/30", by=ME if last == 8 else OTHER) for last in (4, 8, 12)]
    assert decide(SMALL, leases, ME, Subnets(), random.Random(1)).reuse == leases[1]


def test_one_enormous_ipv6_lease_costs_nothing():
    config = NetworkConfig(None, pool("fc00::/16", 126, "fc00::4", "fc00:ffff:ffff:ffff:ffff:ffff:ffff:fffc"), Backend())
    leases = [held(None, "fc00::/17"), held(None, "fc00:8000::/126"), held(None, "fc00:8000::8/125")]
    before = time.process_time()
    found = choices(config, leases, Subnets(None, v6("fc00:1::/126")), seeds=10)
    assert time.process_time() - before < 1
    free = {v6(f"fc00:8000::{n:x}/126") for n in (4, *range(16, 412, 4))}
    assert len(free) == 100
    assert len(found) > 5
    assert {subnets.ipv6 for subnets in found} <= free


def test_a_full_large_network_is_walked_in_reasonable_time():
    config = NetworkConfig(pool("10.0.0.0/8", 24, "10.0.1.0", "10.255.255.0"), None, Backend())
    leases = [Lease(IPv4Network((0x0A000000 + (n << 8), 24)), None, OTHER, 9.0) for n in range(1, 20_000)]
    before = time.process_time()
    found = decide(config, leases, ME, Subnets(), random.Random(1))
    assert time.process_time() - before < 2
    assert 20_000 <= (int(found.subnets.ipv4.network_address) - 0x0A000000) >> 8 < 20_100


def test_dual_stack_families_are_chosen_apart():
    leases = [held("10.5.1.0/24", "fc00:0:0:2::/64"), held("10.5.3.0/24"), held(None, "fc00:0:0:1::/64")]
    found = decide(DUAL, leases, ME, Subnets(v4("10.5.3.0/24"), v6("fc00:0:0:9::/64")), random.Random(1))
    assert found.subnets.ipv6 == v6("fc00:0:0:9::/64")
    assert found.subnets.ipv4 not in (None, v4("10.5.1.0/24"), v4("10.5.3.0/24"))
    both = Subnets(v4("10.5.2.0/24"), v6("fc00:0:0:3::/64"))
    assert decide(DUAL, leases, ME, both, random.Random(1)) == Decision(both, None, ())


def test_dual_stack_one_family_full():
    with pytest.raises(NoFreeSubnetError, match=r"^all subnets of /64 between fc00:0:0:1:: and fc00:0:0:ffff:: are taken$"):
        decide(DUAL, [held(None, "fc00::/48")], ME, Subnets(), random.Random(1))


def test_dual_stack_an_own_lease_of_both_is_reused():
    own = held("10.5.7.0/24", "fc00:0:0:5::/64", by=ME)
    assert decide(DUAL, [own], ME, Subnets(), random.Random(1)) == Decision(Subnets(own.subnet, own.ipv6_subnet), own, ())


def test_v6_only_goes_by_the_ipv6_address():
    me = LeaseAttributes(None, IPv6Address("fd00::1"), "vxlan")
    other = LeaseAttributes(None, IPv6Address("fd00::2"), "vxlan")
    own = held(None, "fc00:0:0:5::/64", by=me)
    found = decide(V6, [held(None, "fc00:0:0:4::/64", by=other), own], me, Subnets(), random.Random(1))
    assert found == Decision(Subnets(None, own.ipv6_subnet), own, ())


def test_previous_of_a_family_that_is_off_is_ignored():
    found = decide(V4, [], ME, Subnets(v4("10.5.9.0/24"), v6("fc00:0:0:9::/64")), random.Random(1))
    assert found.subnets == Subnets(v4("10.5.9.0/24"), None)


@st.composite
def situations(draw):
    """A small pool of either family, and leases in and around it of any prefix length."""
    version = draw(st.sampled_from([4, 6]))
    bits, kind, base = (32, IPv4Network, 0x0A050000) if version == 4 else (128, IPv6Network, 0xFC00 << 112)
    length = draw(st.integers(bits - 8, bits - 2))
    prefix = draw(st.integers(max(length - 8, bits - 14), length - 2))
    network = kind((base, prefix))
    count = 2 ** (length - prefix)
    low = draw(st.integers(0, count - 1))
    high = draw(st.integers(low, count - 1))
    size = 2 ** (bits - length)
    found = Pool(network, length, network.network_address + low * size, network.network_address + high * size)

    def subnet(lengths):
        one = draw(lengths)
        address = base + draw(st.integers(-size, count * size + size))
        return kind(((address >> (bits - one)) << (bits - one), one))

    taken = [subnet(st.integers(prefix - 1, bits)) for _ in range(draw(st.integers(0, 10)))]
    return found, taken, subnet(st.just(length)) if draw(st.booleans()) else None


@settings(max_examples=150)
@given(situations(), st.integers(0, 2**32))
def test_what_is_free_against_a_slow_model(situation, seed):
    found, taken, previous = situation
    is4 = found.network.version == 4
    config = NetworkConfig(found if is4 else None, None if is4 else found, Backend())
    leases = [Lease(net if is4 else None, None if is4 else net, OTHER) for net in taken]
    hint = Subnets(previous if is4 else None, None if is4 else previous)
    candidates = [
        net for net in found.network.subnets(new_prefix=found.subnet_length) if found.minimum <= net[0] <= found.maximum
    ]
    free = [net for net in candidates if not any(net.overlaps(lease) for lease in taken)]
    if not free:
        with pytest.raises(NoFreeSubnetError):
            decide(config, leases, ME, hint, random.Random(seed))
        return
    decision = decide(config, leases, ME, hint, random.Random(seed))
    chosen = decision.subnets.ipv4 if is4 else decision.subnets.ipv6
    assert decision == Decision(Subnets(chosen if is4 else None, None if is4 else chosen), None, ())
    if previous in free:
        assert chosen == previous
    else:
        assert chosen in free[:100]
