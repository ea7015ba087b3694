"""What a run found: the numbers, each with its unit in its name, to JSON and back.

Theory of operation. A `Run` is made of frozen dataclasses whose fields are the keys of the JSON, so that one place tells
what a file holds. What follows from other numbers (rates) is a property; it is written for whoever reads the file with
other tools, and computed again, not believed, when the file is read. `read_json` takes nothing on trust: every value is
checked against the type of its field, and what is wrong is told by its path in the file. Keys that are not known are passed
over, so that older programs read newer files.

Bytes and bits are those of inner packets, headers included; overhead of the tunnel is not counted.

Latencies and lateness are kept in a `Histogram`, whose size does not depend on how many are recorded (the idea is that of
HdrHistogram): a number up to 255 has a bucket of its own, and from there each doubling of the range has 128 buckets, so a
bucket is never wider than 1/128 of what is in it.
"""

import json
import math
import types
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final, TypeAlias, Union, get_args, get_origin

from bench.replay.chunk import Chunk
from bench.replay.rewrite import walk_extensions
from encap.fields import (
    IPV4_HEADER_LENGTH,
    IPV4_PROTOCOL,
    IPV6_HEADER_LENGTH,
    IPV6_NEXT_HEADER,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
)

FORMAT = "pyflannel-dp replay"
VERSION = 1

SIZES: Final = (64, 128, 256, 512, 1024, 1280, 1518)
"""Upper ends of the classes of packet sizes; RFC 2544 and RFC 8219 measure at them."""

LARGER = "larger"
STAGES: Final = ("read", "lookup", "encapsulate", "send", "receive", "decapsulate", "deliver")
"""The stages of a path in their order; a mode names those that it has."""

Scalar: TypeAlias = str | int | float | bool | None

_LARGEST = (1 << 63) - 1
_PROTOCOLS: Final = {PROTOCOL_ICMP: "ICMP", PROTOCOL_TCP: "TCP", PROTOCOL_UDP: "UDP", PROTOCOL_ICMPV6: "ICMPv6"}


class ResultError(Exception):
    """A file is not what `write_json` writes; the text says where."""


class Histogram:
    """Counts of whole numbers from 0 to 2**63 - 1, in about 7 300 buckets; larger ones count as that.

    A percentile is the upper end of its bucket: never below the exact one, and above it by at most `RELATIVE_ERROR`.
    """

    _BITS: Final = 7
    RELATIVE_ERROR: Final = 1 / (1 << _BITS)

    def __init__(self) -> None:
        self._buckets = array("q", bytes(8 * (self._index(_LARGEST) + 1)))
        self.count = 0
        self.total = 0
        """The exact sum of what was recorded."""
        self.maximum = 0
        """Exact, too."""

    def record(self, value: int, count: int = 1) -> None:
        """Count `value` `count` times. Raises ValueError if it is negative."""
        if value < 0:
            raise ValueError(f"a histogram takes no negative numbers ({value})")
        value = min(value, _LARGEST)
        self._buckets[self._index(value)] += count
        self.count += count
        self.total += value * count
        self.maximum = max(self.maximum, value)

    def record_all(self, values: Iterable[int]) -> None:
        """Count each of `values`."""
        for value, count in Counter(values).items():
            self.record(value, count)

    def add(self, other: "Histogram") -> None:
        """Count what `other` has counted."""
        for index, count in enumerate(other._buckets):
            if count:
                self._buckets[index] += count
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)

    def percentile(self, percent: float) -> int:
        """The number that `percent` of what was recorded does not exceed (nearest rank); 0 if there is nothing."""
        # Rounded before its ceiling: 99.9 % of 41 000 are 40 959, and in floats a little more.
        rank = max(math.ceil(round(percent * self.count / 100, 6)), 1)
        for upper, count in self.buckets():
            rank -= count
            if rank <= 0:
                return upper
        return self.maximum

    @property
    def mean(self) -> float:
        """The exact mean; 0 if there is nothing."""
        return self.total / self.count if self.count else 0.0

    def buckets(self) -> Iterator[tuple[int, int]]:
        """The upper end and the count of each bucket that is not empty, in ascending order."""
        for index, count in enumerate(self._buckets):
            if count:
                yield min(self._upper(index), self.maximum), count

    @classmethod
    def _index(cls, value: int) -> int:
        shift = max(value.bit_length() - cls._BITS - 1, 0)
        return (shift << cls._BITS) + (value >> shift)

    @classmethod
    def _upper(cls, index: int) -> int:
        shift = max((index >> cls._BITS) - 1, 0)
        return ((index - (shift << cls._BITS) + 1) << shift) - 1


