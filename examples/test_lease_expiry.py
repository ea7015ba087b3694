"""Leases end: what the nodes of an overlay do when one of them crashes, leaves, or loses its store.

Run it with ``pytest examples/test_lease_expiry.py``. A lease lasts 24 hours and is renewed an hour before its end, as in
flannel; the days that go by here are virtual and take milliseconds.
"""

import pytest

from dataplane.overlay import Overlay

HOUR = 3600.0
DAY = 24 * HOUR

pytestmark = pytest.mark.overlay(nodes=3)


def leased(overlay: Overlay) -> list[str]:
    """The subnets that have an owner now."""
    return [str(lease.subnet) for lease in overlay.book.leases()]


def test_a_lease_is_renewed_as_long_as_its_node_runs(overlay: Overlay) -> None:
    """A month passes, and every node has the subnet that it had."""
    before = leased(overlay)
    overlay.run(30 * DAY)
    assert leased(overlay) == before
    assert overlay.pings_all() == 6


def test_after_a_crash_the_others_send_into_the_void_until_the_lease_ends(overlay: Overlay) -> None:
    """And from that instant on they answer with ICMP: network unreachable."""
    a, b, c = overlay.nodes
    b.stop()
    end = b.lease.expiration
    assert end == DAY

    overlay.run(end - overlay.now - 0.001)
    a.send_echo(b)
    overlay.settle()
    assert a.verdicts["outbound"] == {"forwarded": 1}
    assert not a.host.errors

    overlay.run(0.002)
    a.send_echo(b)
    overlay.settle()
    assert a.verdicts["outbound"] == {"forwarded": 1, "no_route": 1}
    assert [(error.type, error.code) for error in a.host.errors] == [(3, 0)]
    assert leased(overlay) == ["10.0.1.0/24", "10.0.3.0/24"]
    assert a.pings(c)


def test_a_node_that_leaves_is_forgotten_at_once(overlay: Overlay) -> None:
    """It gives its lease back, and somebody else may have the subnet."""
    a, b, _ = overlay.nodes
    b.leave()
    assert not a.pings(b)
    assert a.verdicts["outbound"] == {"no_route": 1}
    successor = overlay.add_node("successor", subnet="10.0.2.0/24")
    assert a.pings(successor)


def test_a_node_that_starts_again_has_its_subnet_again(overlay: Overlay) -> None:
    """The store knows it by its public address. Only if the lease has ended may somebody else have taken it."""
    a, b, _ = overlay.nodes
    before = b.lease.subnet
    b.stop()
    overlay.run(1 * HOUR)
    assert not a.pings(b)
    b.start()
    assert b.lease.subnet == before
    assert b.lease.expiration == pytest.approx(overlay.now + DAY)
    assert a.pings(b)


def test_a_short_outage_of_the_store_harms_nobody(overlay: Overlay) -> None:
    """The lease was due for renewal meanwhile. The node tries again until the store is back."""
    a, b, _ = overlay.nodes
    overlay.run(22.5 * HOUR)
    a.lose_store()
    overlay.run(1 * HOUR)
    assert a.pings(b)
    assert b.pings(a)
    a.find_store()
    overlay.run(2 * DAY)
    assert a.is_running
    assert overlay.pings_all() == 6


def test_a_node_that_comes_back_after_its_lease_has_ended_stops(overlay: Overlay) -> None:
    """Its subnet may be somebody else's by now, so it may not go on."""
    a, b, c = overlay.nodes
    overlay.settle()
    a.lose_store()
    newcomer = overlay.add_node()
    overlay.settle()
    assert not a.pings(newcomer)  # of which it has not heard
    overlay.run(1 * DAY)
    assert not b.pings(a)  # the others have forgotten it
    a.find_store()
    overlay.run(10)
    assert not a.is_running
    assert "is gone from the store" in (a.failure or "")
    assert b.pings(c)


@pytest.mark.overlay(lease_seconds=60.0)
def test_leases_may_be_shorter(overlay: Overlay) -> None:
    """Then they are renewed after half of their time."""
    b = overlay.nodes[1]
    first = b.lease.expiration
    assert first == 60.0
    overlay.run(31)
    assert b.lease.expiration == pytest.approx(90.0)
    b.stop()
    overlay.run(58)
    assert len(leased(overlay)) == 3
    overlay.run(2)
    assert leased(overlay) == ["10.0.1.0/24", "10.0.3.0/24"]
