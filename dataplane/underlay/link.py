"""One direction of a link: which datagrams arrive, when, and as what.

Theory of operation. A link is a queue, a transmitter and a wire, one behind the other, as on a real path. `Link.cross`
takes a datagram through them at once and says when it will arrive; holding it until then is the caller's business. In
order:

1. *Size.* What is larger than `mtu` is dropped, or cut into fragments.
2. *Queue and transmitter*, if there is a `rate`: datagrams leave one behind the other, each after the time that its bits
   take. `queue` of them may wait; the next is dropped.
3. *Loss*, for each fragment by itself: the two states of a burst first (Gilbert and Elliott), independent loss then. One
   lost fragment loses the datagram.
4. *Duplication.* A second copy follows the first.
5. For each copy: *corruption* of one bit, and then either *reordering*, which is that the copy skips the delay, or the
   *delay* with its jitter.

Order is kept unless `reorder` says otherwise: a copy arrives no earlier than the one before it, however short its delay.
So jitter that is large beside the distance of two datagrams lengthens the mean delay, as it does in any queue.

Sans-I/O: time and the random generator are parameters. Random numbers are drawn in the order above: for each fragment the
change of state, loss in that state, independent loss; then duplication; then for each copy corruption, which bit,
reordering, delay. A probability of 0 draws nothing, and neither do a jitter of 0 and a datagram that has come to its end.
So one seed and one sequence of calls give the same fates, and a perfect link draws nothing.

`Link.spec` may be replaced at any time. What is under way then keeps its arrival, and what follows does not overtake it.
"""

import random
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from decimal import Decimal
from typing import Any

from encap.fields import IPV4_HEADER_LENGTH, IPV6_HEADER_LENGTH, UDP_HEADER_LENGTH

LONGEST_DELAY = 86400.0
FASTEST_RATE = 1e15
MINIMUM_MTU = 68
"""What every IPv4 link must carry (RFC 791 3.2)."""

REFUSE, DROP, FRAGMENT = "refuse", "drop", "fragment"
_OVERSIZE = (REFUSE, DROP, FRAGMENT)
_IPV6_FRAGMENT_HEADER = 8
_PARETO_SHAPE = 3.0
"""The tail that netem's table has: rare delays are many times the mean, and yet there is a variance."""

