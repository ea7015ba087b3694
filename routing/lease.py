"""A lease: a subnet, the node that holds it, and their key and JSON in flannel's spelling.

Key:   ``10.5.34.0-24``, dual stack ``10.5.34.0-24&fc00:0:0:1::-64``; with IPv4 off the first part is ``0.0.0.0-0``, the
       zero value that flannel's ``MakeSubnetKey`` prints.
Value: ``{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:…"},
       "BackendV6Data":{…}}``; a node of the ``udp`` type has no BackendData, a v6-only node the PublicIP ``0.0.0.0``.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, TypeVar

from routing.config import Address, load_json, strict_text

_A = TypeVar("_A", IPv4Address, IPv6Address)
_HEX_BYTE = re.compile("[0-9A-Fa-f]{1,2}")
_NO_IPV4_KEY = "0.0.0.0-0"


class LeaseError(ValueError):
    """A key or value is not a lease in flannel's format; the text says which part is off."""


@dataclass(frozen=True)
class VtepData:
    """BackendData of a VXLAN node. `vni` is None in entries of old nodes, which hold the MAC alone."""

    vtep_mac: bytes
    vni: int | None = None


@dataclass(frozen=True)
class LeaseAttributes:
    """What a node says of itself in its lease."""

    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None
    backend_type: str
    backend_data: VtepData | None = None
    backend_v6_data: VtepData | None = None

    def to_json(self) -> str:
        """The value as flannel writes it."""
        out: dict[str, Any] = {
            "PublicIP": str(self.public_ip or IPv4Address(0)),
            "PublicIPv6": str(self.public_ipv6) if self.public_ipv6 else None,
            "BackendType": self.backend_type,
        }
        for name, data in (("BackendData", self.backend_data), ("BackendV6Data", self.backend_v6_data)):
            if data is not None:
                out[name] = {"VNI": data.vni, "VtepMAC": format_mac(data.vtep_mac)}
        return json.dumps(out, separators=(",", ":"))


@dataclass(frozen=True)
class Lease:
    """Who holds which subnets, until when.

    `expiration` is in seconds since the epoch; None means a reservation, which never expires. At least one of the two
    subnets is set.
    """

    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    attributes: LeaseAttributes
    expiration: float | None = None

    @cached_property
    def key(self) -> str:
        """The last part of the lease's key in the store."""
        return format_key(self.subnet, self.ipv6_subnet)

    def held_by(self, attributes: LeaseAttributes) -> bool:
        """Whether the node that describes itself as `attributes` holds this lease: flannel goes by PublicIP."""
        mine, its = attributes, self.attributes
        if mine.public_ip is not None or its.public_ip is not None:
            return mine.public_ip == its.public_ip
        return mine.public_ipv6 is not None and mine.public_ipv6 == its.public_ipv6


def format_key(subnet: IPv4Network | None, ipv6_subnet: IPv6Network | None) -> str:
    """The key of a pair of subnets. Raises ValueError if both are None."""
    if subnet is None and ipv6_subnet is None:
        raise ValueError("a lease needs a subnet")
    first = str(subnet).replace("/", "-") if subnet is not None else _NO_IPV4_KEY
    return first if ipv6_subnet is None else first + "&" + str(ipv6_subnet).replace("/", "-")


def parse_key(key: str) -> tuple[IPv4Network | None, IPv6Network | None]:
    """The subnets that `key` names. Raises LeaseError if it is not the key of a lease."""
    first, separator, second = key.partition("&")
    try:
        subnet = None if first == _NO_IPV4_KEY else IPv4Network(_slashed(first))
        ipv6_subnet = IPv6Network(_slashed(second)) if separator else None
    except ValueError:
        raise LeaseError(f"{key!r} is not the key of a lease (like 10.5.34.0-24)") from None
    if subnet is None and ipv6_subnet is None:
        raise LeaseError(f"{key!r} names no subnet")
    if format_key(subnet, ipv6_subnet) != key:
        raise LeaseError(f"{key!r} is not spelled as {format_key(subnet, ipv6_subnet)!r}")
    return subnet, ipv6_subnet


