"""A topology as a TOML file.

Theory of operation: each table is read through `_Table`, which knows its place in the file and which keys it may have, so
that every complaint names the file, the table, the key, what stands there, and what may stand there. `Topology` itself
checks what the parts have to do with each other.
"""

import tomllib
from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, TypeVar

from dataplane.lab.hosts import UNDERLAY_MTU
from dataplane.lab.topology import DEFAULT_NETWORK, MOST_PODS, HostPlan, LinkPlan, Runs, Topology, TopologyError
from dataplane.underlay.link import LinkSpec, link_from_mapping
from encap.overhead import MINIMUM_IPV4_MTU
from routing.config import strict_text
from routing.route import FRAMING_IP, FRAMING_VXLAN

EXAMPLE = """\
# A lab for pyflannel-dp: pyflannel-dp lab FILE. What is commented out shows its default, or an example.

# network = "10.244.0.0/16"           # the overlay
ipv6_network = "fd00:10:244::/48"     # without it the overlay is IPv4 alone
# framing = "vxlan"                   # or "ip", the bare packet as in flannel's udp backend
# mtu = 1500                          # of the underlay
# seed = 0                            # of everything that chance does to frames
# options = ["--no-udp-gro"]          # more options for every node

[[host]]
# name = "h1"                         # h1, h2 ... if not given
# runs = "node"                       # "node", "kernel" (a kernel VXLAN device), or "nothing"
pods = 1                              # 0 if not given
# options = ["--v", "1"]              # more options for this node
# mtu = 1500                          # of its eth0; without it the underlay's

[[host]]
name = "far"
pods = 1

[[host]]
name = "kernel"
runs = "kernel"
pods = 1
# subnet = "10.244.200.0/24"          # kernel hosts only; the last free one if not given
# ipv6_subnet = "fd00:10:244:c8::/64"

# How frames cross from any host to any other. Without this table, and without [[link_between]], the kernel's bridge
# carries them, at full speed.
[link]
delay = "1ms"

# One direction between two hosts, both if so said. What is not said here is as in [link].
[[link_between]]
from = "h1"
to = "far"
both = true
delay = "20ms"
jitter = "2ms"
loss = "1%"
"""

_TOP_KEYS = ("network", "ipv6_network", "framing", "mtu", "seed", "options", "host", "link", "link_between")
_HOST_KEYS = ("name", "runs", "pods", "options", "mtu", "subnet", "ipv6_subnet")
_BETWEEN_KEYS = ("from", "to", "both")
_MOST_MTU = 65535
_LIKE = {IPv4Network: "10.244.0.0/16", IPv6Network: "fd00:10:244::/48"}
_T = TypeVar("_T")
_N = TypeVar("_N", IPv4Network, IPv6Network)


