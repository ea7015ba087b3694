"""subnet.env, the file in which flannel tells CNI plugins and container runtimes of the node's subnet.

Written as flannel writes it (pkg/subnet/subnet.go, WriteSubnetFile): FLANNEL_SUBNET is the first *usable* address with the
prefix length, lines of a family that is off are left out. Read with patience, since the previous content is only a hint
for the next allocation: whatever is not understood counts as absent.
"""

from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path

from routing.allocator import Subnets
from routing.config import Network
from routing.durable import write_whole

DEFAULT_PATH = Path("/run/flannel/subnet.env")


@dataclass(frozen=True)
class SubnetFile:
    """What the file says. `network`/`subnet` and the IPv6 pair are None for a family that is off; `mtu` in bytes."""

    network: Network | None
    subnet: Network | None
    ipv6_network: Network | None
    ipv6_subnet: Network | None
    mtu: int
    ip_masq: bool = False

    def render(self) -> str:
        """The file's text."""
        lines = []
        for prefix, network, subnet in (
            ("FLANNEL_", self.network, self.subnet),
            ("FLANNEL_IPV6_", self.ipv6_network, self.ipv6_subnet),
        ):
            if network is not None and subnet is not None:
                first = subnet.network_address + 1
                lines += [f"{prefix}NETWORK={network}", f"{prefix}SUBNET={first}/{subnet.prefixlen}"]
        lines += [f"FLANNEL_MTU={self.mtu}", f"FLANNEL_IPMASQ={'true' if self.ip_masq else 'false'}"]
        return "\n".join(lines) + "\n"


def write(path: Path, content: SubnetFile) -> None:
    """Replace the file at `path`, atomically and readable by all; its folder is made if missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.render(), mode=0o644)


def read_text(path: Path) -> str | None:
    """What is in the file at `path`; None if there is none. Raises OSError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def read_previous(path: Path) -> Subnets:
    """The subnets that the file at `path` names; None for what is missing, unreadable or nonsense."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Subnets()
    values = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals:
            values[name.strip()] = value.strip().strip("\"'")
    ipv4 = _interface(values.get("FLANNEL_SUBNET"))
    ipv6 = _interface(values.get("FLANNEL_IPV6_SUBNET"))
    return Subnets(
        ipv4.network if isinstance(ipv4, IPv4Interface) else None,
        ipv6.network if isinstance(ipv6, IPv6Interface) else None,
    )


def _interface(value: str | None) -> IPv4Interface | IPv6Interface | None:
    """The first of a comma-separated list of addresses with prefix lengths."""
    try:
        return ip_interface((value or "").split(",")[0].strip())
    except ValueError:
        return None
