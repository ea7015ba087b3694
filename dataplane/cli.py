"""The command line: bare options run the node, subcommands ask it, clean up after it, or show what it does.

Exit codes: 0 all is well; 1 it could not be done, with one line on stderr that says why; 2 the command line makes no sense.
"""

import asyncio
import json
import logging
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dataplane import commandline, footprint
from dataplane.control import ControlError, RunLock, ask
from dataplane.device.tun import TunError
from dataplane.host import HostError
from dataplane.host.external import Choice, choose
from dataplane.node import Node, NodeError, Settings, unless_stopped
from dataplane.offload import MEANING as MEANING_OF_OFFLOAD
from dataplane.offload import Offload
from dataplane.underlay.udp import SOURCE_PORTS
from dataplane.verdict import MEANING, Verdict
from encap import vxlan
from routing.allocator import NoFreeSubnetError, Subnets
from routing.config import BACKEND_VXLAN, ConfigError, NetworkConfig, parse_config, require_host_address, strict_text
from routing.lease import parse_mac, require_unicast_mac
from routing.route import BACKEND_OF_FRAMING, FRAMING_IP, FRAMING_VXLAN
from routing.stores import StoreError, SubnetStore
from routing.stores.local import LocalStore
from routing.stores.static import Peer, StaticStore, parse_peer
from routing.subnetfile import DEFAULT_PATH as DEFAULT_SUBNET_FILE

if TYPE_CHECKING:
    from dataplane.underlay.link import LinkSpec

log = logging.getLogger(__name__)

_ENVIRONMENT = "FLANNELD"
_DEFAULT_RUN_DIR = "/run/pyflannel-dp"
_DEFAULT_STORE_DIR = "/var/lib/pyflannel-dp"
_FAILURES = (NodeError, StoreError, ConfigError, HostError, TunError, ControlError, NoFreeSubnetError)


