"""Faults on purpose: an underlay or a device behind a bad link, for tests and for trying out a running node.

Theory of operation. A wrapper stands where the underlay or device stood, keeps its contract, and impairs what is
*received*; whatever else is asked of it, sending above all, goes straight through. To impair both directions, wrap both
ends.

What the wrapped part has is taken from it when its watcher is called, and crosses a `Link` (``dataplane.underlay.link``),
datagram by datagram: runs of datagrams are taken apart. What arrives later waits in a heap until then; a timer calls the
watcher when the first of it is due. A heap that is full drops what comes next, counted as `queue_full`. Nothing is taken
from the wrapped part while something that is due waits for room in a batch, so an overloaded node drops where it always
does. While the link is perfect and nothing waits, the wrapped part fills the caller's batch itself.

A datagram that waits is kept with its sender's address, not its number: numbers are the table's, and the table may have
changed when it arrives. The address comes from origins of our own (``dataplane.tap``), since one number may stand for two
addresses, and which of them it was tells how long the outer header is. A stranger's is known, too, and when its datagram
arrives it may be none any more; only beyond `MAX_STRANGERS` a sender is not known, and stays a stranger.

A device's packets cross as they are, so a superpacket is one datagram that is lost or delayed as a whole, and larger than
any MTU; to impair packets one by one, leave the device's offloads off.

The clock is the event loop's that watches, unless `now` and `call_at` give another.
"""

import asyncio
import heapq
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar

from dataplane.batch import Batch
from dataplane.device import Device
from dataplane.tap import Senders, is_run, pieces
from dataplane.underlay import Underlay
from dataplane.underlay.link import Link, LinkSpec, describe_link
from dataplane.wrapping import DeviceWrapper, UnderlayWrapper
from encap.overhead import overhead
from routing.table import UNKNOWN_VTEP

HELD_DATAGRAMS = 10_000
HELD_PACKETS = 1_000
"""A device's may be superpackets, of up to 64 KiB each."""

_TAKEN_AT_ONCE = 32
_TAKES = 8
"""How often one receive asks the wrapped part while all is lost or delayed; its watcher is called again for the rest."""

_EARLY = 1e-9
"""Seconds by which asyncio calls a timer too early, its clock's resolution."""

_TICK = 1e-3
"""Seconds until another look after a timer that was called earlier than that: uvloop's clock has milliseconds."""

_T = TypeVar("_T")
_Inner = TypeVar("_Inner", bound="_Watched")
Now = Callable[[], float]
CallAt = Callable[[float, Callable[[], None]], asyncio.Handle]


