"""What every store refuses alike: pure functions over the leases that are there."""

from collections.abc import Iterable, Sequence

from routing.allocator import Subnets, fits
from routing.config import NetworkConfig
from routing.lease import Lease, LeaseAttributes, format_key
from routing.stores import StoreError


def owner_of(lease: Lease) -> str:
    """The public address in `lease`, for messages."""
    return str(lease.attributes.public_ip or lease.attributes.public_ipv6)


def require_address_of_one(leases: Iterable[Lease], key: str, attributes: LeaseAttributes) -> None:
    """Raises StoreError if a lease other than `key` has the public address of `attributes`."""
    other = next((lease for lease in leases if lease.key != key and lease.held_by(attributes)), None)
    if other is not None:
        raise StoreError(
            f"the lease {other.key} already has the public address {owner_of(other)}: give this node another one with "
            "--public-ip or --iface, or stop the other"
        )


def key_of(subnets: Subnets) -> str:
    """The key of `subnets`. Raises StoreError if there is none in them."""
    try:
        return format_key(subnets.ipv4, subnets.ipv6)
    except ValueError as error:
        raise StoreError(str(error)) from None


def reservation(
    config: NetworkConfig, leases: Sequence[Lease], subnets: Subnets, attributes: LeaseAttributes | None
) -> Lease:
    """The reservation that `Registry.reserve` makes, where `leases` are there already. Raises StoreError."""
    key = key_of(subnets)
    present = next((lease for lease in leases if lease.key == key), None)
    if present is not None:
        if attributes is not None and not present.held_by(attributes):
            raise StoreError(f"the subnet {key} is held by {owner_of(present)}: remove that lease first")
        return Lease(subnets.ipv4, subnets.ipv6, present.attributes)
    if attributes is None:
        raise StoreError(f"there is no lease {key} to make a reservation of: say for which public address it shall be")
    if not fits(config, subnets.ipv4, subnets.ipv6):
        pools = " and ".join(f"a /{pool.subnet_length} in {pool.minimum}..{pool.maximum}" for pool in config.pools)
        raise StoreError(f"{key} does not fit the network configuration, where a node has {pools}")
    overlapping = next((lease for lease in leases if _overlap(lease, subnets)), None)
    if overlapping is not None:
        raise StoreError(f"{key} overlaps the lease {overlapping.key} of {owner_of(overlapping)}")
    return Lease(subnets.ipv4, subnets.ipv6, attributes)


def _overlap(lease: Lease, subnets: Subnets) -> bool:
    ipv4 = lease.subnet is not None and subnets.ipv4 is not None and lease.subnet.overlaps(subnets.ipv4)
    ipv6 = lease.ipv6_subnet is not None and subnets.ipv6 is not None and lease.ipv6_subnet.overlaps(subnets.ipv6)
    return ipv4 or ipv6