class _Parsed(click.ParamType[Any]):
    """A parameter made by a function that raises ValueError on nonsense."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _public(kind: Callable[[str], IPv4Address | IPv6Address]) -> Callable[[str], IPv4Address | IPv6Address]:
    """Parse an address that a lease may publish."""

    def parse(text: str) -> IPv4Address | IPv6Address:
        return require_host_address(kind(strict_text(text)))

    return parse


def _device_name(text: str) -> str:
    if not re.fullmatch(r"[^/\s]{1,15}", text) or text in {".", ".."} or len(os.fsencode(text)) > 15:
        raise ValueError(f"{text!r} cannot name an interface: at most 15 bytes, no space and no slash")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _capture_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a file")
    return path


def _faults(text: str) -> "LinkSpec":
    from dataplane.underlay.link import parse_link  # noqa: PLC0415 - only who injects faults needs it

    return parse_link(text)


def _vtep_mac(text: str) -> bytes:
    return require_unicast_mac(parse_mac(text))


_IPV4 = _Parsed("ipv4", _public(IPv4Address))
_IPV6 = _Parsed("ipv6", _public(IPv6Address))
_ADDRESS = _Parsed("address", ip_address)
_IPV4_NETWORK = _Parsed("ipv4-network", IPv4Network)
_IPV6_NETWORK = _Parsed("ipv6-network", IPv6Network)
_MAC = _Parsed("mac", _vtep_mac)
_DEVICE = _Parsed("name", _device_name)
_REGEX = _Parsed("regex", _pattern)
_PEER = _Parsed("peer", parse_peer)
_CAPTURE = _Parsed("file", _capture_file)
_FAULTS = _Parsed("faults", _faults)
_RUN_DIR = click.option(
    "--run-dir", type=click.Path(path_type=Path), default=_DEFAULT_RUN_DIR, show_default=True,
    envvar=f"{_ENVIRONMENT}_RUN_DIR", help="Folder of the control socket; one a node.",
)  # fmt: skip


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _offload_options(command: _Command) -> _Command:
    """A switch for each offload."""
    for offload in reversed(Offload):
        text = f"Offload: {MEANING_OF_OFFLOAD[offload]}."
        command = click.option(f"--{offload}/--no-{offload}", default=True, show_default=True, help=text)(command)
    return command


@click.group(invoke_without_command=True, context_settings={"auto_envvar_prefix": _ENVIRONMENT, "max_content_width": 100})
@click.option(
    "--backend",
    type=click.Choice(["udp"]),
    default="udp",
    show_default=True,
    help="How packets are carried: by this program, over UDP. There is no other.",
)
@click.option(
    "--framing",
    type=click.Choice([FRAMING_VXLAN, FRAMING_IP]),
    help="What is inside the UDP datagrams: VXLAN, or the bare packet as flannel's udp backend sends it. "
    "Default: what the network configuration says (Backend.Type vxlan or udp), without one vxlan.",
)
@click.option(
    "--store",
    type=click.Choice(["local", "static"]),
    default="local",
    show_default=True,
    help="Where leases are kept: in a folder, or nowhere (peers given by --peer).",
)
@click.option(
    "--store-dir",
    type=click.Path(path_type=Path),
    default=_DEFAULT_STORE_DIR,
    show_default=True,
    help="Folder of the local store.",
)
@click.option("--network", type=_IPV4_NETWORK, metavar="CIDR", help="The IPv4 overlay, like 10.244.0.0/16.")
@click.option("--ipv6-network", type=_IPV6_NETWORK, metavar="CIDR", help="The IPv6 overlay, like fd00:10:244::/48.")
@click.option(
    "--net-config-path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The network configuration as a file (flannel's net-conf.json), instead of --network.",
)
@click.option("--vni", type=click.IntRange(0, vxlan.MAX_VNI), help="VXLAN network identifier.  [default: 1]")
@click.option("--port", type=click.IntRange(1, 65535), help="UDP port of all nodes.  [default: 8472 vxlan, 8285 ip]")
@click.option("--subnet", type=_IPV4_NETWORK, metavar="CIDR", help="This node's IPv4 subnet (static store).")
@click.option("--ipv6-subnet", type=_IPV6_NETWORK, metavar="CIDR", help="This node's IPv6 subnet (static store).")
@click.option(
    "--peer",
    type=_PEER,
    multiple=True,
    metavar="SUBNET=ADDRESS[,MAC]",
    help="A peer (static store); repeatable. A MAC not given is derived from the address.",
)
@click.option("--vtep-mac", type=_MAC, metavar="MAC", help="This node's VTEP MAC.  [default: from its address]")
@click.option("--iface", multiple=True, metavar="NAME|ADDRESS", help="External interface; the first that exists.")
@click.option(
    "--iface-regex", type=_REGEX, multiple=True, metavar="REGEX", help="The same by pattern: addresses, then names."
)
@click.option("--iface-can-reach", type=_ADDRESS, metavar="ADDRESS", help="The same by the route to ADDRESS.")
@click.option("--public-ip", type=_IPV4, metavar="ADDRESS", help="IPv4 address that the lease publishes.")
@click.option("--public-ipv6", type=_IPV6, metavar="ADDRESS", help="IPv6 address that the lease publishes.")
@click.option("--device", type=_DEVICE, metavar="NAME", help="TUN device.  [default: flannel.VNI, or flannel0]")
@click.option(
    "--source-ports",
    type=click.IntRange(0, 256),
    default=SOURCE_PORTS,
    show_default=True,
    help="Outer source ports to spread flows over (vxlan); 0 sends from the node's port.",
)
@_offload_options
@click.option(
    "--check-sources/--no-check-sources",
    default=True,
    show_default=True,
    help="Refuse packets whose outer or inner source no lease vouches for.",
)
@click.option(
    "--subnet-file",
    type=click.Path(path_type=Path),
    help="Where CNI plugins look for this node's subnet.  [default: /run/flannel/subnet.env; with another --run-dir "
    "subnet.env in there]",
)
@click.option(
    "--subnet-lease-renew-margin",
    type=click.IntRange(1, 1439),
    default=60,
    show_default=True,
    metavar="MINUTES",
    help="Renew the lease so long before its end.",
)
@_RUN_DIR
@click.option(
    "--capture", type=_CAPTURE, metavar="FILE", help="Record packets and datagrams there (pcapng, 1 GiB at most)."
)
@click.option("--trace", is_flag=True, help="Tell of every packet and datagram on stderr, a line each.")
@click.option(
    "--faults",
    type=_FAULTS,
    metavar="SPEC",
    help="For experiments: lose, delay or damage what arrives, like loss=1%,delay=20ms.",
)
@click.option("--v", type=int, default=0, metavar="LEVEL", help="Log more (1 and above).")
@click.version_option(package_name="pyflannel-dp")
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> None:
    """A node of a flannel overlay network, in userspace.

    Without a command it runs the node in the foreground until SIGTERM or Ctrl-C. Every option is also read from the
    environment, as FLANNELD_ and its name (FLANNELD_IFACE), and may be spelled with one dash.

    \b
    Nodes that share one machine's folder of leases:
      pyflannel-dp --backend udp --network 10.244.0.0/16
    Without any store:
      pyflannel-dp --store static --network 10.244.0.0/16 --subnet 10.244.1.0/24 \\
                   --peer 10.244.2.0/24=192.0.2.2
    """  # noqa: D301 - \b is a character that Click wants to see
    if ctx.invoked_subcommand is not None:
        _refuse_options_before_a_command(ctx)
    else:
        given = _Options(**options)
        _run(_node(given), verbosity=given.v)


def _refuse_options_before_a_command(ctx: click.Context) -> None:
    """They are the node's; before a command they would be ignored, and `cleanup` would look at the wrong folder."""
    for option in cli.params:
        if option.name and ctx.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{option.opts[0]} stands before the command {ctx.invoked_subcommand}, where it is an option of the node; "
                f"options of the command stand behind it"
            )


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@_RUN_DIR
def status(as_json: bool, run_dir: Path) -> None:
    """Ask the running node for its lease, its peers and what became of the packets."""
    answer = ask(run_dir, "status")
    click.echo(json.dumps(answer, indent=2) if as_json else _render_status(answer))


