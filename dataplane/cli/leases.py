"""``leases``: what the operator does with the store.

Only the store is asked; no node needs to run, and those that run hear of changes as of any other.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Any, TypeVar

import click

from dataplane.cli import parameters
from dataplane.cli.stores import ETCD, LOCAL, StoreChoice, store_options
from routing.allocator import Subnets
from routing.config import BACKEND_VXLAN, ConfigError, Network, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, format_mac, vtep_macs
from routing.stores import Registry, StoreError

_T = TypeVar("_T")
_SUBNETS = click.argument("subnets", type=parameters.NETWORK, nargs=-1, required=True, metavar="SUBNET [IPV6-SUBNET]")
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON.")
_STORE = store_options((LOCAL, ETCD))


@click.group()
def leases() -> None:
    """List and reserve subnets, release them, and show or set the network configuration, in the store."""


@leases.command("list")
@_JSON
@_STORE
def list_(as_json: bool, **options: Any) -> None:
    """All leases: subnets, the address of the node, when they end."""
    found = _ask(_take(options), lambda registry: registry.list_leases())
    if as_json:
        click.echo(json.dumps([_plain(lease) for lease in found], indent=2))
        return
    for lease in found:
        click.echo(_line(lease))
    click.echo(f"{len(found)} leases, {sum(lease.expiration is None for lease in found)} of them reservations", err=True)


@leases.command()
@_SUBNETS
@click.option("--public-ip", type=parameters.IPV4, metavar="ADDRESS", help="IPv4 address of the node that it is for.")
@click.option("--public-ipv6", type=parameters.IPV6, metavar="ADDRESS", help="IPv6 address of the node that it is for.")
@click.option("--vtep-mac", type=parameters.MAC, metavar="MAC", help="The node's VTEP MAC.  [default: from its address]")
@_JSON
@_STORE
def reserve(
    subnets: tuple[Network, ...],
    public_ip: IPv4Address | None,
    public_ipv6: IPv6Address | None,
    vtep_mac: bytes | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Reserve SUBNET for ever: for the node that holds it, or for that with --public-ip.

    The node with that address takes it when it starts. A dual-stack network has a pair of subnets.
    """
    pair = _pair(subnets)

    async def act(registry: Registry) -> Lease:
        attributes = None
        if public_ip is not None or public_ipv6 is not None:
            config = parse_config(await registry.config_text())
            attributes = _attributes(public_ip, public_ipv6, vtep_mac, config.backend.type, config.backend.vni)
        return await registry.reserve(pair, attributes)

    _tell("reserved", _ask(_take(options), act), as_json=as_json)


@leases.command()
@_SUBNETS
@click.option("--force", is_flag=True, help="Even if a node holds it; a node that runs takes a lease anew, or stops.")
@_JSON
@_STORE
def release(subnets: tuple[Network, ...], force: bool, as_json: bool, **options: Any) -> None:
    """Remove the reservation of SUBNET, or with --force a lease."""
    pair = _pair(subnets)

    async def act(registry: Registry) -> Lease:
        found = [one for one in await registry.list_leases() if Subnets(one.subnet, one.ipv6_subnet) == pair]
        if found and found[0].expiration is not None and not force:
            raise StoreError(f"{found[0].key} is no reservation but a lease {_date(found[0])}: --force removes it")
        return await registry.remove(pair)

    _tell("released", _ask(_take(options), act), as_json=as_json)


@leases.command()
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Check the configuration in FILE and store it, in place of what is there; - is standard input.",
)
@_JSON
@_STORE
def config(file: Path | None, as_json: bool, **options: Any) -> None:
    """Show the network configuration as it is understood, or set it with --set."""
    choice = _take(options)
    if file is not None:
        text = _read(file)
        _ask(choice, lambda registry: registry.write_config(text))
    text = _ask(choice, lambda registry: registry.config_text())
    understood = parse_config(text)
    for warning in understood.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(_plain_config(text), indent=2))
        return
    backend = understood.backend
    for pool in understood.pools:
        click.echo(f"network   {pool.network}, a /{pool.subnet_length} for each node, {pool.minimum} to {pool.maximum}")
    vni = f", VNI {backend.vni}" if backend.type == BACKEND_VXLAN else ""
    mtu = f", MTU of the underlay {backend.mtu}" if backend.mtu else ""
    click.echo(f"backend   {backend.type}{vni}, UDP port {backend.port}{mtu}")


