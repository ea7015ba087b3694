"""Which store: its options, which the node and the operator's commands share, and the store made from them.

An option of another store than the one that is used says that somebody means something else than what would happen. On the
command line it is refused. A variable in the environment may be there for other commands, or for another start: it is
warned about, and ignored.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dataplane.control import IDENTITY_NAME
from routing.durable import write_whole
from routing.stores import LEASE_SECONDS
from routing.stores.local import LocalStore

if TYPE_CHECKING:
    from routing.stores.etcd import EtcdStore

log = logging.getLogger(__name__)

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


def _variable(name: str) -> str:
    return f"{_ENVIRONMENT}_{name.upper().replace('-', '_')}"


def _owner(name: str) -> str | None:
    """The store that the option `name` is about; None if it is about all."""
    return LOCAL if name == "store-dir" else ETCD if name.startswith("etcd-") else None


def _option(name: str, **details: Any) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", envvar=_variable(name), **details)


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
        """From all options of the current command, out of which they are taken.

        Raises UsageError if one that belongs to another store was given on the command line.
        """
        taken = cls(**{field.name: options.pop(field.name) for field in fields(cls)})
        for name in taken._strays(ParameterSource.COMMANDLINE):
            raise click.UsageError(f"--{name} goes with --store {_owner(name)}; {taken._reason()}")
        return taken

    @property
    def kind(self) -> str:
        """Which store."""
        return self.store or (ETCD if self.etcd_endpoints is not None else LOCAL)

    def ignored_variables(self) -> list[str]:
        """A warning for each variable of the environment that the current command got an option of another store from."""
        return [
            f"{_variable(name)} is set, but --{name} goes with --store {_owner(name)}; {self._reason()}: it is ignored"
            for name in self._strays(ParameterSource.ENVIRONMENT)
        ]

    def _strays(self, source: ParameterSource) -> Iterator[str]:
        """The options of other stores than ours that come from `source`."""
        context = click.get_current_context()
        for field in fields(self):
            name = field.name.replace("_", "-")
            if _owner(name) not in {None, self.kind} and context.get_parameter_source(field.name) is source:
                yield name

    def _reason(self) -> str:
        if self.store is not None:
            return f"this is --store {self.store}"
        if self.etcd_endpoints is not None:
            return "this is --store etcd, since there are --etcd-endpoints"
        return "this is --store local, since there is neither --store nor --etcd-endpoints"

    def open_local(self, lease_seconds: float = LEASE_SECONDS) -> LocalStore:
        """The local store."""
        return LocalStore(self.store_dir, lease_seconds=lease_seconds)

    def open_etcd(self, identity: str, lease_seconds: float = LEASE_SECONDS) -> "EtcdStore":
        """The store in etcd; nothing is asked of it yet. Raises UsageError, StoreError."""
        from routing.stores.etcd import Credentials, EtcdStore, parse_endpoints  # noqa: PLC0415 - gRPC is heavy
        from routing.stores.etcd.schema import Schema  # noqa: PLC0415 - as above

        if (self.etcd_certfile is None) != (self.etcd_keyfile is None):
            raise click.UsageError("--etcd-certfile and --etcd-keyfile go together")
        if self.etcd_password is not None and self.etcd_username is None:
            raise click.UsageError("--etcd-password goes with --etcd-username")
        if self.etcd_username is not None and self.etcd_password is None:
            raise click.UsageError("--etcd-username goes with --etcd-password")
        try:
            endpoints = parse_endpoints(DEFAULT_ETCD_ENDPOINTS if self.etcd_endpoints is None else self.etcd_endpoints)
        except ValueError as error:
            raise click.UsageError(f"--etcd-endpoints: {error}") from None
        try:
            Schema(self.etcd_prefix)
        except ValueError as error:
            raise click.UsageError(f"--etcd-prefix: {error}") from None
        credentials = Credentials(
            self.etcd_cafile, self.etcd_certfile, self.etcd_keyfile, self.etcd_username, self.etcd_password
        )
        return EtcdStore(endpoints, self.etcd_prefix, credentials, identity=identity, lease_seconds=lease_seconds)


def identity_of(run_dir: Path) -> str:
    """What tells the node of `run_dir` from all others: one that lives on when the node is started again.

    Kept in the run folder, which a reboot empties and a container does not share. A file that is empty or no text is as
    good as none. The folder is locked meanwhile, since the node's own lock comes later: of two that start first, one makes
    the identity, and both have it. Raises OSError.
    """
    path = run_dir / IDENTITY_NAME
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = _known_identity(path)
        if not known:
            host = os.uname().nodename.encode("ascii", "replace").decode("ascii")
            known = f"{host}-{os.urandom(8).hex()}"
            write_whole(path, known + "\n")
        return known
    finally:
        os.close(folder)


def _known_identity(path: Path) -> str:
    """What is in the file; nothing if it makes no sense."""
    try:
        known = path.read_bytes().decode("ascii").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        known = ""
    if not known or not known.isprintable():
        log.warning("%s holds no identity of a node: made another one", path)
        return ""
    return known
