"""What the operator chose for a node, and the error for what cannot be had of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.host.external import Choice
from dataplane.offload import Offload
from dataplane.underlay.udp import SOURCE_PORTS
from routing import subnetfile
from routing.config import Network

if TYPE_CHECKING:
    from dataplane.underlay.link import LinkSpec

REACQUIRE, STOP = "reacquire", "stop"
LOST_LEASE_POLICIES = (REACQUIRE, STOP)
"""What a node does whose lease is gone from the store or somebody else's: take one anew, the same subnet if it is free; or
end."""


class NodeError(Exception):
    """The node cannot start or go on; the text says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """What the operator chose.

    `renew_margin` and `resync` are in seconds: how long before its end the lease is renewed, at the latest at half its
    life; how often the host is looked at, besides when it says that something changed. `device` empty means flannel's
    name for the framing. `ip_masq` asks for masquerading except towards `masq_exclude`, `forward_rules` for accepting
    what is forwarded from and to the network.

    `capture` is the file for packets, `trace` whether each is told on stderr, `faults` what our own link is to do to them.
    """

    choice: Choice = field(default_factory=Choice)
    device: str = ""
    vtep_mac: bytes | None = None
    check_sources: bool = True
    source_ports: int = SOURCE_PORTS
    offloads_off: frozenset[Offload] = frozenset()
    ipv6_underlay: bool = False
    renew_margin: float = 3600.0
    lost_lease: str = REACQUIRE
    resync: float = 5.0
    ip_masq: bool = False
    masq_fully_random: bool = True
    masq_exclude: tuple[Network, ...] = ()
    forward_rules: bool = False
    subnet_file: Path = subnetfile.DEFAULT_PATH
    run_dir: Path = Path("/run/pyflannel-dp")
    capture: Path | None = None
    trace: bool = False
    faults: "LinkSpec | None" = None
