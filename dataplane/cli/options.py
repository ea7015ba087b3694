"""The options of the node as Click hands them over, and what becomes of them: its settings and its store."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dataplane.cli.stores import ETCD, STATIC, StoreChoice
from dataplane.host.external import Choice
from dataplane.node import Settings
from dataplane.offload import Offload
from routing.allocator import Subnets
from routing.config import BACKEND_VXLAN, ConfigError, Network, NetworkConfig, parse_config
from routing.route import BACKEND_OF_FRAMING, FRAMING_VXLAN
from routing.stores import SubnetStore
from routing.stores.local import LocalStore
from routing.stores.static import Peer, StaticStore
from routing.subnetfile import DEFAULT_PATH as DEFAULT_SUBNET_FILE

if TYPE_CHECKING:
    from dataplane.underlay.link import LinkSpec

DEFAULT_RUN_DIR = "/run/pyflannel-dp"


@dataclass(frozen=True)
class Options:
    """The options of the node as Click hands them over."""

    backend: str
    store: StoreChoice
    framing: str | None
    network: IPv4Network | None
    ipv6_network: IPv6Network | None
    net_config_path: Path | None
    vni: int | None
    port: int | None
    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    peer: tuple[Peer, ...]
    vtep_mac: bytes | None
    iface: tuple[str, ...]
    iface_regex: tuple[str, ...]
    iface_can_reach: IPv4Address | IPv6Address | None
    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None
    device: str | None
    source_ports: int
    tun_tso: bool
    tun_uso: bool
    udp_segment: bool
    udp_gro: bool
    tun_gro: bool
    check_sources: bool
    subnet_file: Path | None
    subnet_lease_renew_margin: int
    subnet_lease_ttl: int
    on_lost_lease: str
    ip_masq: bool
    ip_masq_fully_random_disable: bool
    ip_masq_exclude: tuple[Network, ...]
    iptables_forward_rules: bool
    iptables_resync: int
    healthz_ip: IPv4Address | IPv6Address
    healthz_port: int
    drop_capabilities: bool
    log_json: bool
    run_dir: Path
    capture: Path | None
    trace: bool
    faults: "LinkSpec | None"
    v: int

    def settings(self) -> Settings:
        """The part that is the node's."""
        return Settings(
            choice=Choice(self.iface, self.iface_regex, self.iface_can_reach, self.public_ip, self.public_ipv6),
            device=self.device or "",
            vtep_mac=self.vtep_mac,
            check_sources=self.check_sources,
            source_ports=self.source_ports,
            offloads_off=frozenset(one for one in Offload if not getattr(self, one.replace("-", "_"))),
            ipv6_underlay=any(peer.address.version == 6 for peer in self.peer),
            renew_margin=60.0 * self.subnet_lease_renew_margin,
            lost_lease=self.on_lost_lease,
            resync=float(self.iptables_resync),
            ip_masq=self.ip_masq,
            masq_fully_random=not self.ip_masq_fully_random_disable,
            masq_exclude=self.ip_masq_exclude,
            forward_rules=self.iptables_forward_rules,
            subnet_file=self.subnet_file or self._default_subnet_file(),
            run_dir=self.run_dir,
            capture=self.capture,
            trace=self.trace,
            faults=self.faults,
        )

    def _default_subnet_file(self) -> Path:
        """Flannel's place for the node of this host; a node with a run folder of its own has its file there."""
        return DEFAULT_SUBNET_FILE if str(self.run_dir) == DEFAULT_RUN_DIR else self.run_dir / "subnet.env"

    def config_text(self) -> str | None:
        """The network configuration that the options ask for, as JSON; None if they ask for none."""
        if self.net_config_path is not None:
            if self.network is not None or self.ipv6_network is not None:
                raise click.UsageError("give --net-config-path or --network/--ipv6-network, not both")
            try:
                return self.net_config_path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--net-config-path {self.net_config_path} cannot be read: {error}") from None
        if self.network is None and self.ipv6_network is None:
            return None
        config: dict[str, Any] = {"EnableIPv4": self.network is not None}
        if self.network is not None:
            config["Network"] = str(self.network)
        if self.ipv6_network is not None:
            config |= {"EnableIPv6": True, "IPv6Network": str(self.ipv6_network)}
        backend: dict[str, Any] = {"Type": BACKEND_OF_FRAMING[self.framing or FRAMING_VXLAN]}
        if backend["Type"] == BACKEND_VXLAN and self.vni is not None:
            backend["VNI"] = self.vni
        if self.port is not None:
            backend["Port"] = self.port
        return json.dumps(config | {"Backend": backend})

    def require_agreement(self, config: NetworkConfig, place: object) -> None:
        """The configuration counts; options that say otherwise would make this node deaf, so they are refused.

        `place` is where `config` is from. Raises ConfigError.
        """
        backend = config.backend
        for name, asked, found in (
            ("--framing", self.framing and BACKEND_OF_FRAMING[self.framing], backend.type),
            ("--vni", self.vni, backend.vni),
            ("--port", self.port, backend.port),
        ):
            if asked is not None and asked != found:
                raise ConfigError(
                    f"{name} asks for {asked}, but {place} says {found}: leave the option out, or change it there"
                )

    def config_check(self) -> Callable[[NetworkConfig], None]:
        """What a configuration must pass that is read only when the node starts, as etcd's is; others are checked when
        their store is opened."""
        if self.store.kind != ETCD:
            return lambda _: None
        return lambda config: self.require_agreement(config, f"{self.store.etcd_prefix}/config in etcd")

    async def open_store(self, identity: str) -> SubnetStore:
        """The store. Raises UsageError, StoreError, ConfigError."""
        kind = self.store.kind
        if kind == STATIC:
            return self._static_store()
        for name, value in (("--subnet", self.subnet), ("--ipv6-subnet", self.ipv6_subnet), ("--peer", self.peer)):
            if value:
                raise click.UsageError(f"{name} goes with --store static; with --store {kind} the leases tell")
        if kind == ETCD:
            return self._etcd_store(identity)
        return await self._local_store()

    def _etcd_store(self, identity: str) -> SubnetStore:
        if self.config_text() is not None:
            raise click.UsageError(
                f"with --store etcd the network configuration is in etcd, at {self.store.etcd_prefix}/config: leave out "
                "--network, --ipv6-network and --net-config-path (to write it: pyflannel-dp leases config --set FILE)"
            )
        return self.store.open_etcd(identity, float(self.subnet_lease_ttl))

    async def _local_store(self) -> LocalStore:
        store = self.store.open_local(float(self.subnet_lease_ttl))
        text = self.config_text()
        if text is not None:
            await store.create_config(text)
        stored = await store.config()
        place = self.store.store_dir / "config"
        if text is not None and parse_config(text) != stored:
            raise ConfigError(
                f"{place} says something else than the options or --net-config-path: leave them out to use what is there, "
                "or change it for all nodes"
            )
        self.require_agreement(stored, place)
        return store

    def _static_store(self) -> StaticStore:
        text = self.config_text()
        if text is None:
            raise click.UsageError("--store static needs --network or --ipv6-network (or --net-config-path)")
        config = parse_config(text)
        for name, pool, subnet in (
            ("--subnet", config.ipv4, self.subnet),
            ("--ipv6-subnet", config.ipv6, self.ipv6_subnet),
        ):
            if (pool is None) != (subnet is None):
                family = "IPv4" if name == "--subnet" else "IPv6"
                raise click.UsageError(f"--store static needs {name} exactly if there is an {family} network")
        if self.net_config_path is not None:
            self.require_agreement(config, self.net_config_path)
        return StaticStore(config, Subnets(self.subnet, self.ipv6_subnet), self.peer)