def load(path: Path) -> Topology:
    """The topology in the file at `path`. Raises TopologyError, also if it cannot be read."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path} cannot be read: {error}") from None


def parse(text: str, source: str = "the topology") -> Topology:
    """The topology in `text`, which is TOML; `source` is where it comes from. Raises TopologyError."""
    try:
        return _topology(_Table(tomllib.loads(text), "", _TOP_KEYS))
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{source} is not TOML: {error}") from None
    except ValueError as error:
        raise TopologyError(f"{source}: {error}") from None


def _topology(top: "_Table") -> Topology:
    default = top.mapping("link")
    return Topology(
        hosts=tuple(_host(raw, number) for number, raw in enumerate(top.tables("host"), 1)),
        network=top.network("network", IPv4Network) or DEFAULT_NETWORK,
        ipv6_network=top.network("ipv6_network", IPv6Network),
        framing=top.choice("framing", (FRAMING_VXLAN, FRAMING_IP), FRAMING_VXLAN),
        mtu=top.number("mtu", UNDERLAY_MTU, MINIMUM_IPV4_MTU, _MOST_MTU),
        seed=top.number("seed", 0, 0, (1 << 63) - 1),
        options=top.texts("options"),
        link=_spec("[link]", default),
        links=tuple(
            link for number, raw in enumerate(top.tables("link_between"), 1) for link in _links(raw, number, default)
        ),
    )


def _host(raw: object, number: int) -> HostPlan:
    table = _Table(raw, f"[[host]] number {number}", _HOST_KEYS)
    return HostPlan(
        name=table.text("name", f"h{number}"),
        runs=Runs(table.choice("runs", tuple(Runs), Runs.NODE)),
        pods=table.number("pods", 0, 0, MOST_PODS),
        options=table.texts("options"),
        mtu=table.number("mtu", 0, MINIMUM_IPV4_MTU, _MOST_MTU) or None,
        subnet=table.network("subnet", IPv4Network),
        ipv6_subnet=table.network("ipv6_subnet", IPv6Network),
    )


def _links(raw: object, number: int, default: Mapping[str, Any]) -> list[LinkPlan]:
    """The one or two links of a [[link_between]], whose own keys count before those of [link]."""
    where = f"[[link_between]] number {number}"
    table = _Table(raw, where, None)
    source, target = table.text("from"), table.text("to")
    own = {key: value for key, value in table.keys.items() if key not in _BETWEEN_KEYS}
    spec = _spec(where, {**default, **own})
    pairs = [(source, target), (target, source)] if table.flag("both") else [(source, target)]
    return [LinkPlan(*pair, spec) for pair in pairs]


def _spec(where: str, mapping: Mapping[str, Any]) -> LinkSpec:
    try:
        return link_from_mapping(mapping)
    except ValueError as error:
        raise TopologyError(f"{where}: {error}") from None


class _Table:
    """A table of the file: `where` it is, and which keys it may have (None: whoever reads the rest says)."""

    def __init__(self, raw: object, where: str, allowed: Collection[str] | None) -> None:
        self._prefix = f"{where}: " if where else ""
        if not isinstance(raw, dict):
            raise TopologyError(f"{self._prefix}must be a table, not {raw!r}")
        self.keys: dict[str, Any] = raw
        for key in raw:
            if allowed is not None and key not in allowed:
                raise TopologyError(f"{self._prefix}unknown key {key!r}; the keys are {', '.join(allowed)}")

    def text(self, key: str, default: str | None = None) -> str:
        """A string that must be there if there is no default."""
        if key not in self.keys and default is None:
            raise TopologyError(f"{self._prefix}{key} is missing")
        return self._of(key, default or "", lambda value: isinstance(value, str), "a string")

    def flag(self, key: str) -> bool:
        """True or false; false if it is not there."""
        return self._of(key, False, lambda value: isinstance(value, bool), "true or false")

    def number(self, key: str, default: int, lowest: int, highest: int) -> int:
        """A whole number within bounds."""

        def fits(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest

        return self._of(key, default, fits, f"a whole number from {lowest} to {highest}")

    def choice(self, key: str, choices: Collection[str], default: str) -> str:
        """One of several words."""
        return self._of(key, default, lambda value: value in choices, "one of " + ", ".join(choices))

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if it is not there."""

        def fits(value: object) -> bool:
            return isinstance(value, list) and all(isinstance(one, str) for one in value)

        return tuple(self._of(key, [], fits, "a list of strings"))

    def network(self, key: str, kind: type[_N]) -> _N | None:
        """A network, or None."""
        if key not in self.keys:
            return None
        value = self.keys[key]
        try:
            return kind(strict_text(value))
        except ValueError:
            raise TopologyError(f"{self._prefix}{key} is {value!r}, but must be a network like {_LIKE[kind]}") from None

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A table within the table; empty if it is not there."""
        return self._of(key, {}, lambda value: isinstance(value, dict), f"a table, written [{key}]")

    def tables(self, key: str) -> list[Any]:
        """An array of tables; empty if it is not there."""
        return self._of(key, [], lambda value: isinstance(value, list), f"an array of tables, written [[{key}]]")

    def _of(self, key: str, default: _T, fits: Callable[[Any], bool], wanted: str) -> _T:
        """What stands there; it is of the default's type if it `fits`."""
        value: _T = self.keys.get(key, default)
        if key in self.keys and not fits(value):
            raise TopologyError(f"{self._prefix}{key} is {value!r}, but must be {wanted}")
        return value