@cli.command()
@_RUN_DIR
def cleanup(run_dir: Path) -> None:
    """Remove what a node left on this host: device, routes, subnet file, run folder. Nothing else is touched.

    The lease stays in the store, where it ends by itself.
    """
    from dataplane.host.netlink import NetlinkHost  # noqa: PLC0415 - only this command and the node need it

    lock = RunLock(run_dir) if run_dir.is_dir() else None
    try:
        if lock is not None:
            lock.take()
        removed = NetlinkHost().remove_ours() + footprint.remove(run_dir)
        if lock is not None:
            removed += footprint.remove_run_dir(run_dir)
    except OSError as error:
        raise NodeError(f"cannot clean up: {error}") from None
    finally:
        if lock is not None:
            lock.release()
    click.echo("\n".join(f"removed {one}" for one in removed) or "nothing of ours is here")


@cli.command()
@click.option(
    "--megabytes",
    type=click.IntRange(1, 100_000),
    default=300,
    show_default=True,
    help="How much to move over TCP on each way.",
)
def demo(megabytes: int) -> None:
    """Show it: three hosts in network namespaces, two pyflannel-dp nodes and a kernel VXLAN device."""
    from dataplane.demo import run  # noqa: PLC0415 - needs rich, which the node does not

    sys.exit(run(megabytes))


