"""Which interface the node uses as its underlay, chosen as flanneld chooses it.

Theory of operation: a pure decision over a snapshot of the host's interfaces, in flannel's order
(pkg/ipmatch/match.go): each ``--iface`` (an address, or a name) until one exists; each ``--iface-regex`` over all
addresses first, then over all names; ``--iface-can-reach``; the interface of the default route. An address that an
option names is the one that is used; otherwise it is the interface's first of the family that is global, a link-local
one only if there is no other for IPv4 and never for IPv6. What is published (`public_ip`) is the same unless
``--public-ip`` says otherwise, as behind a NAT.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address

from dataplane.host import ALIAS, Host, HostError, Interface
from routing.config import Address, Network


@dataclass(frozen=True)
class Choice:
    """The options; all empty means the default route's interface."""

    iface: Sequence[str] = ()
    iface_regex: Sequence[str] = ()
    iface_can_reach: Address | None = None
    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None


@dataclass(frozen=True)
class External:
    """The result: the interface, its address of each family, and what the lease publishes. `mtu` in bytes."""

    name: str
    mtu: int
    ipv4: IPv4Address | None
    ipv6: IPv6Address | None
    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None


def choose(host: Host, choice: Choice, *, avoid: Collection[Network] = (), current: External | None = None) -> External:
    """The external interface. Raises HostError saying what was looked for and what there is.

    Devices of this program are no candidates, nor are addresses in `avoid`, which are this node's own pods': a tunnel must
    not go through itself. An address of the `current` one that its interface still has stays: another one that was added,
    such as one that moves between hosts, is no reason to move.
    """
    interfaces = [_without(one, avoid) for one in host.interfaces() if not one.alias.startswith(ALIAS)]
    interface, wanted = _find(host, interfaces, choice)
    if not interface.is_up:
        raise HostError(f"the interface {interface.name} is down: bring it up (ip link set {interface.name} up)")
    ipv4 = wanted if isinstance(wanted, IPv4Address) else _first_ipv4(interface, current.ipv4 if current else None)
    ipv6 = wanted if isinstance(wanted, IPv6Address) else _first_ipv6(interface, current.ipv6 if current else None)
    if ipv4 is None and ipv6 is None:
        raise HostError(f"the interface {interface.name} has no address that could be the underlay's")
    return External(interface.name, interface.mtu, ipv4, ipv6, choice.public_ip or ipv4, choice.public_ipv6 or ipv6)


def _without(interface: Interface, networks: Collection[Network]) -> Interface:
    """`interface` without its addresses in `networks`."""
    kept = tuple(own for own in interface.addresses if not any(own.ip in network for network in networks))
    return interface if len(kept) == len(interface.addresses) else replace(interface, addresses=kept)


def _find(host: Host, interfaces: Sequence[Interface], choice: Choice) -> tuple[Interface, Address | None]:
    """The interface, and the address that an option named."""
    for text in choice.iface:
        found = _by_address_or_name(interfaces, text)
        if found is not None:
            return found
    for pattern in choice.iface_regex:
        found = _by_pattern(interfaces, pattern)
        if found is not None:
            return found
    if choice.iface or choice.iface_regex:
        asked = ", ".join([*choice.iface, *(f"/{pattern}/" for pattern in choice.iface_regex)])
        raise HostError(f"no interface matches {asked}; there are: {_describe(interfaces)}")
    if choice.iface_can_reach is not None:
        name = host.interface_towards(choice.iface_can_reach)
        if name is None:
            raise HostError(f"there is no route to {choice.iface_can_reach} (--iface-can-reach)")
        return _named(interfaces, name), None
    name = host.default_interface(4) or host.default_interface(6)
    if name is None:
        raise HostError(
            f"there is no default route to tell the external interface by; name it with --iface (there are: "
            f"{_describe(interfaces)})"
        )
    return _named(interfaces, name), None


def _by_address_or_name(interfaces: Sequence[Interface], text: str) -> tuple[Interface, Address | None] | None:
    try:
        address = ip_address(text)
    except ValueError:
        return next(((one, None) for one in interfaces if one.name == text), None)
    holders = (one for one in interfaces if any(own.ip == address for own in one.addresses))
    return next(((one, address) for one in holders), None)


def _by_pattern(interfaces: Sequence[Interface], pattern: str) -> tuple[Interface, Address | None] | None:
    for one in interfaces:
        for own in one.addresses:
            if re.search(pattern, str(own.ip)):
                return one, own.ip
    return next(((one, None) for one in interfaces if re.search(pattern, one.name)), None)


def _named(interfaces: Sequence[Interface], name: str) -> Interface:
    found = next((one for one in interfaces if one.name == name), None)
    if found is None:
        raise HostError(f"the way out leads through {name}, which is a device of the overlay itself")
    return found


def _first_ipv4(interface: Interface, current: IPv4Address | None) -> IPv4Address | None:
    own = [one.ip for one in interface.addresses if isinstance(one.ip, IPv4Address)]
    if current in own:
        return current
    return next((ip for ip in own if not ip.is_link_local), own[0] if own else None)


def _first_ipv6(interface: Interface, current: IPv6Address | None) -> IPv6Address | None:
    own = [one.ip for one in interface.addresses if isinstance(one.ip, IPv6Address)]
    if current in own:
        return current
    return next((ip for ip in own if not ip.is_link_local), None)


def _describe(interfaces: Sequence[Interface]) -> str:
    return "; ".join(
        f"{one.name} ({', '.join(str(own.ip) for own in one.addresses) or 'no address'})" for one in interfaces
    )