def _slashed(part: str) -> str:
    address, dash, length = part.rpartition("-")
    if not dash or not length.isascii() or not length.isdigit():
        raise ValueError(part)
    return strict_text(f"{address}/{length}")


def parse_attributes(text: str) -> LeaseAttributes:
    """The value of a lease. Raises LeaseError."""
    try:
        raw = load_json(text)
    except ValueError as error:
        raise LeaseError(f"the value is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise LeaseError("the value is not a JSON object")
    public_ip = _address(raw, "PublicIP", IPv4Address)
    public_ipv6 = _address(raw, "PublicIPv6", IPv6Address)
    if public_ip is None and public_ipv6 is None:
        raise LeaseError("neither PublicIP nor PublicIPv6 is given")
    return LeaseAttributes(
        public_ip=public_ip,
        public_ipv6=public_ipv6,
        backend_type=str(raw.get("BackendType") or ""),
        backend_data=_vtep_data(raw, "BackendData"),
        backend_v6_data=_vtep_data(raw, "BackendV6Data"),
    )


def _address(raw: dict[str, Any], name: str, kind: type[_A]) -> _A | None:
    value = raw.get(name)
    if value is None:
        return None
    try:
        address = kind(strict_text(value))
    except ValueError:
        raise LeaseError(f"{name} is {value!r}, which is not an address of its family") from None
    return None if address.is_unspecified else address


def _vtep_data(raw: dict[str, Any], name: str) -> VtepData | None:
    value = raw.get(name)
    if not isinstance(value, dict) or "VtepMAC" not in value:
        return None
    vni = value.get("VNI")
    return VtepData(parse_mac(value["VtepMAC"]), vni if isinstance(vni, int) else None)


def parse_mac(text: Any) -> bytes:
    """Six bytes from ``02:42:ac:11:00:02``. Raises LeaseError."""
    parts = text.split(":") if isinstance(text, str) else []
    if len(parts) != 6 or any(not _HEX_BYTE.fullmatch(part) for part in parts):
        raise LeaseError(f"{text!r} is not a MAC address (like 02:fd:c0:00:02:01)")
    return bytes(int(part, 16) for part in parts)


def require_unicast_mac(mac: bytes) -> bytes:
    """`mac`, if one device can have it (IEEE 802: the least bit of the first byte is 0). Raises LeaseError."""
    if mac[0] & 1 or not any(mac):
        raise LeaseError(f"{format_mac(mac)} is not the MAC address of one device")
    return mac


def format_mac(mac: bytes) -> str:
    """``02:42:ac:11:00:02`` from six bytes."""
    return mac.hex(":")


def derive_vtep_mac(address: Address) -> bytes:
    """The VTEP MAC of a node whose underlay address is `address`, when nobody chose another.

    Stable over restarts and computable by whoever configures a peer by hand: for IPv4 it is ``02:fd:`` and the four
    bytes of the address (192.0.2.1 → 02:fd:c0:00:02:01); for IPv6 ``06:`` and the first five bytes of the SHA-256 of
    the sixteen. Both are locally administered unicast addresses (IEEE 802, second-least bit of the first byte).
    """
    if address.version == 4:
        return b"\x02\xfd" + address.packed
    return b"\x06" + hashlib.sha256(address.packed).digest()[:5]


def vtep_macs(
    public_ip: IPv4Address | None, public_ipv6: IPv6Address | None, chosen: bytes | None
) -> tuple[bytes | None, bytes | None]:
    """The VTEP MACs of a node with these addresses, over IPv4 and over IPv6; None where it has no address.

    A `chosen` one is that of the IPv4 underlay, or of the IPv6 one if there is no other; what is not chosen is derived.
    """
    if public_ip is not None:
        return chosen or derive_vtep_mac(public_ip), derive_vtep_mac(public_ipv6) if public_ipv6 is not None else None
    return None, (chosen or derive_vtep_mac(public_ipv6)) if public_ipv6 is not None else None
