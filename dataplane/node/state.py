"""What a node has come to have, and how it tells of it."""

from pathlib import Path
from typing import Any

from dataplane.device import Device
from dataplane.engine import Direction, Engine
from dataplane.host.external import External
from dataplane.node.settings import NodeError, Settings
from dataplane.node.troubles import Troubles
from dataplane.offload import Offloads
from dataplane.traffic import RouteTraffic
from dataplane.underlay import Underlay
from dataplane.verdict import by_name
from encap.overhead import MINIMUM_IPV4_MTU, MINIMUM_IPV6_MTU, overhead
from encap.vxlan import HEADER_LENGTH
from routing import route
from routing.config import BACKEND_UDP, BACKEND_VXLAN, Address, Network, NetworkConfig, Pool
from routing.lease import Lease, LeaseAttributes, VtepData, format_mac, vtep_macs
from routing.leaseset import LeaseSet
from routing.route import FRAMING_IP, FRAMING_VXLAN
from routing.table import Identity, Table

_LONGEST_IP_PACKET = 65535
_UNREADY = ("device", "firewall", "subnet file")
"""The concerns without which pods are cut off, or are told something wrong."""
_FRAMING_OF_BACKEND = {BACKEND_VXLAN: FRAMING_VXLAN, BACKEND_UDP: FRAMING_IP}


class State:
    """The parts of a node. Those that are only declared here are set one after the other while it starts, and all of them
    before `engine`.

    `wanted` is what our lease should say of us; it is ahead of `lease.attributes` while the store has not been told.
    `family_failures` are the families that were left out at start, and why. `restored` counts how often something of ours
    on the host was put back, `rules_restored` how often the firewall's rules were.
    """

    external: External
    config: NetworkConfig
    underlay: Underlay
    mtu: int
    device_name: str
    wanted: LeaseAttributes
    lease: Lease
    peers: LeaseSet
    table: Table
    device: Device
    engine: Engine

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.offloads = Offloads(settings.offloads_off)
        self.vtep_mac: bytes | None = None
        self.vtep_mac_v6: bytes | None = None
        self.unreachable: list[route.Unreachable] = []
        self.family_failures: dict[int, str] = {}
        self.troubles = Troubles()
        self.is_serving = False
        """Whether the start is over and the stop has not begun."""
        self.is_ending = False
        self.has_lease = False
        self.restored = 0
        self.rules_restored = 0
        self.renewed = 0

    @property
    def is_ready(self) -> bool:
        """Whether the node carries packets for a lease of its own, with all on the host as that lease wants it."""
        return self.is_serving and self.has_lease and not any(concern in self.troubles for concern in _UNREADY)

    @property
    def framing(self) -> str:
        """By the configuration's backend type."""
        return _FRAMING_OF_BACKEND[self.config.backend.type]

    @property
    def header_length(self) -> int:
        """What the framing puts between the UDP header and the inner packet, in bytes."""
        return HEADER_LENGTH if self.framing == FRAMING_VXLAN else 0

    @property
    def pools(self) -> list[Pool]:
        """Those of the families that were not left out."""
        return [pool for pool in self.config.pools if pool.network.version not in self.family_failures]

    def subnet(self, family: int) -> Network:
        """Our subnet of a family that is on."""
        subnet = self.lease.subnet if family == 4 else self.lease.ipv6_subnet
        assert subnet is not None
        return subnet

    def describe_ourselves(self) -> LeaseAttributes:
        """What our lease should say of us.

        The VTEP MACs follow from the addresses that we had first, so that they outlive a restart, and stay for as long
        as we run: an address that changes is the only change then.
        """
        families, vni = self.underlay.families, self.config.backend.vni
        public_ip = self.external.public_ip if 4 in families else None
        public_ipv6 = self.external.public_ipv6 if 6 in families else None
        if self.framing == FRAMING_VXLAN:
            mac, mac_v6 = vtep_macs(public_ip, public_ipv6, self.settings.vtep_mac)
            self.vtep_mac, self.vtep_mac_v6 = self.vtep_mac or mac, self.vtep_mac_v6 or mac_v6
        return LeaseAttributes(
            public_ip,
            public_ipv6,
            route.BACKEND_OF_FRAMING[self.framing],
            VtepData(self.vtep_mac, vni) if self.vtep_mac and public_ip else None,
            VtepData(self.vtep_mac_v6, vni) if self.vtep_mac_v6 and public_ipv6 else None,
        )

    def identity(self) -> Identity:
        """What the table says of us."""
        network = self.config.ipv4.network if self.config.ipv4 else None
        assert network is None or network.version == 4
        return Identity(
            framing=self.framing,
            subnet=self.lease.subnet,
            ipv6_subnet=self.lease.ipv6_subnet,
            port=self.config.backend.port,
            vni=self.config.backend.vni,
            vtep_mac=self.vtep_mac,
            vtep_mac_v6=self.vtep_mac_v6,
            check_sources=self.settings.check_sources,
            network=network,
        )

    def report(self, now: float) -> dict[str, Any]:
        """The parts of `Node.status` that are known so far, at `now` in seconds since the epoch."""
        if self.is_ending or not hasattr(self, "engine"):
            state = "stopping" if self.is_ending else "starting"
            return {"state": state, "ready": False, "failures": self.troubles.report()}
        engine = self.engine
        return {
            "state": "running",
            "ready": self.is_ready,
            "framing": self.framing,
            "vni": self.config.backend.vni if self.framing == FRAMING_VXLAN else None,
            "port": self.config.backend.port,
            "device": {"name": self.device.name, "mtu": self.mtu, "queue_drops": _queue_drops(self.device.name)},
            "external": self._report_external(),
            "lease": self._report_lease(),
            "peers": [_report_peer(one.route, one) for one in engine.traffic(now) if one.route is not None],
            "unreachable": [{"key": one.lease.key, "reason": one.reason} for one in self.unreachable],
            "failures": [*self.family_failures.values(), *self.troubles.report()],
            "restored": self.restored,
            "outbound": _report_direction(engine.outbound),
            "inbound": _report_direction(engine.inbound),
            "offloads": self.offloads.report(),
            "icmp_errors": {"sent": engine.icmp_sent, "suppressed": engine.icmp_suppressed},
            **self.underlay.report(),
        }

    def _report_external(self) -> dict[str, Any]:
        families, external = self.underlay.families, self.external
        return {
            "interface": external.name,
            "ipv4": str(external.ipv4) if 4 in families else None,
            "ipv6": str(external.ipv6) if 6 in families else None,
        }

    def _report_lease(self) -> dict[str, Any]:
        lease = self.lease
        return {
            "key": lease.key,
            "subnet": str(lease.subnet) if lease.subnet else None,
            "ipv6_subnet": str(lease.ipv6_subnet) if lease.ipv6_subnet else None,
            "expiration": lease.expiration,
            "renewed": self.renewed,
            "vtep_mac": format_mac(self.vtep_mac) if self.vtep_mac else None,
            "vtep_mac_v6": format_mac(self.vtep_mac_v6) if self.vtep_mac_v6 else None,
        }