def _take(options: dict[str, Any]) -> StoreChoice:
    """The store's part of `options`; warns of variables that are about another store."""
    choice = StoreChoice.take(options)
    for warning in choice.ignored_variables():
        click.echo(f"warning: {warning}", err=True)
    return choice


def _read(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--set {file} cannot be read: {error}") from None


def _pair(subnets: tuple[Network, ...]) -> Subnets:
    by_version = {subnet.version: subnet for subnet in subnets}
    if len(subnets) != len(by_version):
        raise click.UsageError("give one subnet, or for dual stack one of IPv4 and one of IPv6")
    ipv4, ipv6 = by_version.get(4), by_version.get(6)
    assert ipv4 is None or isinstance(ipv4, IPv4Network)
    assert not isinstance(ipv6, IPv4Network)
    return Subnets(ipv4, ipv6)


def _attributes(
    public_ip: IPv4Address | None, public_ipv6: IPv6Address | None, mac: bytes | None, backend_type: str, vni: int
) -> LeaseAttributes:
    """What a node with these addresses says of itself; the MAC is the one that it derives itself, if none is given."""
    macs = vtep_macs(public_ip, public_ipv6, mac) if backend_type == BACKEND_VXLAN else (None, None)
    data, data_v6 = (VtepData(one, vni) if one is not None else None for one in macs)
    return LeaseAttributes(public_ip, public_ipv6, backend_type, data, data_v6)


def _ask(choice: StoreChoice, act: Callable[[Registry], Awaitable[_T]]) -> _T:
    async def asked() -> _T:
        async with _registry(choice) as registry:
            return await act(registry)

    return asyncio.run(asked())


@asynccontextmanager
async def _registry(choice: StoreChoice) -> AsyncIterator[Registry]:
    store = choice.open_etcd("an operator") if choice.kind == ETCD else choice.open_local()
    try:
        yield store
    finally:
        await store.close()


def _tell(done: str, lease: Lease, *, as_json: bool) -> None:
    click.echo(json.dumps(_plain(lease), indent=2) if as_json else f"{done} {_line(lease)}")


def _line(lease: Lease) -> str:
    subnets = " ".join(str(one) for one in (lease.subnet, lease.ipv6_subnet) if one is not None)
    said = lease.attributes
    addresses = " ".join(str(one) for one in (said.public_ip, said.public_ipv6) if one is not None)
    macs = " ".join(format_mac(one.vtep_mac) for one in (said.backend_data, said.backend_v6_data) if one is not None)
    return f"{subnets}  {addresses}  {said.backend_type}{' ' + macs if macs else ''}  {_date(lease)}"


def _plain(lease: Lease) -> dict[str, Any]:
    """A lease for JSON; `attributes` in flannel's spelling."""
    return {
        "key": lease.key,
        "subnet": str(lease.subnet) if lease.subnet is not None else None,
        "ipv6_subnet": str(lease.ipv6_subnet) if lease.ipv6_subnet is not None else None,
        "attributes": json.loads(lease.attributes.to_json()),
        "reservation": lease.expiration is None,
        "expiration": lease.expiration,
    }


def _plain_config(text: str) -> dict[str, Any]:
    """The configuration with all defaults filled in, in flannel's names."""
    understood = parse_config(text)
    plain: dict[str, Any] = {"EnableIPv4": understood.ipv4 is not None, "EnableIPv6": understood.ipv6 is not None}
    for prefix, pool in (("", understood.ipv4), ("IPv6", understood.ipv6)):
        if pool is not None:
            plain |= {
                f"{prefix}Network": str(pool.network),
                f"{prefix}SubnetLen": pool.subnet_length,
                f"{prefix}SubnetMin": str(pool.minimum),
                f"{prefix}SubnetMax": str(pool.maximum),
            }
    backend = understood.backend
    return plain | {"Backend": {"Type": backend.type, "VNI": backend.vni, "Port": backend.port, "MTU": backend.mtu}}


def _date(lease: Lease) -> str:
    if lease.expiration is None:
        return "for ever"
    return time.strftime("until %Y-%m-%d %H:%M:%S %Z", time.localtime(lease.expiration))
