"""Which store: its options, which the node and the operator's commands share, and the store made from them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dataplane.control import IDENTITY_NAME
from routing.stores import LEASE_SECONDS
from routing.stores.local import LocalStore

if TYPE_CHECKING:
    from routing.stores.etcd import EtcdStore

LOCAL, STATIC, ETCD = "local", "static", "etcd"
DEFAULT_STORE_DIR = "/var/lib/pyflannel-dp"
DEFAULT_ETCD_PREFIX = "/coreos.com/network"
DEFAULT_ETCD_ENDPOINTS = "http://127.0.0.1:2379"
_ENVIRONMENT = "FLANNELD"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def store_options(kinds: tuple[str, ...]) -> Callable[[_Command], _Command]:
    """The options that say where leases are, for a command that works with stores of `kinds`."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(_options(kinds)):
            command = option(command)
        return command

    return decorate


def _option(name: str, **details: Any) -> Callable[[_Command], _Command]:
    variable = f"{_ENVIRONMENT}_{name.upper().replace('-', '_')}"
    return click.option(f"--{name}", envvar=variable, **details)


def _options(kinds: tuple[str, ...]) -> list[Callable[[_Command], _Command]]:
    return [
        _option(
            "store",
            type=click.Choice(kinds),
            help="Where leases are kept: in a folder, in etcd"
            + (", or nowhere (peers given by --peer)" if STATIC in kinds else "")
            + ".  [default: etcd with --etcd-endpoints, else local]",
        ),
        _option(
            "store-dir",
            type=click.Path(path_type=Path),
            default=DEFAULT_STORE_DIR,
            show_default=True,
            help="Folder of the local store.",
        ),
        _option(
            "etcd-endpoints",
            metavar="URL,…",
            help=f"Endpoints of etcd, separated by commas.  [default with --store etcd: {DEFAULT_ETCD_ENDPOINTS}]",
        ),
        _option(
            "etcd-prefix",
            default=DEFAULT_ETCD_PREFIX,
            show_default=True,
            metavar="KEY",
            help="Under which key etcd has the network's configuration and leases.",
        ),
        _option("etcd-cafile", type=click.Path(path_type=Path), metavar="FILE", help="Who signs etcd's certificate (PEM)."),
        _option("etcd-certfile", type=click.Path(path_type=Path), metavar="FILE", help="This node's certificate (PEM)."),
        _option("etcd-keyfile", type=click.Path(path_type=Path), metavar="FILE", help="And its key (PEM)."),
        _option("etcd-username", metavar="NAME", help="User of etcd."),
        _option(
            "etcd-password",
            metavar="PASSWORD",
            help=f"And the password; others may see it on a command line, so rather give {_ENVIRONMENT}_ETCD_PASSWORD.",
        ),
    ]


@dataclass(frozen=True)
class StoreChoice:
    """The values of `store_options`."""

    store: str | None
    store_dir: Path
    etcd_endpoints: str | None
    etcd_prefix: str
    etcd_cafile: Path | None
    etcd_certfile: Path | None
    etcd_keyfile: Path | None
    etcd_username: str | None
    etcd_password: str | None

    @classmethod
    def take(cls, options: dict[str, Any]) -> "StoreChoice":
        """From all options of a command, out of which they are taken."""
        return cls(**{field.name: options.pop(field.name) for field in fields(cls)})

    @property
    def kind(self) -> str:
        """Which store. Raises UsageError if the options contradict each other."""
        if self.etcd_endpoints is not None and self.store not in {None, ETCD}:
            raise click.UsageError(f"--etcd-endpoints goes with --store etcd, not with --store {self.store}")
        return self.store or (ETCD if self.etcd_endpoints is not None else LOCAL)

    def open_local(self, lease_seconds: float = LEASE_SECONDS) -> LocalStore:
        """The local store."""
        return LocalStore(self.store_dir, lease_seconds=lease_seconds)

    def open_etcd(self, identity: str, lease_seconds: float = LEASE_SECONDS) -> "EtcdStore":
        """The store in etcd; nothing is asked of it yet. Raises UsageError, StoreError."""
        from routing.stores.etcd import Credentials, EtcdStore, parse_endpoints  # noqa: PLC0415 - gRPC is heavy

        if (self.etcd_certfile is None) != (self.etcd_keyfile is None):
            raise click.UsageError("--etcd-certfile and --etcd-keyfile go together")
        if self.etcd_password is not None and self.etcd_username is None:
            raise click.UsageError("--etcd-password goes with --etcd-username")
        if self.etcd_username is not None and self.etcd_password is None:
            raise click.UsageError("--etcd-username goes with --etcd-password")
        try:
            endpoints = parse_endpoints(self.etcd_endpoints or DEFAULT_ETCD_ENDPOINTS)
        except ValueError as error:
            raise click.UsageError(f"--etcd-endpoints: {error}") from None
        credentials = Credentials(
            self.etcd_cafile, self.etcd_certfile, self.etcd_keyfile, self.etcd_username, self.etcd_password
        )
        return EtcdStore(endpoints, self.etcd_prefix, credentials, identity=identity, lease_seconds=lease_seconds)


def identity_of(run_dir: Path) -> str:
    """What tells the node of `run_dir` from all others: one that lives on when the node is started again.

    Kept in the run folder, which a reboot empties and a container does not share. Raises OSError.
    """
    path = run_dir / IDENTITY_NAME
    try:
        known = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        known = ""
    if not known:
        run_dir.mkdir(parents=True, exist_ok=True)
        known = f"{os.uname().nodename}-{os.urandom(8).hex()}"
        path.write_text(known + "\n", encoding="ascii")
    return known
