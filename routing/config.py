"""flannel's network configuration, parsed and checked.

Theory of operation: the JSON that flannel keeps under ``PREFIX/config`` (or in ``net-conf.json``) is read with the
leniency of Go's decoder, since existing clusters rely on it: keys match without regard to case, a network may have host
bits set. What flannel would ignore in silence is a warning here. The rules and defaults are those of flannel's
``pkg/subnet/config.go``; each family obeys the same ones with its own numbers, kept in `_RULES`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from encap import ipudp, vxlan

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

BACKEND_VXLAN = "vxlan"
BACKEND_UDP = "udp"


class ConfigError(ValueError):
    """The network configuration cannot be used; the text says which key, which value, and what would do."""


@dataclass(frozen=True)
class _Rules:
    """The numbers of one family."""

    prefix: str
    bits: int
    longest_network: int
    longest_subnet: int
    default_subnet: int

    def key(self, name: str) -> str:
        return self.prefix + name


_RULES = {4: _Rules("", 32, 28, 30, 24), 6: _Rules("IPv6", 128, 124, 126, 64)}


@dataclass(frozen=True)
class Pool:
    """Where subnets of one family come from.

    Subnets are `subnet_length` bits long, the first allocated is `minimum`, the last `maximum` (network addresses, on
    subnet boundaries).
    """

    network: Network
    subnet_length: int
    minimum: Address
    maximum: Address

    def fits(self, subnet: Network) -> bool:
        """Whether `subnet` could have been allocated from this pool."""
        return (
            subnet.version == self.network.version
            and subnet.prefixlen == self.subnet_length
            and int(self.minimum) <= int(subnet.network_address) <= int(self.maximum)
        )


@dataclass(frozen=True)
class Backend:
    """The backend's part: `type` in flannel's spelling, `vni` and `port` with their defaults filled in.

    `mtu` is the *underlay's* MTU in bytes, as flannel's key of that name means it, or None to take the interface's.
    """

    type: str = BACKEND_UDP
    vni: int = vxlan.DEFAULT_VNI
    port: int = ipudp.DEFAULT_PORT
    mtu: int | None = None


@dataclass(frozen=True)
class NetworkConfig:
    """A whole configuration. `warnings` are sentences for the operator."""

    ipv4: Pool | None
    ipv6: Pool | None
    backend: Backend
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of the families that are on, IPv4 first."""
        return tuple(pool for pool in (self.ipv4, self.ipv6) if pool is not None)


_TOP_KEYS = [
    "EnableIPv4",
    "EnableIPv6",
    "EnableNFTables",
    "Network",
    "IPv6Network",
    "SubnetLen",
    "SubnetMin",
    "SubnetMax",
    "IPv6SubnetLen",
    "IPv6SubnetMin",
    "IPv6SubnetMax",
    "Backend",
]
_BACKEND_KEYS = {
    BACKEND_VXLAN: ["Type", "VNI", "Port", "GBP", "DirectRouting", "Learning", "MTU"],
    BACKEND_UDP: ["Type", "Port"],
}
_NOT_CARRIED_OUT = ("GBP", "DirectRouting", "Learning")


def parse_config(text: str) -> NetworkConfig:
    """Parse and check the JSON of a network configuration. Raises ConfigError."""
    try:
        raw = load_json(text)
    except ValueError as error:
        raise ConfigError(f"the network configuration is not JSON: {error}") from None
    warnings: list[str] = []
    keys = _canonical(raw, _TOP_KEYS, "the network configuration", warnings)
    ipv4 = _pool(keys, 4, warnings) if _flag(keys, "EnableIPv4", True) else None
    ipv6 = _pool(keys, 6, warnings) if _flag(keys, "EnableIPv6", False) else None
    if ipv4 is None and ipv6 is None:
        raise ConfigError("EnableIPv4 is false and EnableIPv6 is not true: at least one family must be on")
    backend = _backend(keys.get("Backend"), warnings)
    return NetworkConfig(ipv4, ipv6, backend, tuple(warnings))


def load_json(text: str) -> Any:
    """json.loads, with ValueError as the only way to fail: nesting beyond Python's stack is one too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def strict_text(value: Any) -> str:
    """`value`, if it is text that ``ipaddress`` may read as an address. Raises ValueError.

    That module also takes numbers, and zones like fe80::1%eth0, neither of which is meant in a configuration or a lease.
    """
    if not isinstance(value, str) or "%" in value:
        raise ValueError(f"{value!r} is not an address")
    return value


def require_host_address(address: Address) -> Address:
    """`address`, if a host can have it as its own on a network. Raises ValueError."""
    if address.is_multicast or address.is_unspecified or address.is_loopback or address == IPv4Address("255.255.255.255"):
        raise ValueError(f"{address} is not the address of a host")
    return address


def _canonical(raw: Any, known: list[str], where: str, warnings: list[str]) -> dict[str, Any]:
    """`raw` with its keys in flannel's spelling; unknown ones dropped with a warning."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a JSON object, not {type(raw).__name__}")
    spelling = {name.lower(): name for name in known}
    found: dict[str, Any] = {}
    for key, value in raw.items():
        name = spelling.get(key.lower())
        if name is None:
            warnings.append(f"{where} has the unknown key {key!r}; it is ignored")
        elif value is not None:
            found[name] = value
    return found