@dataclass(frozen=True)
class Trace:
    """The capture, as it was replayed once."""

    name: str
    fingerprint: str
    """Of the lengths and protocols in their order: the same whatever addresses were put in."""

    packets: int
    inner_bytes: int
    duration_seconds: float
    packets_by_size_bytes: dict[str, int]
    """Keys are the upper ends `SIZES`, and `LARGER`."""

    packets_by_protocol: dict[str, int]
    packets_skipped_by_reason: dict[str, int]


class TraceCounter:
    """Counts chunks into a `Trace`; how they were cut makes no difference."""

    def __init__(self) -> None:
        self._lengths: Counter[int] = Counter()
        self._protocols: Counter[int] = Counter()
        self._sums = (0, 0)
        self._times: tuple[int, int] | None = None

    def add(self, chunk: Chunk) -> None:
        """Count the packets of `chunk`."""
        if not len(chunk):
            return
        self._lengths.update(chunk.length)
        keys = array("H", (_protocol_key(chunk.data, *one) for one in zip(chunk.offset, chunk.length, strict=True)))
        self._protocols.update(keys)
        self._sums = zlib.crc32(chunk.length.tobytes(), self._sums[0]), zlib.crc32(keys.tobytes(), self._sums[1])
        earliest, latest = min(chunk.time_ns), max(chunk.time_ns)
        if self._times is not None:
            earliest, latest = min(earliest, self._times[0]), max(latest, self._times[1])
        self._times = earliest, latest

    def trace(self, name: str, skipped: dict[str, int]) -> Trace:
        """What was counted, of the capture `name`, of which `skipped` was left out."""
        sizes = dict.fromkeys([*map(str, SIZES), LARGER], 0)
        labels = list(sizes)
        for length, count in self._lengths.items():
            sizes[labels[bisect_left(SIZES, length)]] += count
        return Trace(
            name=name,
            fingerprint="{:08x}{:08x}".format(*self._sums),
            packets=self._lengths.total(),
            inner_bytes=sum(length * count for length, count in self._lengths.items()),
            duration_seconds=(self._times[1] - self._times[0]) / 1e9 if self._times else 0.0,
            packets_by_size_bytes=sizes,
            packets_by_protocol={_protocol_name(key): count for key, count in self._protocols.most_common()},
            packets_skipped_by_reason=dict(skipped),
        )


def _protocol_key(data: bytearray, at: int, length: int) -> int:
    """Version and transport protocol of a packet as one number; 0 if it is not IP."""
    version = data[at] >> 4 if length else 0
    if version == 4 and length >= IPV4_HEADER_LENGTH:
        return 4 << 8 | data[at + IPV4_PROTOCOL]
    if version == 6 and length >= IPV6_HEADER_LENGTH:
        protocol, _, _ = walk_extensions(data, at + IPV6_HEADER_LENGTH, at + length, data[at + IPV6_NEXT_HEADER])
        return 6 << 8 | (protocol if protocol >= 0 else _LATER_FRAGMENT)
    return 0


_LATER_FRAGMENT = 44
"""What a fragment's transport protocol counts as where its header is in another packet."""


def _protocol_name(key: int) -> str:
    if not key:
        return "not IP"
    version, protocol = key >> 8, key & 0xFF
    if version == 6 and protocol == _LATER_FRAGMENT:
        return "IPv6 later fragment"
    return f"IPv{version} {_PROTOCOLS.get(protocol, f'protocol {protocol}')}"