class _Passage(Generic[_T]):
    """A link and what is on its way, each datagram with something of its own (`T`), and the timer of the first."""

    def __init__(self, link: Link, limit: int, now: Now | None, call_at: CallAt | None) -> None:
        self.link = link
        self._limit = limit
        self._given_now, self._given_call_at = now, call_at
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heap: list[tuple[float, int, bytes, _T]] = []
        self._entered = 0
        """Breaks ties in the heap, so that what arrives at one moment keeps its order."""
        self._ready: Callable[[], None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def is_open(self) -> bool:
        """Whether there is nothing to do: what is received may pass by."""
        return not self._heap and self.link.spec.is_perfect

    def passed_by(self, datagrams: int) -> None:
        """Count what did not need the link."""
        self.link.counts.sent += datagrams
        self.link.counts.delivered += datagrams

    def enter(self, now: float, payload: bytes, overhead_length: int, own: _T) -> None:
        """Let a datagram cross."""
        for arrival, arriving in self.link.cross(now, payload, overhead_length):
            if len(self._heap) >= self._limit:
                self.link.counts.delivered -= 1
                self.link.counts.queue_full += 1
                continue
            self._entered += 1
            heapq.heappush(self._heap, (arrival, self._entered, arriving, own))

    def fill(self, batch: Batch, take: Callable[[float], bool], put: Callable[[bytes, _T], None]) -> None:
        """`put` what is due into `batch`, until it is full; `take` lets more enter, and says if there may be more yet."""
        takes = _TAKES
        while not batch.is_full:
            now = self.now()
            if self._is_due(now):
                _, _, payload, own = heapq.heappop(self._heap)
                put(payload, own)
            elif takes:
                takes = takes - 1 if take(now) else 0
            else:
                break
        self._arm()

    def _is_due(self, now: float) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now + _EARLY

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` from the running loop while something is due."""
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        self._arm()

    def unwatch(self) -> None:
        """Call it no more."""
        self._ready = None
        self._disarm()

    def close(self) -> None:
        """Drop what is on its way."""
        self.unwatch()
        self._heap.clear()

    def _wake(self) -> None:
        self._timer = None
        now = self.now()
        if self._ready is None or not self._is_due(now):
            self._arm(now + _TICK)
            return
        self._ready()
        self._arm()

    def _arm(self, not_before: float = float("-inf")) -> None:
        """Have `_wake` called when the first datagram is due, which may be past if the watcher left some."""
        if self._ready is None or not self._heap:
            self._disarm()
            return
        when = max(self._heap[0][0], not_before)
        if self._timer is None or self._timer_at != when:
            self._disarm()
            self._timer, self._timer_at = self._call_at(when, self._wake), when

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def now(self) -> float:
        """The given clock; or the watching loop's, or the running one's, or the one that loops use."""
        if self._given_now is not None:
            return self._given_now()
        if self._loop is not None:
            return self._loop.time()
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    def _call_at(self, when: float, callback: Callable[[], None]) -> asyncio.Handle:
        if self._given_call_at is not None:
            return self._given_call_at(when, callback)
        loop = self._loop or asyncio.get_running_loop()
        return loop.call_at(when, callback)


class _Watched(Protocol):
    """What underlays and devices have in common."""

    def watch(self, ready: Callable[[], None]) -> None: ...
    def unwatch(self) -> None: ...
    def close(self) -> None: ...


class _Faulty(Generic[_Inner, _T]):
    """What both wrappers have in common; see `FaultyUnderlay` for the parameters."""

    def __init__(
        self,
        inner: _Inner,
        spec: LinkSpec,
        rng: random.Random,
        now: Now | None = None,
        call_at: CallAt | None = None,
        *,
        limit: int,
    ) -> None:
        self._inner = inner
        self.link = Link(spec, rng)
        """Its counters, and its `spec`, which may be replaced."""
        self._passage: _Passage[_T] = _Passage(self.link, limit, now, call_at)
        self._scratch = Batch(_TAKEN_AT_ONCE)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # while a copy is being made there is none yet, and to ask again would never end
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def held(self) -> int:
        """How many are on their way."""
        return len(self._passage)

    def watch(self, ready: Callable[[], None]) -> None:
        """When the wrapped part has something, and when something is due."""
        self._passage.watch(ready)
        self._inner.watch(ready)

    def unwatch(self) -> None:
        """What is on its way stays there."""
        self._passage.unwatch()
        self._inner.unwatch()

    def close(self) -> None:
        """Drop what is on its way, and close the wrapped part."""
        self._passage.close()
        self._inner.close()


class FaultyUnderlay(_Faulty[Underlay, tuple[str | None, int]], UnderlayWrapper):
    """`inner`, an `Underlay`, with a link of `spec` between it and those that send to it.

    `limit` is how many datagrams may be on their way. `now` is a clock in seconds and `call_at` calls a function at a time
    of it; without them the event loop's are used. `header_length` is the tunnel header's, 0 in the ip framing; with it
    a stride is believed only if the inner length agrees, as ``dataplane.inbound.unpack`` does it; without it, always.
    Attributes that are not an underlay's are those of `inner`.
    """

    def __init__(
        self,
        inner: Underlay,
        spec: LinkSpec,
        rng: random.Random,
        now: Now | None = None,
        call_at: CallAt | None = None,
        *,
        limit: int = HELD_DATAGRAMS,
        header_length: int | None = None,
    ) -> None:
        super().__init__(inner, spec, rng, now, call_at, limit=limit)
        self._header_length = header_length
        self._senders = Senders({})

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """What has crossed the link, one datagram a slot; over a perfect link what the wrapped underlay gives."""
        if self._passage.is_open:
            first = batch.count
            self._inner.receive(batch, origins)
            self._passage.passed_by(sum(1 for i in range(first, batch.count) for _ in self._datagrams(batch, i)))
            return

        def put(payload: bytes, own: tuple[str | None, int]) -> None:
            host, stride = own
            batch.put(payload, UNKNOWN_VTEP if host is None else origins.get(host, UNKNOWN_VTEP), stride)

        self._passage.fill(batch, lambda now: self._take(now, origins), put)

    def _take(self, now: float, origins: Mapping[str, int]) -> bool:
        """Let what the wrapped underlay has enter the link."""
        if origins is not self._senders.origins:
            self._senders = Senders(origins)
        scratch = self._scratch
        scratch.clear()
        self._inner.receive(scratch, self._senders)
        for i in range(scratch.count):
            host, _ = self._senders.resolve(scratch.peer[i])
            overhead_length = overhead(0, self._family_of(host))
            for payload, stride in self._datagrams(scratch, i):
                self._passage.enter(now, bytes(payload), overhead_length, (host, stride))
        return scratch.is_full

    def _datagrams(self, batch: Batch, index: int) -> Iterator[tuple[memoryview, int]]:
        """The datagrams of one received entry, each with the stride that it keeps: one that tells of something else."""
        run, stride = batch.packet(index), batch.stride[index]
        if not 0 < stride < len(run):
            yield run, 0
        elif self._header_length is None or is_run(run, stride, self._header_length):
            for piece in pieces(run, stride):
                yield piece, 0
        else:
            yield run, stride

    def _family_of(self, host: str | None) -> int:
        """That of a host that is not known is IPv4, if there is any."""
        if host is None:
            return min(self._inner.families)
        return 6 if ":" in host else 4

    def report(self) -> dict[str, Any]:
        """That of the wrapped underlay, and what became of the datagrams on the link."""
        return self._inner.report() | {"link": {"spec": describe_link(self.link.spec), **asdict(self.link.counts)}}


class FaultyDevice(_Faulty[Device, bytes], DeviceWrapper):
    """`inner`, a `Device`, with a link of `spec` between the host and it: what the host sends is impaired.

    The parameters are those of `FaultyUnderlay`. A packet keeps its virtio-net header; corruption is of the packet alone.
    """

    def __init__(
        self,
        inner: Device,
        spec: LinkSpec,
        rng: random.Random,
        now: Now | None = None,
        call_at: CallAt | None = None,
        *,
        limit: int = HELD_PACKETS,
    ) -> None:
        super().__init__(inner, spec, rng, now, call_at, limit=limit)

    def receive(self, batch: Batch) -> None:
        """What has crossed the link; over a perfect link what the wrapped device gives."""
        if self._passage.is_open:
            first = batch.count
            self._inner.receive(batch)
            self._passage.passed_by(batch.count - first)
            return
        self._passage.fill(batch, self._take, lambda packet, vnet: batch.put(packet, vnet=vnet))

    def _take(self, now: float) -> bool:
        """Let what the wrapped device has enter the link."""
        scratch = self._scratch
        scratch.clear()
        self._inner.receive(scratch)
        for i in range(scratch.count):
            self._passage.enter(now, bytes(scratch.packet(i)), 0, bytes(scratch.vnet_header(i)))
        return scratch.is_full
