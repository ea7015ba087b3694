"""The `Firewall` of Linux, through the program ``nft``.

Theory of operation: ``nft -j -f -`` reads JSON and makes one netlink transaction of it, which the kernel takes whole or not
at all. Also listing goes in that way: a name in JSON needs no quotes.

The check compares with what nft listed right after `apply`, not with what was sent, because a listing says the same in
other words (a host's /32 as a bare address, a network with host bits cut off), and those words differ between versions of
nft. That listing counts only if its chains and rules are those that we sent, by their comments, in order; otherwise
somebody was faster, the check says no, and the rules are applied again. Handles are left out: they only count how often a
table was made.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from dataplane.host import HostError
from dataplane.host.firewall import obstacles, ruleset
from dataplane.host.firewall.rules import Rules
from dataplane.host.firewall.ruleset import FAMILY, Object

_SECONDS = 10.0
_ABSENT = "No such file or directory"  # what ENOENT reads as in the C locale
_REFUSED = "Operation not permitted"


class _NftError(Exception):
    """What nft said."""


class NftFirewall:
    """See `dataplane.host.firewall.Firewall`. `table` is its name; `command` starts nft."""

    def __init__(self, table: str, command: Sequence[str] = ("nft",)) -> None:
        self._table = table
        self._command = command
        self._rules: Rules | None = None
        self._reference: list[Object] | None = None

    @property
    def table(self) -> str:
        """Its name."""
        return self._table

    def apply(self, rules: Rules) -> None:
        """In one transaction."""
        wanted = ruleset.contents(self._table, rules)
        try:
            self._run(ruleset.transaction(self._table, wanted))
        except _NftError as error:
            is_kernels = "Could not process rule" in str(error) and _REFUSED not in str(error)
            hint = "; NAT in inet tables needs Linux 5.2 with nf_tables, nft_nat and nft_masq" if is_kernels else ""
            raise self._explained("set up", error, hint) from None
        listing = self._listing()
        is_ours = listing is not None and ruleset.outline(listing) == ruleset.outline(wanted)
        self._rules, self._reference = rules, listing if is_ours else None

    def is_intact(self, rules: Rules) -> bool:
        """By a listing of the table."""
        if self._rules != rules or self._reference is None:
            return False
        return self._listing() == self._reference

    def remove(self) -> bool:
        """Deletes the table."""
        self._rules = self._reference = None
        try:
            self._run([{"delete": {"table": {"family": FAMILY, "name": self._table}}}])
        except _NftError as error:
            if _ABSENT in str(error):
                return False
            raise self._explained("remove", error) from None
        return True

    def obstacles(self) -> list[str]:
        """By a listing of all chains, and one of each table that has such a chain."""
        networks = self._rules.networks if self._rules is not None else ()
        try:
            chains = self._run([{"list": {"chains": None}}])
            found = []
            for chain in obstacles.dropping_chains(chains, self._table):
                listed = self._list_table(chain.family, chain.table)
                found += obstacles.describe(chain, listed, networks) if listed is not None else []
        except _NftError as error:
            raise HostError(f"cannot look for firewall rules that drop forwarded packets: {error}{_hint(error)}") from None
        return found

    def _listing(self) -> list[Object] | None:
        """Our table without handles; None if there is none."""
        try:
            listed = self._list_table(FAMILY, self._table)
        except _NftError as error:
            raise self._explained("read", error) from None
        if listed is None:
            return None
        return [
            {kind: {name: value for name, value in properties.items() if name != "handle"}}
            for one in listed
            for kind, properties in one.items()
        ]

    def _list_table(self, family: str, name: str) -> list[Object] | None:
        try:
            return self._run([{"list": {"table": {"family": family, "name": name}}}])
        except _NftError as error:
            if _ABSENT in str(error):
                return None
            raise

    def _explained(self, what: str, error: _NftError, hint: str = "") -> HostError:
        return HostError(f"cannot {what} the nftables table {FAMILY} {self._table}: {error}{_hint(error)}{hint}")

    def _run(self, commands: list[Object]) -> list[Object]:
        """The objects that nft lists. Raises HostError if there is no nft, _NftError if it complains."""
        try:
            done = subprocess.run(
                [*self._command, "-j", "-f", "-"],
                input=json.dumps({"nftables": commands}),
                env=os.environ | {"LC_ALL": "C"},
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except FileNotFoundError:
            raise HostError(
                f"the program {self._command[0]} is missing: --ip-masq and the forward rules need it; install it (Debian "
                "package nftables)"
            ) from None
        except OSError as error:
            raise HostError(f"the program {self._command[0]} cannot be run: {error}") from error
        except subprocess.TimeoutExpired:
            raise _NftError(f"nft does not answer within {_SECONDS:.0f} s") from None
        if done.returncode:
            raise _NftError(_complaint(done.stderr) or f"nft ended with exit code {done.returncode}")
        return _objects(done.stdout)


def _objects(text: str) -> list[Object]:
    if not text.strip():
        return []
    try:
        listed: list[dict[str, Any]] = json.loads(text)["nftables"]
    except (ValueError, KeyError, TypeError):
        raise _NftError(f"nft lists its tables in a way that is not understood: {text[:80]!r}") from None
    return [one for one in listed if "metainfo" not in one]


def _complaint(text: str) -> str:
    """The first error of the many lines in `text`, without the place in the JSON, where nobody can look."""
    lines = [line for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "Error:" in line), lines[0] if lines else "")
    complaint = re.sub(r"^.*?Error: ", "", first)
    return f"{complaint} ({_REFUSED})" if _REFUSED in text and _REFUSED not in complaint else complaint


def _hint(error: _NftError) -> str:
    return "; run as root or with CAP_NET_ADMIN" if _REFUSED in str(error) else ""
