"""The peers of a node: what the store says, minus the node's own lease.

Theory of operation: a store delivers whole snapshots. The set compares each with the one before by everything that a
lease says but its expiration (subnets, addresses, backend type and data), so that a renewal is no change and a new MAC
is one. The node's own lease is left out on both sides, hence it can never appear in a difference.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from routing.lease import Lease


@dataclass(frozen=True)
class Changes:
    """The difference between two snapshots; `changed` holds the new form of each lease."""

    added: tuple[Lease, ...] = ()
    removed: tuple[Lease, ...] = ()
    changed: tuple[Lease, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class LeaseSet:
    """The peers now. `own_key` is the key of the node's own lease."""

    def __init__(self, own_key: str) -> None:
        self._own_key = own_key
        self._leases: dict[str, Lease] = {}

    @property
    def peers(self) -> tuple[Lease, ...]:
        """All peers, sorted by key so that equal sets give equal tables."""
        return tuple(self._leases[key] for key in sorted(self._leases))

    def replace(self, snapshot: Iterable[Lease]) -> Changes:
        """Take over `snapshot` and tell what it changed."""
        old = self._leases
        new = {lease.key: lease for lease in snapshot}
        new.pop(self._own_key, None)
        self._leases = new
        return Changes(
            added=tuple(lease for key, lease in new.items() if key not in old),
            removed=tuple(lease for key, lease in old.items() if key not in new),
            changed=tuple(lease for key, lease in new.items() if key in old and _differ(old[key], lease)),
        )


def _differ(one: Lease, other: Lease) -> bool:
    """Whether two leases of one key say different things; stores hand out the same object for what has not changed."""
    return one is not other and one.attributes != other.attributes