@cli.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--print-example", is_flag=True, help="Print a topology file with everything that can be said in it.")
def lab(file: Path | None, print_example: bool) -> None:
    """Bring up the hosts, nodes and pods that FILE describes, in network namespaces, for working in them by hand.

    It prints how to enter each, and waits. Ctrl-C removes everything.
    """
    from dataplane.lab import command, topology, topologyfile  # noqa: PLC0415 - they need rich, which the node does not

    if print_example:
        click.echo(topologyfile.EXAMPLE, nl=False)
        return
    if file is None:
        raise click.UsageError("give a topology file, or --print-example to see one")
    try:
        described = topologyfile.load(file)
    except topology.TopologyError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(command.run(described))


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure it beside kernel VXLAN and other programs; `bench --help` lists what there is."""
    try:
        from bench.__main__ import bench as group  # noqa: PLC0415 - an extra, and nothing that the node needs
    except ImportError as error:
        raise NodeError(f"the benchmarks need more ({error}): pip install 'pyflannel-dp[bench]'") from None
    group.main(args=list(arguments), prog_name="pyflannel-dp bench")


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def replay(arguments: tuple[str, ...]) -> None:
    """Carry the packets of captures through the encapsulation path: how fast, and how correctly."""
    from bench.replay.command import replay as command  # noqa: PLC0415 - nothing that the node needs

    command.main(args=list(arguments), prog_name="pyflannel-dp replay")


@dataclass(frozen=True)
class _Options:
    """The options of the node as Click hands them over."""

    backend: str
    framing: str | None
    store: str
    store_dir: Path
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
            subnet_file=self.subnet_file or self._default_subnet_file(),
            run_dir=self.run_dir,
            capture=self.capture,
            trace=self.trace,
            faults=self.faults,
        )

    def _default_subnet_file(self) -> Path:
        """Flannel's place for the node of this host; a node with a run folder of its own has its file there."""
        return DEFAULT_SUBNET_FILE if str(self.run_dir) == _DEFAULT_RUN_DIR else self.run_dir / "subnet.env"

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


async def _node(options: _Options) -> None:
    from dataplane.host.netlink import NetlinkHost  # noqa: PLC0415 - status and demo do without pyroute2

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    _warn_of_unknown_environment()
    host = NetlinkHost()
    await asyncio.to_thread(choose, host, options.settings().choice)  # before anything is written for others to read
    store = await unless_stopped(stop, asyncio.ensure_future(_store(options)))
    if store is not None:
        await Node(options.settings(), store, host).run(stop)
    log.info("stopped")


async def _store(options: _Options) -> SubnetStore:
    if options.store == "static":
        return _static_store(options)
    for name, value in (("--subnet", options.subnet), ("--ipv6-subnet", options.ipv6_subnet), ("--peer", options.peer)):
        if value:
            raise click.UsageError(f"{name} goes with --store static; with --store local the leases tell")
    store = LocalStore(options.store_dir, rng=random.Random())
    text = options.config_text()
    if text is not None:
        await store.create_config(text)
    stored = await store.config()
    place = options.store_dir / "config"
    if text is not None and parse_config(text) != stored:
        raise ConfigError(
            f"{place} says something else than the options or --net-config-path: leave them out to use what is there, or "
            "change it for all nodes"
        )
    _require_agreement(options, stored, place)
    return store


def _require_agreement(options: _Options, config: NetworkConfig, place: Path) -> None:
    """The configuration counts; options that say otherwise would make this node deaf, so they are refused."""
    backend = config.backend
    for name, asked, found in (
        ("--framing", options.framing and BACKEND_OF_FRAMING[options.framing], backend.type),
        ("--vni", options.vni, backend.vni),
        ("--port", options.port, backend.port),
    ):
        if asked is not None and asked != found:
            raise ConfigError(
                f"{name} asks for {asked}, but {place} says {found}: leave the option out, or change that file"
            )


def _static_store(options: _Options) -> StaticStore:
    text = options.config_text()
    if text is None:
        raise click.UsageError("--store static needs --network or --ipv6-network (or --net-config-path)")
    config = parse_config(text)
    for name, pool, subnet in (
        ("--subnet", config.ipv4, options.subnet),
        ("--ipv6-subnet", config.ipv6, options.ipv6_subnet),
    ):
        if (pool is None) != (subnet is None):
            family = "IPv4" if name == "--subnet" else "IPv6"
            raise click.UsageError(f"--store static needs {name} exactly if there is an {family} network")
    if options.net_config_path is not None:
        _require_agreement(options, config, options.net_config_path)
    return StaticStore(config, Subnets(options.subnet, options.ipv6_subnet), options.peer)


def _warn_of_unknown_environment() -> None:
    """Flanneld's variables that mean nothing here would otherwise be lost in silence."""
    known = {f"{_ENVIRONMENT}_{option.name.upper()}" for option in cli.params if option.name}
    for name in sorted(os.environ):
        if name.startswith(f"{_ENVIRONMENT}_") and name not in known:
            log.warning("%s is set, but is not an option here; it is ignored", name)


