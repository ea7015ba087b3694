"""What a node wants of its machine, against what there is.

Theory of operation: `differences` is a pure comparison, which an operator can read; `reconcile` reads the machine,
compares, and carries out what is missing. It is called at each change that the machine tells of and every few seconds
besides, and most of the time there is nothing to do. The families are independent of each other: a `Wanted` speaks for
those that its addresses and networks are of, and what the device has of another family stays.

`set_up`, at start, compares more: the device's tuning, which only makes it better or faster. Later it is left to an
administrator who knows his machine, and to a kernel that does not grant a wish. A device that was kept, and still is as
wanted, is taken over without a single change.

Stale is what is ours and not wanted: routes with our protocol number through our device, and addresses on it. The device
belongs to us with all its addresses; routes of others stay, through our device or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.host import QUEUE_LENGTH, Host, Interface
from routing.config import Address, Network


@dataclass(frozen=True)
class Wanted:
    """What the TUN `device` is to have: `addresses` (as /32 and /128), and routes to `networks`.

    `mtu` in bytes; `superpacket_limit` as in `Host.configure_device`.
    """

    device: str
    mtu: int
    addresses: tuple[Address, ...]
    networks: tuple[Network, ...]
    superpacket_limit: int

    @property
    def families(self) -> frozenset[int]:
        """Those that it speaks for (4, 6)."""
        return frozenset(one.version for one in (*self.addresses, *self.networks))


def differences(wanted: Wanted, interfaces: Sequence[Interface], routes: Sequence[tuple[Network, str]]) -> list[str]:
    """What is not as wanted, each in words; empty if all is well. `routes` are ours, from `Host.routes`."""
    name = wanted.device
    device = next((one for one in interfaces if one.name == name), None)
    if device is None:
        return [f"{name} is gone"]
    found = [] if device.is_up else [f"{name} is down"]
    if device.mtu != wanted.mtu:
        found.append(f"the MTU of {name} is {device.mtu}, not {wanted.mtu}")
    found += _differing_addresses(wanted, device)
    found += [f"the route to {network} is gone" for network in _missing_routes(wanted, routes)]
    found += [f"the route to {network} through {name} is stale" for network in _stale_routes(wanted, routes)]
    return found


def _differing_addresses(wanted: Wanted, device: Interface) -> list[str]:
    own = {(one.ip, one.network.prefixlen) for one in device.addresses}
    right = {(address, address.max_prefixlen) for address in wanted.addresses}
    families = {address.version for address in wanted.addresses}
    found = [f"{device.name} lacks the address {address}" for address, length in sorted(right - own, key=str)]
    for address, length in sorted(own - right, key=str):
        if address.version in families and not address.is_link_local:
            shown = address if length == address.max_prefixlen else f"{address}/{length}"
            found.append(f"{device.name} has the stale address {shown}")
    return found


def _missing_routes(wanted: Wanted, routes: Sequence[tuple[Network, str]]) -> list[Network]:
    return [network for network in wanted.networks if (network, wanted.device) not in routes]


def _stale_routes(wanted: Wanted, routes: Sequence[tuple[Network, str]]) -> list[Network]:
    through_us = (network for network, device in routes if device == wanted.device)
    return [one for one in through_us if one.version in wanted.families and one not in wanted.networks]


def _untuned(wanted: Wanted, device: Interface) -> list[str]:
    """What of the device's tuning is not as `Host.configure_device` makes it."""
    name, found = device.name, []
    if device.queue_length != QUEUE_LENGTH:
        found.append(f"the queue of {name} holds {device.queue_length} packets, not {QUEUE_LENGTH}")
    if device.superpacket_limit != wanted.superpacket_limit:
        found.append(f"superpackets of {name} have up to {device.superpacket_limit} bytes, not {wanted.superpacket_limit}")
    if not device.accepts_own_source:
        found.append(f"{name} does not accept its own address as a source (accept_local)")
    return found


def reconcile(host: Host, wanted: Wanted, *, tune: bool = False) -> list[str]:
    """Make the machine as wanted, if it is not; says what was mended. With `tune` that the tuning is not as wanted counts,
    too. Blocks. Raises HostError, `wanted.device` missing included."""
    interfaces = host.interfaces([wanted.device])
    found = differences(wanted, interfaces, host.routes())
    if tune:
        found += [one for device in interfaces for one in _untuned(wanted, device)]
    if found:
        _carry_out(host, wanted)
    return found


def set_up(host: Host, wanted: Wanted) -> list[str]:
    """As `reconcile`, for a device that was just opened: its tuning is looked at, too. Raises HostError."""
    return reconcile(host, wanted, tune=True)


def _carry_out(host: Host, wanted: Wanted) -> None:
    """The wanted routes come before the stale ones go: a stale one may have carried part of their traffic."""
    host.configure_device(wanted.device, wanted.addresses, wanted.mtu, wanted.superpacket_limit)
    routes = host.routes()  # read anew: a device without our mark has it now, and one that was down had none
    for network in _missing_routes(wanted, routes):
        host.add_route(network, wanted.device)
    for network in _stale_routes(wanted, routes):
        host.remove_route(network, wanted.device)


def remove_stale_devices(host: Host, device: str) -> list[str]:
    """Remove devices of ours but `device`, which an earlier start with other options kept; says which. Raises HostError."""
    stale = [one.name for one in host.interfaces() if one.alias == host.mark and one.kind == "tun" and one.name != device]
    for name in stale:
        host.remove_device(name)
    return stale