@dataclass(frozen=True)
class Loop:
    """The capture carried once, in measured time: what was delivered, and how long it took."""

    DERIVED: ClassVar = ("packets_per_second", "bits_per_second")
    packets: int
    inner_bytes: int
    seconds: float

    @property
    def packets_per_second(self) -> float:
        """0 if no time was measured."""
        return self.packets / self.seconds if self.seconds else 0.0

    @property
    def bits_per_second(self) -> float:
        """Of inner packets; 0 if no time was measured."""
        return 8 * self.inner_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Stage:
    """What one stage of the path costs; cycles where the machine counts them."""

    name: str
    ns_per_packet: float
    cycles_per_packet: float | None = None


@dataclass(frozen=True)
class Latency:
    """From handing a packet over to its delivery. Percentiles are at most `relative_error` above the exact ones."""

    packets: int
    mean_microseconds: float
    p50_microseconds: float
    p90_microseconds: float
    p99_microseconds: float
    p99_9_microseconds: float
    max_microseconds: float
    relative_error: float
    buckets_nanoseconds: list[tuple[int, int]]
    """Upper end and count of each bucket of the distribution that is not empty, ascending."""

    @classmethod
    def of(cls, histogram: Histogram) -> "Latency":
        """The summary of a histogram of nanoseconds."""
        return cls(
            packets=histogram.count,
            mean_microseconds=histogram.mean / 1e3,
            p50_microseconds=histogram.percentile(50) / 1e3,
            p90_microseconds=histogram.percentile(90) / 1e3,
            p99_microseconds=histogram.percentile(99) / 1e3,
            p99_9_microseconds=histogram.percentile(99.9) / 1e3,
            max_microseconds=histogram.maximum / 1e3,
            relative_error=Histogram.RELATIVE_ERROR,
            buckets_nanoseconds=list(histogram.buckets()),
        )

    def percentiles(self) -> dict[str, float]:
        """By their names for people, in microseconds."""
        return {
            "p50": self.p50_microseconds,
            "p90": self.p90_microseconds,
            "p99": self.p99_microseconds,
            "p99.9": self.p99_9_microseconds,
            "max": self.max_microseconds,
        }


@dataclass(frozen=True)
class Delivery:
    """How correctly the packets came out, all loops together. None: this mode does not look for it.

    `lost` are those that were accepted and never came out; those that were refused have their verdict.
    """

    sent: int
    delivered: int
    lost: int | None = None
    reordered: int | None = None
    corrupted: int | None = None


@dataclass(frozen=True)
class Lateness:
    """How long after its time a packet was handed over."""

    mean_microseconds: float
    p99_microseconds: float
    max_microseconds: float

    @classmethod
    def of(cls, histogram: Histogram) -> "Lateness":
        """The summary of a histogram of nanoseconds."""
        return cls(histogram.mean / 1e3, histogram.percentile(99) / 1e3, histogram.maximum / 1e3)


@dataclass(frozen=True)
class Pacing:
    """How the packets were to be sent, and how late they were; None where there was no schedule."""

    pace: str
    lateness: Lateness | None = None


@dataclass(frozen=True)
class Run:
    """One replay. `loops` are repetitions of the same, from whose differences noise is told."""

    DERIVED: ClassVar = ("median_packets_per_second", "median_bits_per_second")
    mode: str
    command: list[str]
    machine: dict[str, Scalar]
    settings: dict[str, Scalar]
    """What else decides about speed, as framing, MTU and batch size."""

    trace: Trace
    loops: list[Loop]
    delivery: Delivery
    pacing: Pacing
    stages: list[Stage] = field(default_factory=list)
    latency: Latency | None = None
    verdicts: dict[str, dict[str, int]] = field(default_factory=dict)
    """By direction (outbound, inbound) and name, as `dataplane.verdict.by_name` gives them."""

    notes: list[str] = field(default_factory=list)

    @property
    def packet_rates(self) -> list[float]:
        """Packets per second of each loop."""
        return [one.packets_per_second for one in self.loops]

    @property
    def bit_rates(self) -> list[float]:
        """Bits per second of each loop."""
        return [one.bits_per_second for one in self.loops]

    @property
    def median_packets_per_second(self) -> float:
        """The main rate; 0 without loops."""
        return median(self.packet_rates or [0.0])

    @property
    def median_bits_per_second(self) -> float:
        """0 without loops."""
        return median(self.bit_rates or [0.0])


