"""The kinds of values that options take: each is parsed where it is given, and says what is wrong with it."""

import os
import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from routing.config import require_host_address, strict_text
from routing.lease import parse_mac, require_unicast_mac
from routing.stores.static import parse_peer

if TYPE_CHECKING:
    from dataplane.underlay.link import LinkSpec


class Parsed(click.ParamType[Any]):
    """A parameter made by a function that raises ValueError on nonsense."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
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


IPV4 = Parsed("ipv4", _public(IPv4Address))
IPV6 = Parsed("ipv6", _public(IPv6Address))
ADDRESS = Parsed("address", ip_address)
IPV4_NETWORK = Parsed("ipv4-network", IPv4Network)
IPV6_NETWORK = Parsed("ipv6-network", IPv6Network)
MAC = Parsed("mac", _vtep_mac)
DEVICE = Parsed("name", _device_name)
REGEX = Parsed("regex", _pattern)
PEER = Parsed("peer", parse_peer)
CAPTURE = Parsed("file", _capture_file)
FAULTS = Parsed("faults", _faults)
NETWORK = Parsed("network", ip_network)
