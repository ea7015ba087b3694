"""Former addresses of peers: for a few seconds after a peer's address changed, the old one is still one of its own.

Theory of operation: a node whose address changes says so in its lease, and what it sent before is still on its way, or is
sent by a host that has not heard of the change itself. So each address that a lease gave up is remembered, with the time
until which it counts (``routing.route.plan`` puts it among those that the peer's packets may come from). It does not count
while another peer has it: then it says who that one is.

Only a lease that goes on with another address has a former one; a lease that ended believes nobody.
"""

from collections import Counter
from collections.abc import Iterable

from routing.config import Address
from routing.lease import Lease
from routing.leaseset import Changes

GRACE_SECONDS = 5.0


class Grace:
    """Follows the changes of the peers. Times are seconds of any one clock that never goes back."""

    def __init__(self, seconds: float = GRACE_SECONDS) -> None:
        self._seconds = seconds
        self._addresses: dict[str, tuple[Address, ...]] = {}
        self._owners: Counter[Address] = Counter()
        """How many peers have an address now."""
        self._former: dict[str, dict[Address, float]] = {}
        """By lease key: former addresses, and until when they count."""

    def follow(self, changes: Changes, now: float) -> None:
        """Take note of what changed at `now`."""
        for lease in changes.removed:
            self._disown(self._addresses.pop(lease.key, ()))
            self._former.pop(lease.key, None)
        for lease in (*changes.added, *changes.changed):
            key, addresses = lease.key, public_addresses(lease)
            before = self._addresses.get(key, ())
            self._disown(before)
            self._owners.update(addresses)
            self._addresses[key] = addresses
            given_up = set(before).difference(addresses)
            if given_up:
                self._former.setdefault(key, {}).update(dict.fromkeys(given_up, now + self._seconds))

    def _disown(self, addresses: Iterable[Address]) -> None:
        for address in addresses:
            self._owners[address] -= 1
            if not self._owners[address]:
                del self._owners[address]

    def former(self, now: float) -> dict[str, tuple[Address, ...]]:
        """By lease key: the former addresses that count at `now`, in a fixed order. What has ended is forgotten."""
        self._former = {
            key: left
            for key, addresses in self._former.items()
            if (left := {address: end for address, end in addresses.items() if end > now})
        }
        found = {
            key: tuple(sorted((one for one in addresses if one not in self._owners), key=lambda one: (one.version, one)))
            for key, addresses in self._former.items()
        }
        return {key: addresses for key, addresses in found.items() if addresses}

    @property
    def next_end(self) -> float | None:
        """When the next former address ends, which may be past; None if there is none."""
        return min((end for addresses in self._former.values() for end in addresses.values()), default=None)


def public_addresses(lease: Lease) -> tuple[Address, ...]:
    """The underlay addresses that a lease names."""
    attributes = lease.attributes
    return tuple(one for one in (attributes.public_ip, attributes.public_ipv6) if one is not None)