def to_json(run: Run) -> str:
    """The run as a file holds it. Raises ValueError for a number that is not finite."""
    return json.dumps({"format": FORMAT, "version": VERSION, **_encoded(run)}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Run:
    """The run in `text`. Raises ResultError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultError(f'not the result of a replay: there is no "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise ResultError(f"version {content.get('version')!r} of the format; this program knows version {VERSION}")
    run: Run = _decoded(Run, content, "")
    return run


def write_json(path: Path, run: Run) -> None:
    """Raises OSError."""
    path.write_text(to_json(run), encoding="utf-8")


def read_json(path: Path) -> Run:
    """Raises ResultError, whose text names the file."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ResultError(f"{path}: not text") from None
    except ResultError as error:
        raise ResultError(f"{path}: {error}") from None


def _encoded(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        names = [*(one.name for one in fields(value)), *getattr(value, "DERIVED", ())]
        return {name: _encoded(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: _encoded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(one) for one in value]
    return value


def _decoded(kind: Any, value: Any, path: str) -> Any:
    """`value` as a `kind`, which is the type of a field; all of them are read here, so that all are checked alike."""
    if is_dataclass(kind):
        return _decoded_fields(kind, value, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {Union, types.UnionType}:
        return _decoded_union(arguments, value, path)
    if origin is dict:
        items = _of(dict, value, path, "an object").items()
        return {key: _decoded(arguments[1], one, f"{path}.{key}") for key, one in items}
    if origin is list:
        return [_decoded(arguments[0], one, f"{path}[{i}]") for i, one in enumerate(_of(list, value, path, "a list"))]
    if origin is tuple:
        parts = _of(list, value, path, "a list")
        if len(parts) != len(arguments):
            raise _wrong(path, f"a list of {len(arguments)}", value)
        return tuple(_decoded(one, parts[i], f"{path}[{i}]") for i, one in enumerate(arguments))
    if kind is str:
        return _of(str, value, path, "a text")
    return _decoded_number(kind, value, path)


def _decoded_fields(kind: Any, value: Any, path: str) -> Any:
    content = _of(dict, value, path, "an object")
    read = {}
    for one in fields(kind):
        inner = f"{path}.{one.name}" if path else one.name
        if one.name not in content:
            raise ResultError(f"{inner} is missing")
        read[one.name] = _decoded(one.type, content[one.name], inner)
    return kind(**read)


def _decoded_union(kinds: Sequence[Any], value: Any, path: str) -> Any:
    """What may be missing, or any scalar: a setting may be anything, below zero too."""
    if value is None:
        return None
    if len(kinds) == 2:
        return _decoded(kinds[0], value, path)
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise _wrong(path, "a text, a number, true, false or null", value)
    return value


def _decoded_number(kind: Any, value: Any, path: str) -> int | float:
    """Counts, times and rates: none of them is ever below zero."""
    wanted = "a whole number of at least 0" if kind is int else "a number of at least 0"
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise _wrong(path, wanted, value)
    try:
        number: int | float = kind(value)
    except OverflowError:
        raise _wrong(path, wanted, value) from None
    if not (math.isfinite(number) and number >= 0):
        raise _wrong(path, wanted, value)
    return number


def _of(kind: type, value: Any, path: str, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong(path, wanted, value)
    return value


def _wrong(path: str, wanted: str, value: Any) -> ResultError:
    told = json.dumps(value)
    return ResultError(f"{path or 'the file'}: {wanted} is wanted, not {told if len(told) <= 60 else told[:57] + '...'}")