def underlay_addresses(external: External, config: NetworkConfig, *, ipv6_underlay: bool) -> list[Address]:
    """The addresses of `external` that the underlay is bound to: IPv6 where the overlay has it or it is asked for."""
    wanted: list[Address] = [external.ipv4] if external.ipv4 else []
    if external.ipv6 and (config.ipv6 or ipv6_underlay or not external.ipv4):
        wanted.append(external.ipv6)
    return wanted


def device_mtu(interface_mtu: int, config: NetworkConfig, framing: str, families: frozenset[int]) -> int:
    """The device's MTU: the underlay's less the overhead of its most expensive family. Raises NodeError if too small.

    A configured Backend.MTU is the underlay's, as flannel means it.
    """
    underlay_mtu = min(config.backend.mtu or interface_mtu, _LONGEST_IP_PACKET)
    lost = max(overhead(HEADER_LENGTH if framing == FRAMING_VXLAN else 0, family) for family in families)
    mtu = underlay_mtu - lost
    least = MINIMUM_IPV6_MTU if config.ipv6 else MINIMUM_IPV4_MTU
    if mtu < least:
        raise NodeError(
            f"the underlay's MTU of {underlay_mtu} less the overhead of {lost} leaves {mtu} bytes, but "
            f"IPv{6 if config.ipv6 else 4} needs {least}: raise the interface's MTU"
        )
    return mtu


def _report_peer(peer: route.Route, traffic: RouteTraffic) -> dict[str, Any]:
    return {
        "subnet": str(peer.subnet),
        "address": str(peer.address),
        "mac": format_mac(peer.mac) or None,
        "sent_packets": traffic.sent_packets,
        "sent_bytes": traffic.sent_bytes,
        "received_packets": traffic.received_packets,
        "received_bytes": traffic.received_bytes,
        "last_heard": traffic.last_heard,
    }


def _report_direction(direction: Direction) -> dict[str, Any]:
    return {
        "received": direction.received,
        "forwarded_bytes": direction.forwarded_bytes,
        "batches": direction.report_batches(),
        "verdicts": by_name(direction.verdicts),
    }


def _queue_drops(device: str) -> int | None:
    """Packets that the kernel dropped because we did not read the device fast enough."""
    try:
        return int(Path(f"/sys/class/net/{device}/statistics/tx_dropped").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
