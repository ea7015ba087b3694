"""A pcapng file, written block by block (draft-ietf-opsawg-pcapng).

Theory of operation: a file is one section, of unknown length since it is written as it goes. It begins with a Section
Header Block; an Interface Description Block for each interface may come at any place before the first packet of that
interface, and gets the next number; each packet is an Enhanced Packet Block. Every block says its length at both ends and
is padded to a multiple of four bytes, as are the options in it.

Everything is little-endian, whatever the machine, so that equal captures are equal files. Timestamps are in nanoseconds
(if_tsresol 9). Every call writes one whole block with one call to the file, and keeps nothing.
"""

import struct
from typing import Protocol

from encap.fields import Octets

LINKTYPE_ETHERNET = 1
LINKTYPE_RAW = 101
"""Link types (the registry of tcpdump.org): packets with an Ethernet header, and packets that begin with that of IP."""

_SECTION_HEADER, _INTERFACE_DESCRIPTION, _ENHANCED_PACKET = 0x0A0D0D0A, 1, 6
_BYTE_ORDER_MAGIC = 0x1A2B3C4D
_VERSION = (1, 0)
_UNKNOWN_LENGTH = -1
_NANOSECONDS = 9  # 10 to the power of minus 9 seconds

_END_OF_OPTIONS, _COMMENT = 0, 1  # in every block
_APPLICATION = 4  # shb_userappl
_NAME, _DESCRIPTION, _RESOLUTION = 2, 3, 9  # if_name, if_description, if_tsresol
_FLAGS = 2  # epb_flags
_INBOUND, _OUTBOUND = 1, 2  # its bits 0 and 1; 0 says that it is not known
_LONGEST_OPTION = 65535

_BLOCK = struct.Struct("<II")
_OPTION = struct.Struct("<HH")
_LENGTH = struct.Struct("<I")
_SECTION = struct.Struct("<IHHq")
_INTERFACE = struct.Struct("<HHI")
_PACKET = struct.Struct("<IIIII")


class Sink(Protocol):
    """What blocks are written to: a binary file."""

    def write(self, data: bytes, /) -> object:
        """Take all of `data`."""


class Writer:
    """Writes a capture to `file`, its section header at once. `snaplen` cuts packets to so many bytes, 0 does not."""

    def __init__(self, file: Sink, *, application: str = "", snaplen: int = 0) -> None:
        self._file = file
        self._snaplen = snaplen
        self._interfaces = 0
        header = _SECTION.pack(_BYTE_ORDER_MAGIC, *_VERSION, _UNKNOWN_LENGTH)
        self._block(_SECTION_HEADER, header, _options(_text(_APPLICATION, application)))

    def add_interface(self, name: str, link_type: int, description: str = "") -> int:
        """Describe an interface; returns the number by which its packets name it."""
        resolution = _option(_RESOLUTION, bytes([_NANOSECONDS]))
        options = _options(_text(_NAME, name) + _text(_DESCRIPTION, description) + resolution)
        self._block(_INTERFACE_DESCRIPTION, _INTERFACE.pack(link_type, 0, self._snaplen), options)
        self._interfaces += 1
        return self._interfaces - 1

    def packet(
        self,
        interface: int,
        time_ns: int,
        data: Octets,
        *,
        length: int | None = None,
        outbound: bool | None = None,
        comment: str = "",
    ) -> None:
        """Write a packet of `interface`, at `time_ns` since 1970. `length` is that on the wire, if `data` is but a part."""
        if not 0 <= interface < self._interfaces:
            raise ValueError(f"there is no interface {interface}")
        original = len(data) if length is None else length
        kept = data[: self._snaplen] if self._snaplen else data
        time_ns &= 0xFFFF_FFFF_FFFF_FFFF
        header = _PACKET.pack(interface, time_ns >> 32, time_ns & 0xFFFF_FFFF, len(kept), original)
        direction = b"" if outbound is None else _option(_FLAGS, _LENGTH.pack(_OUTBOUND if outbound else _INBOUND))
        self._block(_ENHANCED_PACKET, header, kept, _padding(kept), _options(_text(_COMMENT, comment) + direction))

    def _block(self, kind: int, *parts: Octets) -> None:
        length = _BLOCK.size + sum(map(len, parts)) + _LENGTH.size
        self._file.write(b"".join((_BLOCK.pack(kind, length), *parts, _LENGTH.pack(length))))


def _padding(data: Octets) -> bytes:
    return bytes(-len(data) % 4)


def _option(code: int, value: bytes) -> bytes:
    return _OPTION.pack(code, len(value)) + value + _padding(value)


def _text(code: int, text: str) -> bytes:
    """An option that holds UTF-8, cut between two characters if it is too long; nothing for no text."""
    value = text.encode("utf-8", "replace")
    if len(value) > _LONGEST_OPTION:
        value = value[:_LONGEST_OPTION].decode("utf-8", "ignore").encode()
    return _option(code, value) if value else b""


def _options(options: bytes) -> bytes:
    """Behind a list of options stands its end; where there are none, nothing."""
    return options + _OPTION.pack(_END_OF_OPTIONS, 0) if options else b""