def _run(main_coroutine: Coroutine[Any, Any, None], *, verbosity: int) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbosity > 0 else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        import uvloop  # noqa: PLC0415 - the node runs without it, too
    except ImportError:
        asyncio.run(main_coroutine)
    else:
        uvloop.run(main_coroutine)


def _render_status(answer: dict[str, Any]) -> str:
    if answer["state"] != "running":
        return f"process {answer['pid']}: {answer['state']}"
    lease, device, external = answer["lease"], answer["device"], answer["external"]
    framing = f"vxlan, VNI {answer['vni']}" if answer["framing"] == FRAMING_VXLAN else "bare IP"
    subnets = " and ".join(filter(None, (lease["subnet"], lease["ipv6_subnet"])))
    addresses = ", ".join(filter(None, (external["ipv4"], external["ipv6"])))
    lines = [
        f"node      process {answer['pid']}, up {answer['uptime_seconds']:.0f} s, version {answer['version']}",
        f"lease     {subnets}" + (f", VTEP {lease['vtep_mac']}" if lease["vtep_mac"] else ""),
        f"device    {device['name']}, MTU {device['mtu']}",
        f"underlay  {external['interface']} ({addresses}), {framing}, UDP port {answer['port']}",
        f"drops     {device['queue_drops']} in the device's queue, {answer['socket_drops']} in the sockets",
        "offloads  " + ", ".join(f"{name} {state}" for name, state in answer["offloads"].items()),
        f"peers     {len(answer['peers'])}",
    ]
    lines += [f"            {peer['subnet']} at {peer['address']} {peer['mac'] or ''}".rstrip() for peer in answer["peers"]]
    lines += [f"            {one['key']} unreachable: {one['reason']}" for one in answer["unreachable"]]
    lines += [f"trouble   {failure}" for failure in answer["failures"]]
    lines += _render_wrappers(answer)
    for name in ("outbound", "inbound"):
        direction = answer[name]
        lines.append(f"{name:9s} {direction['received']} packets received")
        for verdict, count in direction["verdicts"].items():
            if count:
                lines.append(f"  {count:12d}  {verdict}: {MEANING[Verdict[verdict.upper()]]}")
    errors = answer["icmp_errors"]
    lines.append(f"ICMP      {errors['sent']} errors sent, {errors['suppressed']} suppressed by the rate limit")
    return "\n".join(lines)


def _render_wrappers(answer: dict[str, Any]) -> list[str]:
    """What ``--capture`` and ``--faults`` have to say."""
    lines = []
    if capture := answer.get("capture"):
        state = f", stopped: {capture['stopped']}" if capture["stopped"] else ""
        lines.append(f"capture   {capture['file']}, {capture['packets']} packets, {capture['bytes']} bytes{state}")
    if link := answer.get("link"):
        fates = ("lost", "duplicated", "corrupted", "reordered", "queue_full", "oversize")
        counts = ", ".join(f"{link[fate]} {fate}" for fate in fates if link[fate])
        lines.append(f"faults    {link['spec']}: of {link['sent']} datagrams {counts or 'none harmed'}")
    return lines


def _spellings() -> tuple[set[str], dict[str, str | None]]:
    """The long names of all options, and of the boolean ones with their opposites."""
    commands = [cli, *cli.commands.values()]
    options = [option for command in commands for option in command.params if isinstance(option, click.Option)]
    names = {name.removeprefix("--") for option in options for name in (*option.opts, *option.secondary_opts)}
    booleans: dict[str, str | None] = {}
    for option in options:
        if option.is_flag:
            opposite = option.secondary_opts[0].removeprefix("--") if option.secondary_opts else None
            booleans[option.opts[0].removeprefix("--")] = opposite
    return names | {"help", "version"}, booleans


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command line and exit."""
    given = commandline.normalize(sys.argv[1:] if arguments is None else arguments, *_spellings())
    try:
        cli.main(args=given, prog_name="pyflannel-dp")
    except _FAILURES as error:
        click.echo(f"pyflannel-dp: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # of standard output: a full disk, a closed pipe
        click.echo(f"pyflannel-dp: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