def _flag(keys: Mapping[str, Any], name: str, default: bool) -> bool:
    value = keys.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return value


def _integer(keys: Mapping[str, Any], name: str, default: int, lowest: int, highest: int) -> int:
    value = keys.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if not lowest <= value <= highest:
        raise ConfigError(f"{name} is {value}, but must lie in {lowest}..{highest}")
    return value


def _pool(keys: Mapping[str, Any], version: int, warnings: list[str]) -> Pool:
    rules = _RULES[version]
    network = _network(keys, rules, version, warnings)
    longest = rules.longest_subnet
    shortest = network.prefixlen + 2
    length = _integer(keys, rules.key("SubnetLen"), 0, 0, rules.bits)
    if length == 0:
        fits = network.prefixlen <= rules.default_subnet - 2
        length = rules.default_subnet if fits else shortest
    if not shortest <= length <= longest:
        raise ConfigError(
            f"{rules.key('SubnetLen')} is {length}, but with the network {network} it must lie in {shortest}..{longest}"
        )
    size = 1 << (rules.bits - length)
    first = network.network_address + size
    last = network.network_address + (network.num_addresses - size)
    minimum = _bound(keys, rules.key("SubnetMin"), first, network, size)
    maximum = _bound(keys, rules.key("SubnetMax"), last, network, size)
    if int(minimum) > int(maximum):
        raise ConfigError(f"{rules.key('SubnetMin')} {minimum} lies behind {rules.key('SubnetMax')} {maximum}")
    return Pool(network, length, minimum, maximum)


def _network(keys: Mapping[str, Any], rules: _Rules, version: int, warnings: list[str]) -> Network:
    name = rules.key("Network")
    value = keys.get(name)
    if value is None:
        raise ConfigError(f"IPv{version} is on, but {name} is missing")
    try:
        network = ip_network(strict_text(value), strict=False)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, which is not a network like 10.244.0.0/16 or fd00:10::/48") from None
    if network.version != version:
        raise ConfigError(f"{name} is {value}, but must be an IPv{version} network")
    if network.prefixlen > rules.longest_network:
        raise ConfigError(f"{name} is {value}, but may be a /{rules.longest_network} at the smallest")
    if str(network) != value and network.network_address != ip_address(str(value).split("/")[0]):
        warnings.append(f"{name} is {value}, which has host bits set; {network} is used")
    return network


def _bound(keys: Mapping[str, Any], name: str, default: Address, network: Network, size: int) -> Address:
    value = keys.get(name)
    if value is None:
        return default
    try:
        address = ip_address(strict_text(value))
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, which is not an address") from None
    if address.version != network.version or address not in network:
        raise ConfigError(f"{name} is {address}, which is not inside {network}")
    if int(address) % size:
        lower = ip_address(int(address) - int(address) % size)
        raise ConfigError(f"{name} is {address}, which is not the start of a subnet; {lower} is the one below it")
    return address


def _backend(raw: Any, warnings: list[str]) -> Backend:
    if raw is None:
        return Backend()
    if not isinstance(raw, dict):
        raise ConfigError(f"Backend must be a JSON object, not {type(raw).__name__}")
    kind = str(
        next((value for key, value in raw.items() if key.lower() == "type" and value is not None), BACKEND_UDP)
    ).lower()
    if kind not in _BACKEND_KEYS:
        raise ConfigError(f"Backend.Type is {kind!r}; this program carries {BACKEND_VXLAN} and {BACKEND_UDP}, nothing else")
    keys = _canonical(raw, _BACKEND_KEYS[kind], "Backend", warnings)
    warnings += [f"Backend.{name} is set; it is not carried out here" for name in _NOT_CARRIED_OUT if keys.get(name)]
    default_port = vxlan.DEFAULT_PORT if kind == BACKEND_VXLAN else ipudp.DEFAULT_PORT
    return Backend(
        type=kind,
        vni=_integer(keys, "VNI", vxlan.DEFAULT_VNI, 0, vxlan.MAX_VNI),
        port=_integer(keys, "Port", default_port, 0, 65535) or default_port,
        mtu=_integer(keys, "MTU", 0, 0, 65535) or None,
    )
