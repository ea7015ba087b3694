"""A reader of captures, pcap and pcapng, plain or compressed: one `Record` after the other.

Theory of operation: a file is a stream of bytes that is read forward, a large piece at a time, and never sought in, so a
pipe will do, and memory stays the same however large the file is. `_Stream` holds the bytes that were loaded and not yet
consumed; the loops below take packets out of them without a call to the file, and only at the end of what is loaded do they
ask for more. A length is believed only if it is one that a packet or a block can have, and memory is taken only for bytes
that came out of the file, so an absurd length costs nothing.

What a file is, is told by its first bytes, whatever its name: gzip (RFC 1952), zstd (RFC 8878), pcap
(draft-ietf-opsawg-pcap: four magic numbers, for two byte orders and two units of time), pcapng (draft-ietf-opsawg-pcapng:
sections, each with its own byte order and interfaces, each with its own link type and clock).

Damage: without a readable beginning a file is no capture, which is a `CaptureError`. A file that breaks off or contradicts
itself further on gives the packets before that place, then one message to `trouble`, and ends: what follows a wrong length
can be found again only by guessing, and guessed packets would be worse than none. Packets that were cut when they were
captured (by the snap length) are no damage: they are records with less data than `original_length`.
"""

import gzip
import importlib
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_PACKET = 262_144
"""No packet in a file is longer: libpcap's MAXIMUM_SNAPLEN (pcap-int.h), which tcpdump and Wireshark hold to as well."""

LONGEST_BLOCK = 16 << 20
"""No pcapng block is longer, whatever is in it: Wireshark's MAX_BLOCK_SIZE (wiretap/pcapng.c)."""

EARLIEST, LATEST = -(1 << 63), (1 << 63) - 1
"""A time outside, which only a pcapng file can state, becomes the nearer of these, so that any time fits 64 bits."""

_LOADED = 256 << 10  # how much is read at a time: more is slower, since it leaves the processor's cache
_SECOND = 1_000_000_000

_GZIP = b"\x1f\x8b"
_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + number, 0x2A, 0x4D, 0x18)) for number in range(16)))
# A frame, and one that is to be skipped, with which pzstd begins its files (RFC 8878 3.1.2).
_ZSTD_PIECE = 1 << 10
# A block of zstd has 4 bytes at least, and 128 KiB at most when unpacked (RFC 8878 3.1.1.2): so much gives 32 MiB at most.

