"""What the table is to say, and what can be done with it."""

import os
import re
from dataclasses import dataclass
from typing import Protocol

from routing.config import Network

_PLAIN = re.compile(rb"[A-Za-z0-9._-]")


@dataclass(frozen=True)
class Rules:
    """What the table is to say, for the families that are on.

    `networks` are the overlay's and `subnets` our own parts of them, one pair a family in the same order. `masquerade`
    hides what leaves the overlay and what enters it elsewhere behind an address of this host, from random source ports if
    `fully_random`; but not what goes to one of `exclude` (of any family). `forward` accepts forwarding from and to
    `networks`.
    """

    networks: tuple[Network, ...]
    subnets: tuple[Network, ...]
    masquerade: bool
    forward: bool
    fully_random: bool = True
    exclude: tuple[Network, ...] = ()

    def __post_init__(self) -> None:
        families = [network.version for network in self.networks]
        if families != [subnet.version for subnet in self.subnets] or len(set(families)) != len(families):
            raise ValueError(f"one network and one subnet a family, not {self.networks} and {self.subnets}")


class Firewall(Protocol):
    """Our table, named `table`."""

    @property
    def table(self) -> str:
        """Its name, as ``nft list table inet NAME`` takes it."""

    def apply(self, rules: Rules) -> None:
        """Replace our table by `rules`, whatever is in it, in one step: it is the old one or the new one at any time.

        Raises HostError with what failed and what to do; then the table is as it was.
        """

    def is_intact(self, rules: Rules) -> bool:
        """Whether the table is just as our `apply` of `rules` left it: each rule, their order, and nothing else.

        False also if this object has not applied `rules`. Raises HostError if that cannot be found out.
        """

    def remove(self) -> bool:
        """Remove our table; whether it was there. Raises HostError."""

    def obstacles(self) -> list[str]:
        """Chains of others that may drop what is forwarded from and to the networks of the rules that were applied last,
        each with what to do. Raises HostError."""


def table_name(device: str) -> str:
    """The table of the node whose device is `device`.

    A name that ``nft list table inet NAME`` takes without quotes: what is not a letter, digit, dot, dash or underscore
    becomes a slash, which no device's name holds, and two hexadecimal digits a byte. Different devices have different
    tables.
    """
    octets = (bytes([octet]) for octet in os.fsencode(device))
    return "pyflannel-dp-" + "".join(octet.decode() if _PLAIN.fullmatch(octet) else f"/{octet.hex()}" for octet in octets)