_NOISE: dict[str, Callable[[random.Random, float], float]] = {
    "uniform": lambda rng, jitter: rng.uniform(-jitter, jitter),
    "normal": lambda rng, jitter: rng.normalvariate(0.0, jitter),
    "exponential": lambda rng, jitter: rng.expovariate(1.0) * jitter,
    "pareto": lambda rng, jitter: (rng.paretovariate(_PARETO_SHAPE) - 1.0) * (_PARETO_SHAPE - 1.0) * jitter,
}
"""What jitter adds to the delay, by the distribution's name."""


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def _is_number(value: object, least: float, most: float) -> bool:
    """Whether `value` is a number in that range, which NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _require_probability(name: str, value: object) -> None:
    _require(_is_number(value, 0, 1), name, value, "a probability from 0 to 1 (or from 0% to 100%)")


def _require_whole(name: str, value: object, least: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    _require(is_whole and _is_number(value, least, float("inf")), name, value, f"a whole number, at least {least}")


@dataclass(frozen=True)
class Burst:
    """Loss in bursts, by Gilbert and Elliott: a link is good or bad, and may change with every datagram, before it crosses.

    In the long run it is bad for `enter / (enter + leave)` of the datagrams, and for `1 / leave` of them at a time.
    """

    enter: float
    """The probability of good becoming bad."""
    leave: float
    """The probability of bad becoming good."""
    loss_in_bad: float = 1.0
    loss_in_good: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            _require_probability(one.name, getattr(self, one.name))


@dataclass(frozen=True)
class LinkSpec:
    """What a link does to datagrams; as it stands here, nothing. Raises ValueError for what no link can be."""

    loss: float = 0.0
    """The probability of being lost, for each datagram by itself."""
    burst: Burst | None = None
    """Loss in bursts, besides `loss`."""
    delay: float = 0.0
    """Seconds."""
    jitter: float = 0.0
    """Seconds: the scale of what is added to `delay`; a sum below 0 counts as 0."""
    distribution: str = "uniform"
    """uniform: ±jitter; normal: sigma is the jitter; exponential, pareto (heavy tail): the mean is the jitter."""
    reorder: float = 0.0
    """The probability of skipping the delay and so overtaking those on the way."""
    duplicate: float = 0.0
    """The probability of arriving twice."""
    corrupt: float = 0.0
    """The probability that one bit of the payload, any, is flipped."""
    rate: float | None = None
    """Bits per second, those of the outer headers included."""
    queue: int = 100
    """How many datagrams may wait for the transmitter, besides the one that it is sending."""
    mtu: int | None = None
    """The longest outer IP packet, in bytes."""
    oversize: str = REFUSE
    """What becomes of a longer one. refuse: dropped, and its sender can know. drop: a black hole. fragment: cut."""

    def __post_init__(self) -> None:
        for name in ("loss", "reorder", "duplicate", "corrupt"):
            _require_probability(name, getattr(self, name))
        for name, seconds in (("delay", self.delay), ("jitter", self.jitter)):
            allowed = f"a time in seconds from 0 to {LONGEST_DELAY:.0f}"
            _require(_is_number(seconds, 0, LONGEST_DELAY), name, seconds, allowed)
        _require(self.burst is None or isinstance(self.burst, Burst), "burst", self.burst, "a Burst or None")
        _require(self.distribution in _NOISE, "distribution", self.distribution, f"one of {', '.join(_NOISE)}")
        if self.rate is not None:
            _require(_is_number(self.rate, 1, FASTEST_RATE), "rate", self.rate, f"1 to {FASTEST_RATE:g} bits per second")
        _require_whole("queue", self.queue, 0)
        if self.mtu is not None:
            _require_whole("mtu", self.mtu, MINIMUM_MTU)
        _require(self.oversize in _OVERSIZE, "oversize", self.oversize, f"one of {', '.join(_OVERSIZE)}")

    @property
    def is_perfect(self) -> bool:
        """Whether every datagram arrives at once and as it is, so that a caller need not ask."""
        return not (
            self.loss
            or self.delay
            or self.jitter
            or self.reorder
            or self.duplicate
            or self.corrupt
            or self.burst is not None
            or self.rate is not None
            or self.mtu is not None
        )


@dataclass
class LinkCounts:
    """What became of the datagrams. Always `sent + duplicated == delivered + lost + queue_full + oversize`."""

    sent: int = 0
    """Given to the link, whatever became of them."""
    delivered: int = 0
    """Copies that arrive, now or later."""
    lost: int = 0
    duplicated: int = 0
    corrupted: int = 0
    """Copies with a flipped bit."""
    reordered: int = 0
    """Copies that overtake another; one that skips the delay with nothing on the way is not among them."""
    queue_full: int = 0
    oversize: int = 0
    """Dropped for being larger than the MTU."""
    fragmented: int = 0
    """Cut, whatever became of the fragments."""


class Link:
    """One direction of a link, as `spec` has it. All randomness comes from `rng`."""

    def __init__(self, spec: LinkSpec, rng: random.Random) -> None:
        self.spec = spec
        """May be replaced at any time."""
        self.counts = LinkCounts()
        self._rng = rng
        self._is_bad = False
        self._idle_from = float("-inf")
        """When the transmitter has sent all that it was given."""
        self._starts: deque[float] = deque()
        """When each of the waiting datagrams is transmitted."""
        self._last_arrival = float("-inf")
        """The latest arrival of those that keep their order."""

    def cross(
        self, now: float, payload: bytes, overhead: int = 0, *, fragmentable: bool = False
    ) -> list[tuple[float, bytes]]:
        """When the datagram arrives, by the clock of `now` and not before it, and as what. Empty: it does not.

        `overhead` is the length of the outer headers, which count for the rate and the MTU. If it is `fragmentable` (sent
        with DF off), it is cut where it is too large, whatever the spec says about that. `now` must not go back.
        """
        spec, counts = self.spec, self.counts
        counts.sent += 1
        size, fragments = len(payload) + overhead, 1
        if spec.mtu is not None and size > spec.mtu:
            if spec.oversize != FRAGMENT and not fragmentable:
                counts.oversize += 1
                return []
            counts.fragmented += 1
            fragments, size = _fragments(size, overhead, spec.mtu)
        left = self._transmit(now, size)
        if left is None:
            counts.queue_full += 1
            return []
        if self._is_lost(fragments):
            counts.lost += 1
            return []
        copies = 1 + self._happens(spec.duplicate)
        counts.duplicated += copies - 1
        counts.delivered += copies
        return [self._arrive(left, payload) for _ in range(copies)]

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability

    def _transmit(self, now: float, size: int) -> float | None:
        """When the last bit has left, or None if the queue is full."""
        if self.spec.rate is None:
            return now
        waiting = self._starts
        while waiting and waiting[0] <= now:
            waiting.popleft()
        start = max(now, self._idle_from)
        if start > now:
            if len(waiting) >= self.spec.queue:
                return None
            waiting.append(start)
        self._idle_from = start + 8 * size / self.spec.rate
        return self._idle_from

    def _is_lost(self, fragments: int) -> bool:
        """Every fragment draws, also behind one that is lost: they do cross the link."""
        lost = [self._loses_one() for _ in range(fragments)]
        return any(lost)

    def _loses_one(self) -> bool:
        in_burst = self._is_lost_in_burst()
        by_itself = self._happens(self.spec.loss)
        return in_burst or by_itself

    def _is_lost_in_burst(self) -> bool:
        burst = self.spec.burst
        if burst is None:
            self._is_bad = False
            return False
        if self._happens(burst.leave if self._is_bad else burst.enter):
            self._is_bad = not self._is_bad
        return self._happens(burst.loss_in_bad if self._is_bad else burst.loss_in_good)

    def _arrive(self, left: float, payload: bytes) -> tuple[float, bytes]:
        """When a copy that left the transmitter then arrives, and as what."""
        payload = self._perhaps_corrupted(payload)
        if self._happens(self.spec.reorder):
            self.counts.reordered += left < self._last_arrival
            return left, payload
        self._last_arrival = max(self._last_arrival, left + self._delay())
        return self._last_arrival, payload

    def _perhaps_corrupted(self, payload: bytes) -> bytes:
        if not (self._happens(self.spec.corrupt) and payload):
            return payload
        self.counts.corrupted += 1
        at, bit = divmod(self._rng.randrange(8 * len(payload)), 8)
        return payload[:at] + bytes([payload[at] ^ (1 << bit)]) + payload[at + 1 :]

    def _delay(self) -> float:
        spec = self.spec
        if not spec.jitter:
            return spec.delay
        return max(0.0, spec.delay + _NOISE[spec.distribution](self._rng, spec.jitter))


def _fragments(size: int, overhead: int, mtu: int) -> tuple[int, int]:
    """Into how many pieces an IP packet of `size` bytes is cut, and how many bytes they are together.

    All but the last hold a multiple of 8 bytes (RFC 791 3.2, RFC 8200 4.5). The outer headers' length tells the family.
    """
    is_ipv6 = overhead >= IPV6_HEADER_LENGTH + UDP_HEADER_LENGTH
    header = IPV6_HEADER_LENGTH if is_ipv6 else IPV4_HEADER_LENGTH
    header_of_piece = header + (_IPV6_FRAGMENT_HEADER if is_ipv6 else 0)
    data, room = size - header, mtu - header_of_piece
    count = 1 - (room - data) // (room // 8 * 8)  # the last piece, and as many whole ones as the rest takes
    return count, data + count * header_of_piece


# The text form, and that of configuration files


_NUMBER = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?) *([a-z%]*)")
_PROBABILITY_UNITS = {"": Decimal(1), "%": Decimal("0.01")}
_TIME_UNITS = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "": Decimal(1)}
_RATE_UNITS = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(1000), "bit": Decimal(1), "": Decimal(1)}
_PROBABILITY = "a probability: a number from 0 to 1, or a percentage like 10%"
_TIME = "a time: a number of seconds, or one with s, ms or us, like 20ms"
_RATE = "a rate: a number of bits per second, or one with bit, kbit, mbit or gbit, like 10mbit"
_WHOLE = "a whole number, like 100"
_BURST = "a burst: ENTER/LEAVE[/LOSS_IN_BAD[/LOSS_IN_GOOD]], four probabilities, like 1%/30%"
_PERFECT = "perfect"


def _read_quantity(value: object, units: Mapping[str, Decimal], what: str) -> float:
    """A number, or text with a unit; decimal arithmetic, so that 20ms is the float nearest to 0.02."""
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip().lower())
        if match and match[2] in units:
            return float(Decimal(match[1]) * units[match[2]])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not {what}")


def _write_quantity(value: float, units: Mapping[str, Decimal]) -> str:
    """In the largest unit of which there is a whole one, or in the smallest. `units` are in falling order."""
    exact = Decimal(repr(float(value)))
    unit = next((name for name, size in units.items() if name and exact >= size), min(units, key=lambda name: units[name]))
    number = (exact / units[unit]).normalize()
    plain = f"{number:f}"
    return f"{plain if len(plain) <= 20 else number}{unit}"


def _read_probability(value: object) -> float:
    return _read_quantity(value, _PROBABILITY_UNITS, _PROBABILITY)


def _write_probability(value: float) -> str:
    return _write_quantity(value, _PROBABILITY_UNITS)


def _read_whole(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r" *[0-9]{1,18} *", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{value!r} is not {_WHOLE}")


def _read_word(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a word")
    return value.strip().lower()


def _read_burst(value: object) -> Burst:
    if isinstance(value, Burst):
        return value
    names = [one.name for one in fields(Burst)]
    if isinstance(value, str):
        parts = value.split("/")
        if not 2 <= len(parts) <= len(names):
            raise ValueError(f"{value!r} is not {_BURST}")
        value = dict(zip(names, parts, strict=False))
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not {_BURST}")
    _require_known(value, names)
    missing = [one.name for one in fields(Burst) if one.default is MISSING and one.name not in value]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return Burst(**{name: _read_part(name, part, _read_probability) for name, part in value.items()})


def _write_burst(burst: Burst) -> str:
    values = [burst.enter, burst.leave, burst.loss_in_bad, burst.loss_in_good]
    if burst.loss_in_good == 0:
        values.pop()
        if burst.loss_in_bad == 1:
            values.pop()
    return "/".join(_write_probability(value) for value in values)


@dataclass(frozen=True)
class _Kind:
    """How values of one kind are read from text or TOML, and written as text."""

    read: Callable[[object], Any]
    write: Callable[[Any], str]


_A_PROBABILITY = _Kind(_read_probability, _write_probability)
_A_TIME = _Kind(lambda value: _read_quantity(value, _TIME_UNITS, _TIME), lambda value: _write_quantity(value, _TIME_UNITS))
_A_RATE = _Kind(lambda value: _read_quantity(value, _RATE_UNITS, _RATE), lambda value: _write_quantity(value, _RATE_UNITS))
_A_WHOLE = _Kind(_read_whole, str)
_A_WORD = _Kind(_read_word, str)
_KINDS = {
    "loss": _A_PROBABILITY,
    "burst": _Kind(_read_burst, _write_burst),
    "delay": _A_TIME,
    "jitter": _A_TIME,
    "distribution": _A_WORD,
    "reorder": _A_PROBABILITY,
    "duplicate": _A_PROBABILITY,
    "corrupt": _A_PROBABILITY,
    "rate": _A_RATE,
    "queue": _A_WHOLE,
    "mtu": _A_WHOLE,
    "oversize": _A_WORD,
}
"""By the field of `LinkSpec`, in its order."""


def parse_link(text: str) -> LinkSpec:
    """The link that text like ``loss=10%,delay=20ms,rate=10mbit,burst=1%/30%`` describes; "perfect" (or nothing) is one.

    Raises ValueError, which names the part that is wrong and says what would be right.
    """
    found: dict[str, object] = {}
    for part in text.split(",") if text.strip() not in {"", _PERFECT} else []:
        name, is_pair, value = (piece.strip() for piece in part.partition("="))
        if not is_pair or not value:
            raise ValueError(f"{part.strip()!r} is not of the form KEY=VALUE; the keys are {', '.join(_KINDS)}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return link_from_mapping(found)


def link_from_mapping(mapping: Mapping[str, object]) -> LinkSpec:
    """The link that a table of a configuration file describes: numbers, or text with units as `parse_link` reads it.

    `burst` may be text, or a table with the fields of `Burst`. Raises ValueError.
    """
    _require_known(mapping, _KINDS)
    return LinkSpec(**{name: _read_part(name, value, _KINDS[name].read) for name, value in mapping.items()})


def describe_link(spec: LinkSpec) -> str:
    """`spec` as `parse_link` reads it, without what is as it is by default."""
    differing = [one.name for one in fields(spec) if getattr(spec, one.name) != one.default]
    return ",".join(f"{name}={_KINDS[name].write(getattr(spec, name))}" for name in differing) or _PERFECT


def _require_known(mapping: Mapping[Any, object], known: Mapping[str, object] | list[str]) -> None:
    for name in mapping:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; known are {', '.join(known)}")


def _read_part(name: str, value: object, read: Callable[[object], Any]) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