_PCAP = {  # magic number as it stands in the file: byte order, nanoseconds in the fraction's unit
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
_PCAP_VERSION = (2, 4)
_PCAP_HEADER = "HHiIII"  # major and minor version, two reserved fields, snap length, link type
_PCAP_BEGINNING = 24  # magic number and header
_PCAP_PACKET = 16
_LINK_TYPE = 0xFFFF
# The link type; the bits above it tell of a frame check sequence behind each packet, or are to be ignored (section 4).

_SECTION, _INTERFACE, _OLD_PACKET, _SIMPLE_PACKET, _ENHANCED_PACKET = 0x0A0D0D0A, 1, 2, 3, 6
_SECTION_MAGIC = b"\x0a\x0d\x0d\x0a"  # reads the same in either byte order
_BYTE_ORDERS = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
_PCAPNG_MAJOR = 1
_SHORTEST_SECTION = 28
_SHORTEST_INTERFACE = 20
_SHORTEST_SIMPLE_PACKET = 16
_PACKET_FIELDS = 28  # what stands before the data in an Enhanced Packet Block, and in a Packet Block
_BLOCK_ENDS = 12  # type and length before a block's body, the length again behind it
_END_OF_OPTIONS, _RESOLUTION, _OFFSET = 0, 9, 14  # opt_endofopt, if_tsresol, if_tsoffset
_MICROSECONDS = 6  # what if_tsresol is where it is missing

_CONVERT = "give a pcap or pcapng file; `editcap -F pcapng OLD NEW` converts other captures that Wireshark reads"
_MAKE_ANEW = "copy it or capture again"


class CaptureError(Exception):
    """A file that cannot be read as a capture: which, where, what is wrong and what to do."""


class Record(NamedTuple):
    """A packet as it was captured. `data` begins with the header of `link_type` (tcpdump.org's registry).

    It is shorter than `original_length`, the packet's length on the wire, if only its beginning was kept.
    """

    time_ns: int
    """Nanoseconds since 1970; between `EARLIEST` and `LATEST`."""
    data: bytes
    original_length: int
    link_type: int


class _BrokenError(Exception):
    """What is wrong with the file where its stream stands, and what to do."""

    def __init__(self, wrong: str, remedy: str = _MAKE_ANEW) -> None:
        super().__init__(wrong)
        self.remedy = remedy


def read_all(paths: Iterable[Path | str], trouble: Callable[[str], None]) -> Iterator[Record]:
    """The packets of all files, in this order. As `read`."""
    for path in paths:
        yield from read(path, trouble)


def read(path: Path | str, trouble: Callable[[str], None]) -> Iterator[Record]:
    """The packets of one file. What breaks the file off behind its beginning is told to `trouble`, once, and ends it.

    Raises CaptureError, when the first packet is asked for, if the file cannot be opened or is no capture.
    """
    try:
        file = io.FileIO(path)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be opened: {error.strerror}; name a file that can be read") from None
    with file:
        stream = _Stream()
        try:
            stream.open(file)
            records = _beginning(stream)
        except _BrokenError as broken:
            raise CaptureError(f"{path}: {stream.place}: {broken}; {broken.remedy}") from None
        try:
            yield from records
        except _BrokenError as broken:
            trouble(f"{path}: {stream.place}: {broken}; what is before that was read, what follows is left out")


def probe(path: Path | str) -> None:
    """Raises CaptureError if the file cannot be opened or is no capture: better before long work than in the middle.

    What is not a plain file, such as a pipe, is left alone, since what is read from it is gone.
    """
    if Path(path).is_file() or not Path(path).exists():
        next(read(path, lambda _: None), None)


class _Stream:
    """What is loaded of a file and not yet consumed: `data` from `at`."""

    def __init__(self) -> None:
        self.data = b""
        self.at = 0
        self._before = 0  # how many bytes of the file came before `data`
        self._blocks: Iterator[bytes] = iter(())
        self._unit = ""

    def open(self, file: io.FileIO) -> None:
        """Read from `file`, unpacking it if it is compressed. Raises _BrokenError."""
        try:
            again = _Again(file)
        except OSError as error:
            raise _BrokenError(f"the file cannot be read: {error.strerror}") from None
        whole: io.BufferedReader = io.BufferedReader(again, _LOADED)
        if again.first.startswith(_GZIP):
            self._blocks = _gunzip(whole)
        elif again.first in _ZSTD:
            self._blocks = _unzstd(whole)
        else:
            self._blocks = _blocks(whole)
            return
        self._unit = " of the unpacked data"

    @property
    def place(self) -> str:
        """Where the stream stands, for people."""
        return f"offset {self._before + self.at}{self._unit}"

    @property
    def left(self) -> int:
        """How many bytes are loaded; what the file holds, after `need` said that it does not hold more."""
        return len(self.data) - self.at

    def need(self, length: int) -> bool:
        """Load what is missing for `length` bytes at `at`; False if the file ends before. Moves `data` and `at`."""
        left = self.left
        if left >= length:
            return True
        parts = [self.data[self.at :]]
        self._before += self.at
        self.at = 0
        try:
            while left < length and (block := next(self._blocks, b"")):
                parts.append(block)
                left += len(block)
        except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
            raise _BrokenError(f"the file cannot be read beyond this packet: {error}") from None
        finally:
            self.data = b"".join(parts)
        return left >= length


class _Again(io.RawIOBase):
    """A file whose first four bytes are looked at, and come again when it is read: a pipe cannot be rewound."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.first = b""
        while len(self.first) < 4 and (more := file.read(4 - len(self.first))):
            self.first += more
        self._left = self.first

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if not self._left:
            return self._file.readinto(buffer)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _blocks(file: io.BufferedReader) -> Iterator[bytes]:
    """A plain file. Not waiting for a whole block lets packets from a pipe go on as they come."""
    while block := file.read1(_LOADED):
        yield block


def _gunzip(file: io.BufferedReader) -> Iterator[bytes]:
    """A gzip file of any number of members. Raises OSError, EOFError and zlib.error, as gzip does."""
    with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
        while block := unpacked.read1(_LOADED):
            yield block


def _unzstd(file: io.BufferedReader) -> Iterator[bytes]:
    """A zstd file of any number of frames, unpacked by small pieces: see `_ZSTD_PIECE`. Raises _BrokenError."""
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        remedy = "pip install 'pyflannel-dp[bench]', or unpack it with `zstd -d`"
        raise _BrokenError("it is compressed with zstd, and the package zstandard is not installed", remedy) from None
    unpacker = None
    parts: list[bytes] = []
    wrong = ""
    while not wrong and (piece := file.read(_ZSTD_PIECE)):
        try:
            while piece:
                unpacker = unpacker or zstandard.ZstdDecompressor().decompressobj()
                if unpacked := unpacker.decompress(piece):
                    parts.append(unpacked)
                # Behind a frame another may begin at once.
                unpacker, piece = (None, unpacker.unused_data) if unpacker.eof else (unpacker, b"")
        except zstandard.ZstdError as error:
            wrong = f"the file cannot be unpacked beyond this packet: {error}"
        if sum(map(len, parts)) >= _LOADED:
            yield b"".join(parts)
            parts.clear()
    if parts:
        yield b"".join(parts)
    if wrong or unpacker is not None:
        raise _BrokenError(wrong or "the compressed data ends early")


def _beginning(stream: _Stream) -> Iterator[Record]:
    """Read the file's header; returns what reads the rest. Raises _BrokenError if it is no capture."""
    if not stream.need(4):
        if stream.left:
            raise _BrokenError(f"{stream.left} bytes are no capture", _CONVERT)
        raise _BrokenError("the file is empty", "capture again: a capture without packets still has a header")
    magic = stream.data[:4]
    if magic == _SECTION_MAGIC:
        blocks = _Pcapng(stream)
        blocks.take()
        return blocks.records()
    if magic not in _PCAP:
        raise _BrokenError(f"neither pcap nor pcapng: it begins with {magic.hex(' ')}", _CONVERT)
    if not stream.need(_PCAP_BEGINNING):
        raise _BrokenError(f"the file ends within the header of a pcap file, after {stream.left} bytes")
    order, unit = _PCAP[magic]
    major, minor, _, _, _, link_type = struct.unpack_from(order + _PCAP_HEADER, stream.data, 4)
    if (major, minor) != _PCAP_VERSION:
        raise _BrokenError(f"version {major}.{minor} of pcap, which only libpcap before 1998 wrote", _CONVERT)
    stream.at = _PCAP_BEGINNING
    return _pcap(stream, order, unit, link_type & _LINK_TYPE)


def _pcap(stream: _Stream, order: str, unit: int, link_type: int) -> Iterator[Record]:
    """The packets of a pcap file, behind its header. Raises _BrokenError."""
    fields = struct.Struct(order + "IIII").unpack_from
    new = tuple.__new__  # what Record(...) calls, by a detour that takes twice the time
    while True:
        data, at = stream.data, stream.at
        end = len(data)
        last = end - _PCAP_PACKET
        while at <= last:
            seconds, fraction, captured, original = fields(data, at)
            start = at + _PCAP_PACKET
            stop = start + captured
            if stop > end or captured > LONGEST_PACKET:
                break
            yield new(Record, (seconds * _SECOND + fraction * unit, data[start:stop], original, link_type))
            at = stop
        stream.at = at
        if not _has_packet(stream, fields):
            return


def _has_packet(stream: _Stream, fields: Callable[[bytes, int], tuple[Any, ...]]) -> bool:
    """Load the packet of a pcap file that the stream stands at; False at the end. Raises _BrokenError."""
    if not stream.need(_PCAP_PACKET):
        if not stream.left:
            return False
        raise _BrokenError(f"the file ends within the header of a packet, after {stream.left} of {_PCAP_PACKET} bytes")
    captured = fields(stream.data, stream.at)[2]
    if captured > LONGEST_PACKET:
        raise _BrokenError(f"a packet of {captured} bytes, where {LONGEST_PACKET} is the most")
    if not stream.need(_PCAP_PACKET + captured):
        raise _BrokenError(f"the file ends within a packet, after {stream.left - _PCAP_PACKET} of {captured} bytes")
    return True


class _Interface(NamedTuple):
    """What an Interface Description Block says. A timestamp times `multiply` over `divide`, plus `offset_ns`, is a time."""

    link_type: int
    snaplen: int
    multiply: int
    divide: int
    offset_ns: int


class _Pcapng:
    """Reads the blocks of a pcapng file. Begins at a Section Header Block, which sets the byte order."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._interfaces: list[_Interface] = []
        self._time_ns = 0  # of the last packet that had a time
        self._set_byte_order("<")

    def _set_byte_order(self, order: str) -> None:
        self._order = order
        self._word = struct.Struct(order + "I").unpack_from
        self._fields = struct.Struct(order + "IIIIIII").unpack_from

    def records(self) -> Iterator[Record]:
        """The packets of all sections. Raises _BrokenError.

        Enhanced Packet Blocks that are loaded as a whole and right in every respect are read here, one after the other;
        any other block goes through `take`, which names what is wrong with it.
        """
        stream, new = self._stream, tuple.__new__
        while True:
            data, at = stream.data, stream.at
            end = len(data)
            fields, word, interfaces, time_ns = self._fields, self._word, self._interfaces, self._time_ns
            current, known = -1, len(interfaces)
            link_type = multiply = divide = offset_ns = 0
            while at + _PACKET_FIELDS <= end:
                kind, total, number, high, low, captured, original = fields(data, at)
                start, stop = at + _PACKET_FIELDS, at + total
                data_end = start + captured
                if kind != _ENHANCED_PACKET or stop > end or data_end + 4 > stop or captured > LONGEST_PACKET or total & 3:
                    break
                if word(data, stop - 4)[0] != total:
                    break
                if number != current:
                    if number >= known:
                        break
                    current = number
                    link_type, _, multiply, divide, offset_ns = interfaces[number]
                time_ns = (high << 32 | low) * multiply // divide + offset_ns
                if not EARLIEST <= time_ns <= LATEST:
                    time_ns = min(max(time_ns, EARLIEST), LATEST)
                yield new(Record, (time_ns, data[start:data_end], original, link_type))
                at = stop
            stream.at, self._time_ns = at, time_ns
            if not stream.need(1):
                return
            record = self.take()
            if record is not None:
                yield record

    def take(self) -> Record | None:
        """Read the block that the stream stands at; returns the packet in it, if it holds one. Raises _BrokenError."""
        kind, total = self._load()
        start = self._stream.at
        block = self._stream.data[start : start + total]
        if self._word(block, total - 4)[0] != total:
            raise _BrokenError(f"a block of {total} bytes whose length is {self._word(block, total - 4)[0]} at its end")
        record = None
        if kind == _SECTION:
            self._begin_section(block)
        elif kind == _INTERFACE:
            self._interfaces.append(self._describe(block))
        elif kind == _SIMPLE_PACKET:
            record = self._simple_packet(block)
        elif kind in {_ENHANCED_PACKET, _OLD_PACKET}:
            record = self._packet(block, kind)
        self._stream.at = start + total
        return record

    def _load(self) -> tuple[int, int]:
        """Load the block that the stream stands at; its type and length."""
        stream = self._stream
        if not stream.need(_BLOCK_ENDS):
            raise _BrokenError(f"the file ends within a block, after {stream.left} bytes")
        if stream.data[stream.at : stream.at + 4] == _SECTION_MAGIC:
            magic = stream.data[stream.at + 8 : stream.at + 12]
            if magic not in _BYTE_ORDERS:
                raise _BrokenError(f"a section without a byte order: its magic number is {magic.hex(' ')}")
            self._set_byte_order(_BYTE_ORDERS[magic])
        kind, total = self._word(stream.data, stream.at)[0], self._word(stream.data, stream.at + 4)[0]
        if total < _BLOCK_ENDS or total % 4 or total > LONGEST_BLOCK:
            raise _BrokenError(f"a block of {total} bytes, where a multiple of 4 from 12 to {LONGEST_BLOCK} is right")
        if not stream.need(total):
            raise _BrokenError(f"the file ends within a block, after {stream.left} of {total} bytes")
        return kind, total

    def _begin_section(self, block: bytes) -> None:
        """Forget the interfaces of the section before; each has its own (section 4.1)."""
        _expect(block, _SHORTEST_SECTION, "Section Header Block")
        major, minor = struct.unpack_from(self._order + "HH", block, 12)
        if major != _PCAPNG_MAJOR:
            raise _BrokenError(f"version {major}.{minor} of pcapng, where only 1 is known", _CONVERT)
        self._interfaces = []

    def _describe(self, block: bytes) -> _Interface:
        """Interface Description Block (section 4.2)."""
        _expect(block, _SHORTEST_INTERFACE, "Interface Description Block")
        link_type, _, snaplen = struct.unpack_from(self._order + "HHI", block, 8)
        multiply, divide = _per_tick(_MICROSECONDS)
        offset_ns = 0
        for code, value in self._options(block, 16):
            if code == _RESOLUTION and len(value) == 1:
                multiply, divide = _per_tick(value[0])
            elif code == _OFFSET and len(value) == 8:
                offset_ns = struct.unpack(self._order + "q", value)[0] * _SECOND
            elif code in {_RESOLUTION, _OFFSET}:
                raise _BrokenError(f"option {code} of an interface has {len(value)} bytes")
        return _Interface(link_type, snaplen, multiply, divide, offset_ns)

    def _options(self, block: bytes, at: int) -> Iterator[tuple[int, bytes]]:
        """The options in `block` from `at` (section 3.5): code and value."""
        end = len(block) - 4
        while at + 4 <= end:
            code, length = struct.unpack_from(self._order + "HH", block, at)
            if code == _END_OF_OPTIONS:
                return
            at += 4
            if at + length > end:
                raise _BrokenError(f"option {code} has {length} bytes, and its block {end - at} more")
            yield code, block[at : at + length]
            at += -(-length // 4) * 4

    def _packet(self, block: bytes, kind: int) -> Record:
        """Enhanced Packet Block (section 4.3), and the obsolete Packet Block, whose interface has but 16 bits."""
        _expect(block, _PACKET_FIELDS + 4, "packet block")
        _, _, number, high, low, captured, original = self._fields(block, 0)
        if kind == _OLD_PACKET:
            number = struct.unpack_from(self._order + "H", block, 8)[0]
        one = self._interface(number)
        self._check_captured(block, _PACKET_FIELDS, captured)
        time_ns = (high << 32 | low) * one.multiply // one.divide + one.offset_ns
        self._time_ns = min(max(time_ns, EARLIEST), LATEST)
        return Record(self._time_ns, block[_PACKET_FIELDS : _PACKET_FIELDS + captured], original, one.link_type)

    def _simple_packet(self, block: bytes) -> Record:
        """Simple Packet Block (section 4.4): of the first interface, cut by its snap length, with no time of its own."""
        _expect(block, _SHORTEST_SIMPLE_PACKET, "Simple Packet Block")
        original = self._word(block, 8)[0]
        one = self._interface(0)
        captured = min(original, one.snaplen) if one.snaplen else original
        self._check_captured(block, 12, captured)
        return Record(self._time_ns, block[12 : 12 + captured], original, one.link_type)

    def _interface(self, number: int) -> _Interface:
        if number >= len(self._interfaces):
            raise _BrokenError(f"a packet of interface {number}, which the section does not describe")
        return self._interfaces[number]

    @staticmethod
    def _check_captured(block: bytes, start: int, captured: int) -> None:
        room = len(block) - 4 - start
        if captured > min(room, LONGEST_PACKET):
            raise _BrokenError(f"a packet of {captured} bytes in a block with {room} for it")


def _expect(block: bytes, length: int, what: str) -> None:
    if len(block) < length:
        raise _BrokenError(f"a {what} of {len(block)} bytes, where {length} is the least")


def _per_tick(resolution: int) -> tuple[int, int]:
    """How many nanoseconds a tick is, as a fraction: if_tsresol is an exponent of 10, or of 2 with its high bit (4.2)."""
    if resolution & 0x80:
        return _SECOND, 1 << (resolution & 0x7F)
    if resolution <= 9:
        return 10 ** (9 - resolution), 1
    return 1, 10 ** (resolution - 9)
