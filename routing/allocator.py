"""Which subnet a node gets.

Theory of operation: one pure decision from the configuration, the leases that exist and what the node was before, in
flannel's order (pkg/subnet/etcd/local_manager.go): the lease with the node's own public address, if it fits the
configuration, a reservation before others; else the previous subnet, if it fits and is free; else a random one of the
first hundred free. Creating and deleting is the store's business.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from itertools import accumulate, islice

from routing.config import Network, NetworkConfig, Pool
from routing.lease import Lease, LeaseAttributes

_CHOICES = 100
"""How many free subnets the random choice is made from, as in flannel: enough that nodes which start together rarely
pick the same one, few enough that a large network need not be walked."""


class NoFreeSubnetError(Exception):
    """Every subnet of a pool is taken."""


@dataclass(frozen=True)
class Subnets:
    """A pair of subnets, None for a family that is off."""

    ipv4: IPv4Network | None = None
    ipv6: IPv6Network | None = None


@dataclass(frozen=True)
class Decision:
    """What to do: drop the leases `obsolete` (own ones that no longer fit), then hold `subnets`.

    `reuse` is the existing lease behind `subnets`, or None if it is to be created.
    """

    subnets: Subnets
    reuse: Lease | None
    obsolete: tuple[Lease, ...]

    def lease(self, attributes: LeaseAttributes, expiration: float) -> Lease:
        """What the node `attributes` holds then, until `expiration`; a reservation that it takes up stays one."""
        is_reservation = self.reuse is not None and self.reuse.expiration is None
        return Lease(self.subnets.ipv4, self.subnets.ipv6, attributes, None if is_reservation else expiration)


def decide(
    config: NetworkConfig,
    leases: Sequence[Lease],
    attributes: LeaseAttributes,
    previous: Subnets,
    rng: random.Random,
) -> Decision:
    """Which subnets the node `attributes` shall hold. Raises NoFreeSubnetError."""
    own = [lease for lease in leases if lease.held_by(attributes)]
    fitting = [lease for lease in own if fits(config, lease.subnet, lease.ipv6_subnet)]
    reuse = min(fitting, key=lambda lease: lease.expiration is not None, default=None)  # what an operator reserved is meant
    obsolete = tuple(lease for lease in own if lease is not reuse)
    if reuse is not None:
        return Decision(Subnets(reuse.subnet, reuse.ipv6_subnet), reuse, obsolete)
    others = [lease for lease in leases if lease not in obsolete]
    ipv4 = _pick(config.ipv4, [lease.subnet for lease in others], previous.ipv4, rng)
    ipv6 = _pick(config.ipv6, [lease.ipv6_subnet for lease in others], previous.ipv6, rng)
    assert not isinstance(ipv4, IPv6Network)  # a pool gives what it holds
    assert not isinstance(ipv6, IPv4Network)
    return Decision(Subnets(ipv4, ipv6), None, obsolete)


def fits(config: NetworkConfig, subnet: IPv4Network | None, ipv6_subnet: IPv6Network | None) -> bool:
    """Whether a node may hold exactly these subnets under `config`."""
    pairs: tuple[tuple[Pool | None, Network | None], ...] = ((config.ipv4, subnet), (config.ipv6, ipv6_subnet))
    return all(subnet_ is None if pool is None else subnet_ is not None and pool.fits(subnet_) for pool, subnet_ in pairs)


def _pick(
    pool: Pool | None, taken: Iterable[Network | None], previous: Network | None, rng: random.Random
) -> Network | None:
    if pool is None:
        return None
    used = _Used(pool, [network for network in taken if network is not None])
    if previous is not None and pool.fits(previous) and used.is_free(int(previous.network_address)):
        return previous
    free = list(islice(used.free(), _CHOICES))
    if not free:
        raise NoFreeSubnetError(f"all subnets of /{pool.subnet_length} between {pool.minimum} and {pool.maximum} are taken")
    start = rng.choice(free)
    if pool.network.version == 4:
        return IPv4Network((start, pool.subnet_length))
    return IPv6Network((start, pool.subnet_length))


class _Used:
    """The parts of a pool that existing leases cover, whatever their prefix length.

    Kept as sorted spans of addresses, so that a lease far larger than a subnet of this pool costs no more than another.
    """

    def __init__(self, pool: Pool, networks: Sequence[Network]) -> None:
        self._pool = pool
        self._size = 1 << (pool.network.max_prefixlen - pool.subnet_length)
        spans = sorted((int(n.network_address), int(n.broadcast_address)) for n in networks)
        self._firsts = [first for first, _ in spans]
        self._reach = list(accumulate((last for _, last in spans), max))

    def _covered_until(self, start: int) -> int | None:
        """The last address of what covers any part of the subnet at `start`, or None if it is free."""
        index = bisect_right(self._firsts, start + self._size - 1) - 1
        if index < 0 or self._reach[index] < start:
            return None
        return self._reach[index]

    def is_free(self, start: int) -> bool:
        return self._covered_until(start) is None

    def free(self) -> Iterator[int]:
        """Starts of free subnets, in order."""
        start = int(self._pool.minimum)
        while start <= int(self._pool.maximum):
            covered_until = self._covered_until(start)
            if covered_until is None:
                yield start
                start += self._size
            else:
                start = covered_until - covered_until % self._size + self._size
