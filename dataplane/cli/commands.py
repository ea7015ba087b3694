"""The commands, and how failures are told."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dataplane.cli import parameters, spelling
from dataplane.cli.leases import leases
from dataplane.cli.options import DEFAULT_RUN_DIR, Options
from dataplane.cli.rendering import render_status
from dataplane.cli.stores import ETCD, LOCAL, STATIC, StoreChoice, store_options
from dataplane.control import ControlError, RunLock, ask
from dataplane.device.tun import TunError
from dataplane.host import HostError
from dataplane.node import LOST_LEASE_POLICIES, NodeError
from dataplane.offload import MEANING as MEANING_OF_OFFLOAD
from dataplane.offload import Offload
from dataplane.underlay.udp import SOURCE_PORTS
from encap import vxlan
from routing.allocator import NoFreeSubnetError
from routing.config import ConfigError
from routing.route import FRAMING_IP, FRAMING_VXLAN
from routing.stores import LEASE_SECONDS, StoreError

_ENVIRONMENT = "FLANNELD"
_FAILURES = (NodeError, StoreError, ConfigError, HostError, TunError, ControlError, NoFreeSubnetError)

_RUN_DIR = click.option(
    "--run-dir", type=click.Path(path_type=Path), default=DEFAULT_RUN_DIR, show_default=True,
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
@store_options((LOCAL, STATIC, ETCD))
@click.option("--network", type=parameters.IPV4_NETWORK, metavar="CIDR", help="The IPv4 overlay, like 10.244.0.0/16.")
@click.option(
    "--ipv6-network", type=parameters.IPV6_NETWORK, metavar="CIDR", help="The IPv6 overlay, like fd00:10:244::/48."
)
@click.option(
    "--net-config-path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The network configuration as a file (flannel's net-conf.json), instead of --network.",
)
@click.option("--vni", type=click.IntRange(0, vxlan.MAX_VNI), help="VXLAN network identifier.  [default: 1]")
@click.option("--port", type=click.IntRange(1, 65535), help="UDP port of all nodes.  [default: 8472 vxlan, 8285 ip]")
@click.option("--subnet", type=parameters.IPV4_NETWORK, metavar="CIDR", help="This node's IPv4 subnet (static store).")
@click.option("--ipv6-subnet", type=parameters.IPV6_NETWORK, metavar="CIDR", help="This node's IPv6 subnet (static store).")
@click.option(
    "--peer",
    type=parameters.PEER,
    multiple=True,
    metavar="SUBNET=ADDRESS[,MAC]",
    help="A peer (static store); repeatable. A MAC not given is derived from the address.",
)
@click.option("--vtep-mac", type=parameters.MAC, metavar="MAC", help="This node's VTEP MAC.  [default: from its address]")
@click.option("--iface", multiple=True, metavar="NAME|ADDRESS", help="External interface; the first that exists.")
@click.option(
    "--iface-regex",
    type=parameters.REGEX,
    multiple=True,
    metavar="REGEX",
    help="The same by pattern: addresses, then names.",
)
@click.option("--iface-can-reach", type=parameters.ADDRESS, metavar="ADDRESS", help="The same by the route to ADDRESS.")
@click.option("--public-ip", type=parameters.IPV4, metavar="ADDRESS", help="IPv4 address that the lease publishes.")
@click.option("--public-ipv6", type=parameters.IPV6, metavar="ADDRESS", help="IPv6 address that the lease publishes.")
@click.option("--device", type=parameters.DEVICE, metavar="NAME", help="TUN device.  [default: flannel.VNI, or flannel0]")
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
    help="Renew the lease so long before its end, or at half of its life if that is later.",
)
@click.option(
    "--subnet-lease-ttl",
    type=click.IntRange(5),
    default=int(LEASE_SECONDS),
    show_default=True,
    metavar="SECONDS",
    help="How long a lease lasts that is not renewed.",
)
@click.option(
    "--on-lost-lease",
    type=click.Choice(LOST_LEASE_POLICIES),
    default=LOST_LEASE_POLICIES[0],
    show_default=True,
    help="If the lease is gone from the store or somebody else's: take one anew (the same subnet if it is free), or stop.",
)
@click.option("--ip-masq", is_flag=True, help="Masquerade what leaves the overlay for other networks (nftables).")
@click.option("--ip-masq-fully-random-disable", is_flag=True, help="Masquerade without fully random source ports.")
@click.option(
    "--ip-masq-exclude",
    type=parameters.NETWORK,
    multiple=True,
    metavar="CIDR",
    help="Do not masquerade towards this network; repeatable.",
)
@click.option(
    "--iptables-forward-rules/--no-iptables-forward-rules",
    default=False,
    show_default=True,
    help="Accept what is forwarded from and to the overlay, in the same nftables table.",
)
@click.option(
    "--iptables-resync",
    type=click.IntRange(1, 3600),
    default=5,
    show_default=True,
    metavar="SECONDS",
    help="How often rules, device and routes are looked at, and put right.",
)
@click.option(
    "--healthz-ip",
    type=parameters.ADDRESS,
    default="0.0.0.0",  # noqa: S104 - flannel's default; nothing listens unless a port is given
    show_default=True,
    help="Address for --healthz-port.",
)
@click.option(
    "--healthz-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Serve /healthz, /readyz and /metrics on this TCP port; 0 does not.",
)
@click.option(
    "--drop-capabilities/--no-drop-capabilities",
    default=True,
    show_default=True,
    help="Give up all privileges but the few that the node needs (CAP_NET_ADMIN).",
)
@_RUN_DIR
@click.option(
    "--capture", type=parameters.CAPTURE, metavar="FILE", help="Record packets and datagrams there (pcapng, 1 GiB at most)."
)
@click.option("--trace", is_flag=True, help="Tell of every packet and datagram on stderr, a line each.")
@click.option(
    "--faults",
    type=parameters.FAULTS,
    metavar="SPEC",
    help="For experiments: lose, delay or damage what arrives, like loss=1%,delay=20ms.",
)
@click.option("--v", type=int, default=0, metavar="LEVEL", help="Log more (1), or everything (2).")
@click.option("--log-json", is_flag=True, help="Log lines as JSON objects.")
@click.version_option(package_name="pyflannel-dp")
@click.pass_context
def cli(ctx: click.Context, /, **options: Any) -> None:
    """A node of a flannel overlay network, in userspace.

    Without a command it runs the node in the foreground until SIGTERM or Ctrl-C. Every option is also read from the
    environment, as FLANNELD_ and its name (FLANNELD_IFACE), and may be spelled with one dash.

    \b
    Nodes that share one machine's folder of leases:
      pyflannel-dp --backend udp --network 10.244.0.0/16
    In a cluster that keeps its leases in etcd:
      pyflannel-dp --etcd-endpoints https://192.0.2.10:2379,https://192.0.2.11:2379 --etcd-cafile ca.pem
    Without any store:
      pyflannel-dp --store static --network 10.244.0.0/16 --subnet 10.244.1.0/24 \\
                   --peer 10.244.2.0/24=192.0.2.2
    """  # noqa: D301 - \b is a character that Click wants to see
    if ctx.invoked_subcommand is not None:
        _refuse_options_before_a_command(ctx)
    else:
        from dataplane.cli import service  # noqa: PLC0415 - the other commands do without

        store = StoreChoice.take(options)
        service.run(Options(store=store, **options), [*_unknown_environment(), *store.ignored_variables()])


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
    click.echo(json.dumps(answer, indent=2) if as_json else render_status(answer))


@cli.command()
@_RUN_DIR
def cleanup(run_dir: Path) -> None:
    """Remove what a node left on this host: device, routes, rules, subnet file, run folder. Nothing else is touched.

    The lease stays in the store, where it ends by itself.
    """
    from dataplane.cli.cleanup import Cleanup  # noqa: PLC0415 - only this command and the node need the kernel
    from dataplane.host import mark_of  # noqa: PLC0415 - as above
    from dataplane.host.firewall import NftFirewall  # noqa: PLC0415 - as above
    from dataplane.host.netlink import NetlinkHost  # noqa: PLC0415 - as above

    lock = RunLock(run_dir)
    if run_dir.is_dir():
        lock.take()
    try:
        work = Cleanup(run_dir, NetlinkHost(mark_of(run_dir)), NftFirewall)
        work.run()
    finally:
        lock.release()
    if work.removed or not work.failures:
        click.echo("\n".join(f"removed {one}" for one in work.removed) or "nothing of ours is here")
    if work.failures:
        raise NodeError(f"not everything was removed: {'; '.join(work.failures)}")


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


cli.add_command(leases)


def _unknown_environment() -> list[str]:
    """Flanneld's variables that mean nothing here, as warnings: they would be lost in silence otherwise."""
    known = {f"{_ENVIRONMENT}_{option.name.upper()}" for option in cli.params if option.name}
    unknown = sorted(name for name in os.environ if name.startswith(f"{_ENVIRONMENT}_") and name not in known)
    return [f"{name} is set, but is not an option here; it is ignored" for name in unknown]


def _spellings() -> tuple[set[str], dict[str, str | None]]:
    """The long names of all options, and of the boolean ones with their opposites."""
    commands = [cli, *cli.commands.values(), *leases.commands.values()]
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
    given = spelling.normalize(sys.argv[1:] if arguments is None else arguments, *_spellings())
    try:
        cli.main(args=given, prog_name="pyflannel-dp")
    except _FAILURES as error:
        click.echo(f"pyflannel-dp: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # of standard output: a full disk, a closed pipe; or of a file, which it names then
        place = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"pyflannel-dp: {place}{error.strerror or error}", err=True)
        sys.exit(1)
