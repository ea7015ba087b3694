"""The machine around the engine: interfaces, addresses, routes.

Contract (`Host`; every implementation passes ``tests/test_host_conformance.py``): methods block for milliseconds and may be
called from any thread, so an event loop calls them through one; `watch` alone belongs to the loop's own thread.

Everything that a node makes carries its mark. A link is ours if its alias is `Host.mark`, which `mark_of` makes from the
run folder, so that several nodes on one host, each with a run folder of its own, never touch each other's things. A route
is ours if it has the protocol number `ROUTE_PROTOCOL` and leads to a link of ours. Only what is ours is ever changed or
removed.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Protocol

from routing.config import Address, Network

__all__ = [
    "ALIAS",
    "DEFAULT_RUN_DIR",
    "QUEUE_LENGTH",
    "ROUTE_PROTOCOL",
    "Host",
    "HostError",
    "Interface",
    "Watch",
    "mark_of",
    "require_mark",
]

ALIAS = "pyflannel-dp"
"""The mark of the node with the default run folder; those of others begin with it."""

DEFAULT_RUN_DIR = Path("/run/pyflannel-dp")

ROUTE_PROTOCOL = 241
"""Ours among the numbers that the kernel leaves to routing daemons (include/uapi/linux/rtnetlink.h, RTPROT_*)."""

QUEUE_LENGTH = 1000
"""Packets in the device's transmit queue; flannel leaves the TUN driver's 500, which overflows under load."""

_LONGEST_ALIAS = 254  # bytes; one less than the kernel takes (IFALIASZ - 1), which counts the final zero that we send


class HostError(Exception):
    """The machine refuses; the text says what was tried, why it failed, and what to do."""


def mark_of(run_dir: Path) -> str:
    """The mark of the node whose run folder is `run_dir`: `ALIAS`, for another folder than the default with its path.

    A path that is too long for an alias, or is no text, is replaced by its SHA-256, of which 32 hex digits are kept.
    """
    folder = run_dir.resolve()
    if folder == DEFAULT_RUN_DIR.resolve():
        return ALIAS
    mark = f"{ALIAS}:{folder}"
    if mark.isprintable() and len(os.fsencode(mark)) <= _LONGEST_ALIAS:  # a name that is not UTF-8 is not printable
        return mark
    return f"{ALIAS}:{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}"


def require_mark(mark: str) -> str:
    """`mark`, unless it is empty: every link without an alias would be ours. Raises ValueError."""
    if not mark:
        raise ValueError("a host needs a mark: an empty one would make all links without an alias ours")
    return mark


@dataclass(frozen=True)
class Interface:
    """A network interface. `mtu` in bytes; `kind` as in ``ip -d link`` (empty for hardware); `udp_port` of a VXLAN one.

    `is_up` says whether it is switched on, `has_carrier` whether packets can leave: there is a cable, the other end is up,
    or, of a TUN, a process is attached. An interface that is down has none. `queue_length` in packets;
    `superpacket_limit` as in `Host.configure_device`; `accepts_own_source` says whether IPv4 packets whose source is an
    address of the host are let in (the sysctl accept_local).
    """

    name: str
    index: int
    mtu: int
    addresses: tuple[IPv4Interface | IPv6Interface, ...] = ()
    is_up: bool = True
    kind: str = ""
    alias: str = ""
    udp_port: int | None = None
    has_carrier: bool = True
    queue_length: int = 0
    superpacket_limit: int = 0
    accepts_own_source: bool = False


class Watch(Protocol):
    """What `Host.watch` returns."""

    def close(self) -> None:
        """Watch no more; nothing is called from now on. On the loop's thread; may be called twice."""


class Host(Protocol):
    """What a node needs of its machine."""

    @property
    def mark(self) -> str:
        """The alias that our device carries."""

    def interfaces(self, names: Collection[str] | None = None) -> list[Interface]:
        """All interfaces with their addresses, by index; or those of `names` that there are, which costs less."""

    def default_interface(self, family: int) -> str | None:
        """The name of the interface that the default route of `family` (4 or 6) leaves by."""

    def interface_towards(self, address: Address) -> str | None:
        """The name of the interface that packets to `address` leave by; None if there is no route."""

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """Give the TUN `name` its addresses (as /32 and /128), MTU, queue length and mark, have it accept its own source,
        and bring it up.

        Of the families in `addresses` it has just these afterwards, and link-local ones, which are not ours; addresses of a
        family that is not among them stay. `superpacket_limit` is how long a packet the kernel may hand over for us to cut
        up, in bytes (gso_max_size). What is set already stays. Raises HostError, also if `name` is no TUN, or another's.
        """

    def add_route(self, network: Network, device: str) -> None:
        """A route to `network` through `device`. One of ours through another device of ours gives way to it.

        Raises HostError if somebody else has a route to `network`.
        """

    def remove_route(self, network: Network, device: str) -> None:
        """Remove our route to `network` through `device`; others stay, and what is gone is no error. Raises HostError."""

    def routes(self) -> list[tuple[Network, str]]:
        """Our routes: network and device."""

    def remove_device(self, name: str) -> None:
        """Remove our TUN `name`, with its addresses and all routes through it; what is gone is no error.

        Raises HostError if it is not ours, or a process is attached to it.
        """

    def remove_ours(self) -> list[str]:
        """Remove all devices of ours, with their routes; says what was removed.

        Raises HostError, before anything is removed, if a process is attached to one.
        """

    def watch(self, changed: Callable[[], None]) -> Watch:
        """Call `changed` from the running event loop soon after a link, an address or a route has changed.

        Nothing is said of what it was: whoever is called reads everything again. A burst of changes makes few calls, at
        least one after its last. Raises HostError.
        """
