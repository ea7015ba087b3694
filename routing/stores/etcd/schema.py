"""flannel's keys in etcd, and what stands there.

::

    PREFIX/config                             the network configuration, JSON
    PREFIX/subnets/10.5.34.0-24               a lease, JSON; with an etcd lease that ends it, without one a reservation
    PREFIX/pyflannel-dp/claims/192.0.2.1      the identity of the running node that has this public address

The last is ours alone; flannel neither reads nor writes it.
"""

import logging
import posixpath
from dataclasses import dataclass

from routing.lease import Lease, LeaseAttributes, LeaseError, parse_attributes, parse_key
from routing.stores import UNKNOWN_EXPIRATION
from routing.stores.etcd import etcd_pb2 as pb

log = logging.getLogger(__name__)

DEFAULT_PREFIX = "/coreos.com/network"
"""flannel's."""

_NOBODY = LeaseAttributes(None, None, "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key below ``subnets/`` as it was read. `lease` is None for junk; `lease_id` is 0 for a reservation."""

    lease: Lease | None
    mod_revision: int
    lease_id: int
    digest: int

    def is_of(self, found: pb.KeyValue) -> bool:
        """Whether `found` is what this was read from. The revision alone would do, if no etcd ever lost its data."""
        return (self.mod_revision, self.lease_id, self.digest) == (found.mod_revision, found.lease, hash(found.value))


class Schema:
    """The keys below `prefix`, cleaned as Go's path.Join cleans flannel's. Raises ValueError if nothing is left of it."""

    def __init__(self, prefix: str) -> None:
        cleaned = posixpath.normpath(prefix.strip()) if prefix.strip() else ""
        if not cleaned.strip("/."):
            raise ValueError(f"{prefix!r} is no prefix of keys: give one like {DEFAULT_PREFIX}")
        self.prefix = "/" + cleaned.lstrip("/") if cleaned.startswith("/") else cleaned
        self.subnets = f"{self.prefix}/subnets/".encode()
        self.config = f"{self.prefix}/config".encode()

    def lease(self, key: str) -> bytes:
        """Where the lease `key` is."""
        return self.subnets + key.encode()

    def claim(self, address: str) -> bytes:
        """Where the claim on a public address is."""
        return f"{self.prefix}/pyflannel-dp/claims/{address}".encode()

    def read(self, found: pb.KeyValue) -> Entry:
        """What is below ``subnets/``; junk is logged, as text: a record with the exception would keep all its frames."""
        try:
            lease = self._parse(found)
        except (LeaseError, UnicodeDecodeError) as error:
            log.warning("skipped %s in etcd: %s", found.key.decode(errors="backslashreplace"), str(error))
            lease = None
        return Entry(lease, found.mod_revision, found.lease, hash(found.value))

    def _parse(self, found: pb.KeyValue) -> Lease:
        subnets = parse_key(found.key.removeprefix(self.subnets).decode())
        attributes = parse_attributes(found.value.decode())
        return Lease(*subnets, attributes, UNKNOWN_EXPIRATION if found.lease else None)

    def taken(self, key: bytes, entry: Entry) -> Lease | None:
        """What cannot be allocated because of `entry`: junk under the key of a lease is nobody's, but in the way."""
        if entry.lease is not None:
            return entry.lease
        try:
            return Lease(*parse_key(key.removeprefix(self.subnets).decode()), _NOBODY)
        except (LeaseError, UnicodeDecodeError):
            return None
