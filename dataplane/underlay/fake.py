"""An underlay in memory: hosts in one process that exchange datagrams over links that lose, delay and cut them.

The twin of ``udp``. A `FakeNetwork` knows its hosts by address. What a host sends crosses the link to its addressee, one
`Link` (``dataplane.underlay.link``) for each direction of each pair, and waits in the addressee's queue when its time has
come; over a perfect link, which is the default, that is at once and in order. What is sent to nobody is lost, as on a real
network. Partitions and address translation belong to the network, not to links.

A link that has been perfect all the time is a number: how many datagrams have crossed it. It becomes a `Link`, with a
generator and a queue, when it first is anything else, and takes that number along into its counters. A thousand hosts have
a million links, and most of them stay numbers.

Time is a clock that the network is given, by default the running event loop's, which may be a virtual one
(``dataplane.overlay.virtualtime``). Every link draws from a generator of its own, seeded with the network's seed and the
two addresses, so that the fate of one pair's datagrams does not depend on what others send.

`crossed` keeps the last datagrams, for tests to look at. What becomes of one is entered in it when it is known.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from ipaddress import ip_address
from typing import Any

from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.mailbox import Mailbox
from dataplane.underlay import UnderlayError
from dataplane.underlay.link import Link, LinkCounts, LinkSpec
from dataplane.verdict import Verdict
from encap.overhead import overhead
from routing.config import Address
from routing.table import UNKNOWN_VTEP, Endpoint

QUEUE_LENGTH = 4096
MAX_SEGMENTS = 64
RECORDED = 10_000
LANES = 8
_FIRST_SOURCE_PORT = 49152
_LARGEST_UDP_PAYLOAD = 65507
_PERFECT = LinkSpec()
_CLOCK_RESOLUTION = 1e-9  # what asyncio's timers may be early by
_COARSEST_CLOCK = 1e-3  # uvloop's


class Fate(StrEnum):
    """What became of a datagram. Of the two copies of a duplicated one the luckier counts."""

    ON_ITS_WAY = "on its way"
    ARRIVED = "arrived"
    """It waits in its addressee's queue, or was taken from it."""
    LOST = "lost"
    QUEUE_FULL = "queue full"
    """The link's, in front of its transmitter."""
    OVERSIZE = "oversize"
    """Longer than the link's MTU."""
    PARTITION = "partition"
    NOBODY_THERE = "nobody there"
    """No host had the address when it came there: a stopped node, an unknown address, the inside of a NAT."""
    RECEIVE_QUEUE_FULL = "receive queue full"
    """The addressee's."""


_ARRIVED = Fate.ARRIVED  # the one that every datagram needs


@dataclass(slots=True)
class Datagram:
    """What a host sent: from whom (as the addressee sees it), to whom, the UDP payload, and whether it may be cut up.

    `sent_at` and `arrivals` are times in seconds. `arrivals` are those at the address, whoever is there: none for a
    datagram that was lost, two for a duplicated one. `fate` is what became of it, and changes until that is known.
    """

    source: str
    destination: str
    port: int
    payload: bytes
    in_fragments: bool = False
    source_port: int = 0
    sent_at: float = 0.0
    arrivals: tuple[float, ...] = ()
    fate: Fate = Fate.ON_ITS_WAY


class FakeNetwork:
    """Hosts by address, and the links between them.

    `mtu` is that of every host's interface, in bytes of the outer IP packet; `link` what every link is like that is not
    told to be otherwise. `record` is how many datagrams `crossed` keeps. `loop` is whose time links take, by default that
    of the loop that runs.
    """

    def __init__(
        self,
        mtu: int = 1500,
        *,
        link: LinkSpec = _PERFECT,
        seed: int = 0,
        record: int = RECORDED,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.mtu = mtu
        self.seed = seed
        self.crossed: deque[Datagram] = deque(maxlen=record)
        self.sent = 0
        """Datagrams that hosts sent, whatever became of them."""
        self.cut_off = 0
        """Those of them that a partition stopped."""
        self.nobody_there = 0
        """Copies of them that came to an address that no host had."""
        self.queue_full = 0
        """Copies of them that found their addressee's queue full."""
        self._loop = loop
        self._default = link
        self._specs: dict[tuple[str, str], LinkSpec] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._plain: dict[str, dict[str, int]] = {}
        """By source and destination: how many datagrams have crossed a link that is perfect and no `Link`. Two dicts, since
        a million tuples as keys would take more memory than all the rest."""
        self._before: dict[tuple[str, str], int] = {}
        """What was counted there until links were told to be otherwise."""
        self._hosts: dict[tuple[str, int], FakeUnderlay] = {}
        self._sides: dict[str, int] = {}
        self._outside: dict[str, str] = {}
        self._inside: dict[str, str] = {}
        self._arriving: list[tuple[float, int, Datagram, bytes, str]] = []
        """When, in which order, what, the payload by then, and the host that it comes to."""
        self._timer: asyncio.TimerHandle | None = None
        self._order = 0

    def attach(self, port: int, *hosts: str) -> "FakeUnderlay":
        """A host with the addresses `hosts` (at most one of each family), listening on UDP `port`."""
        underlay = FakeUnderlay(self, hosts, self._loop)
        for host in hosts:
            self._hosts[host, port] = underlay
        return underlay

    def detach(self, underlay: "FakeUnderlay") -> None:
        """Forget a host: what is sent to it from now on is lost."""
        for key in [key for key, value in self._hosts.items() if value is underlay]:
            del self._hosts[key]

    def move(self, underlay: "FakeUnderlay", hosts: Sequence[str]) -> None:
        """Let a host have the addresses `hosts`, and no others, from now on. What is on its way to the others finds nobody.

        Raises UnderlayError, and leaves it where it is, if it is no host any more or another one has such an address.
        """
        ports = {port for (_, port), one in self._hosts.items() if one is underlay}
        if not ports:
            raise UnderlayError("the host has left the network")
        wanted = [(host, port) for host in hosts for port in ports]
        taken = [host for host, port in wanted if self._hosts.get((host, port), underlay) is not underlay]
        if taken:
            raise UnderlayError(f"another host has the address {taken[0]}", port_taken=True)
        self.detach(underlay)
        self._hosts.update(dict.fromkeys(wanted, underlay))

    # Links

    def set_link(self, spec: LinkSpec, source: str | None = None, destination: str | None = None) -> None:
        """What the link from `source` to `destination` is like from now on; without them, what every link is.

        What is on its way arrives as it would have.
        """
        if source is None or destination is None:
            self._default = spec
            self._specs.clear()
            for one, others in self._plain.items():
                self._before.update({(one, other): count for other, count in others.items()})
            self._plain.clear()
        else:
            self._specs[source, destination] = spec
            self._before[source, destination] = self._take_plain_count(source, destination)
        for pair, link in self._links.items():
            link.spec = self.link_spec(*pair)

    def link_spec(self, source: str, destination: str) -> LinkSpec:
        """What the link from `source` to `destination` is like."""
        return self._specs.get((source, destination), self._default)

    def link(self, source: str, destination: str) -> Link:
        """The link itself, with its counters."""
        found = self._links.get((source, destination))
        if found is None:
            rng = random.Random(f"{self.seed} {source} {destination}")
            found = self._links[source, destination] = Link(self.link_spec(source, destination), rng)
            found.counts.sent = found.counts.delivered = self._take_plain_count(source, destination)
        return found

    def counts(self, source: str, destination: str) -> LinkCounts:
        """What has become of the datagrams on the link from `source` to `destination` so far.

        Of those that came to it: what a partition stops does not.
        """
        found = self._links.get((source, destination))
        if found is not None:
            return replace(found.counts)
        count = self._plain.get(source, {}).get(destination, 0) + self._before.get((source, destination), 0)
        return LinkCounts(sent=count, delivered=count)

    def total_counts(self) -> LinkCounts:
        """What has become of them on all links that ever were anything but perfect; on the others all were delivered."""
        total = LinkCounts()
        for link in self._links.values():
            add_counts(total, link.counts)
        return total

    def _take_plain_count(self, source: str, destination: str) -> int:
        """How many datagrams have crossed the link while it was only a number, which it no longer is."""
        return self._plain.get(source, {}).pop(destination, 0) + self._before.pop((source, destination), 0)

    def partition(self, *sides: Iterable[str]) -> None:
        """From now on hosts on different `sides` do not reach each other; a host on no side reaches all."""
        self._sides = {host: number for number, side in enumerate(sides) for host in side}

    def heal(self) -> None:
        """End the partition."""
        self._sides = {}

    def translate(self, host: str, outside: str) -> None:
        """Put `host` behind a NAT: others see it as `outside`, and reach it by that address alone."""
        self._inside.pop(self._outside.get(host, ""), None)
        self._outside[host], self._inside[outside] = outside, host

    def is_outside(self, host: str) -> bool:
        """Whether `host` is the outside address of a host behind a NAT."""
        return host in self._inside

    def path_mtu(self, source: str, destination: str) -> int:
        """What the sender knows of the path, in bytes of the outer IP packet."""
        spec = self.link_spec(source, self._inside.get(destination, destination))
        known = spec.mtu if spec.oversize == "refuse" else None
        return self.mtu if known is None else min(self.mtu, known)

    # Datagrams

    @property
    def in_flight(self) -> int:
        """Datagrams that are still on their way."""
        return len(self._arriving)

    @property
    def next_arrival(self) -> float | None:
        """When the first of them arrives."""
        return self._arriving[0][0] if self._arriving else None

    def send(self, datagram: Datagram) -> None:
        """Let `datagram` cross to its addressee, if there is one.

        In `crossed` stands a copy with `sent_at`, `arrivals` and `fate` filled in.
        """
        self._carry(replace(datagram))

    def _carry(self, one: Datagram) -> None:
        """`send`, of a datagram that is nobody else's."""
        self.sent += 1
        self.crossed.append(one)
        one.sent_at = now = self._now()
        source, destination = one.source, one.destination
        if self._outside:
            one.source = self._outside.get(source, source)
            if destination in self._outside and destination not in self._inside:
                self.nobody_there += 1  # nobody reaches a host behind a NAT by its own address
                one.fate = Fate.NOBODY_THERE
                return
            destination = self._inside.get(destination, destination)
        if self._sides and self._are_apart(source, destination):
            self.cut_off += 1
            one.fate = Fate.PARTITION
            return
        plain = self._plain.get(source)
        if plain is not None and destination in plain:
            plain[destination] += 1
        elif (source, destination) not in self._links and self.link_spec(source, destination).is_perfect:
            count = self._before.pop((source, destination), 0) + 1
            self._plain.setdefault(source, {})[destination] = count
        else:
            self._cross(one, source, destination, now)
            return
        one.arrivals = (now,)
        self._hand_over(one, one.payload, destination)

    def _are_apart(self, source: str, destination: str) -> bool:
        sides = self._sides.get(source), self._sides.get(destination)
        return None not in sides and sides[0] != sides[1]

    def _cross(self, one: Datagram, source: str, destination: str, now: float) -> None:
        link = self.link(source, destination)
        counts = link.counts
        oversize, queue_full = counts.oversize, counts.queue_full
        family = 6 if ":" in destination else 4
        found = link.cross(now, one.payload, overhead(0, family), fragmentable=one.in_fragments)
        if not found:  # the link says why only by what it counted
            is_longer, found_no_room = counts.oversize > oversize, counts.queue_full > queue_full
            one.fate = Fate.OVERSIZE if is_longer else Fate.QUEUE_FULL if found_no_room else Fate.LOST
            return
        one.arrivals = tuple([when for when, _ in found])
        for when, payload in found:
            self._order += 1
            heapq.heappush(self._arriving, (when, self._order, one, payload, destination))
        first = self._arriving[0][0]
        if first <= now:
            self._arrive()
        elif self._timer is None or first < self._timer.when():
            self._stop_timer()
            self._timer = self.loop.call_at(first, self._arrive)

    def _arrive(self) -> None:
        """Hand over what has arrived, and see to it that this happens again when the next one does."""
        now = self._now()
        handed_over = 0
        while self._arriving and self._arriving[0][0] <= now + _CLOCK_RESOLUTION:
            _, _, one, payload, host = heapq.heappop(self._arriving)
            self._hand_over(one, payload, host)
            handed_over += 1
        self._stop_timer()
        if self._arriving:
            loop, moment = self.loop, self._arriving[0][0]
            # A timer that came too early is one of a loop whose clock has only milliseconds: it would come at once again.
            is_early = not handed_over and 0 < moment - now < _COARSEST_CLOCK
            self._timer = loop.call_at(now + _COARSEST_CLOCK if is_early else moment, self._arrive)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hand_over(self, one: Datagram, payload: bytes, host: str) -> None:
        """Put a copy of the datagram, with that payload, into the queue of the host that it has come to."""
        addressee = self._hosts.get((host, one.port))
        if addressee is None:
            self.nobody_there += 1
            fate = Fate.NOBODY_THERE
        elif addressee.queue.put(one if payload is one.payload else replace(one, payload=payload, fate=_ARRIVED)):
            one.fate = _ARRIVED
            return
        else:
            self.queue_full += 1
            fate = Fate.RECEIVE_QUEUE_FULL
        if one.fate is not _ARRIVED:
            one.fate = fate

    # Time

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop whose time links take. Raises RuntimeError if none was given and none runs."""
        return self._loop or asyncio.get_running_loop()

    def run(self, seconds: float) -> None:
        """Let so many seconds pass on the network's loop; from outside of any loop. Raises RuntimeError inside of one."""
        if self.loop.is_running():
            raise RuntimeError("the event loop runs already: await asyncio.sleep instead")
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def settle(self) -> None:
        """Let everything arrive that is on its way; from outside of any loop.

        Only that: what a task sends when something arrives is waited for if it is sent before the last arrival.
        """
        while (arrival := self.next_arrival) is not None:
            self.run(max(arrival - self._now(), 0.0))

    def close(self) -> None:
        """Drop what is on its way."""
        self._arriving.clear()
        self._stop_timer()

    def _now(self) -> float:
        if self._loop is not None:
            return self._loop.time()
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0  # pumped by hand, over perfect links: nothing takes time


class FakeUnderlay:
    """An `Underlay` on a `FakeNetwork`. `refuse` maps a host to the verdict that sending to it shall have.

    With `gro` on, datagrams of one origin and one size that wait behind one another are received in one slot, as with
    UDP_GRO.
    """

    lanes = LANES
    max_segments = MAX_SEGMENTS

    def __init__(self, network: FakeNetwork, hosts: Sequence[str], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.gro = True
        self._network = network
        self._host_by_family = _by_family(hosts)
        self.queue: Mailbox[Datagram] = Mailbox(QUEUE_LENGTH, loop)
        self.refuse: dict[str, Verdict] = {}

    @property
    def families(self) -> frozenset[int]:
        """Those of the host's addresses."""
        return frozenset(self._host_by_family)

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """Take from the queue."""
        while self.queue and not batch.is_full:
            first = self.queue.take()
            run = [first.payload]
            while self.gro and self.queue and len(run) < MAX_SEGMENTS and _continues(run, first.source, self.queue.peek()):
                run.append(self.queue.take().payload)
            stride = len(first.payload) if len(run) > 1 else 0
            batch.put(b"".join(run), origins.get(first.source, UNKNOWN_VTEP), stride)

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """Through the network, at once."""
        sent = 0
        for i in batch.indices(Verdict.FORWARDED):
            endpoint = endpoints[batch.peer[i]]
            family = 4 if len(endpoint) == 2 else 6
            path_mtu = self._network.path_mtu(self._source(endpoint) or "", endpoint[0])
            too_big = batch.stride[i] + overhead(0, family) > path_mtu
            batch.verdict[i] = Verdict.TOO_BIG if too_big else self._send(batch, i, endpoint, in_fragments=False)
            sent += batch.verdict[i] == Verdict.FORWARDED
        return sent

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """Through the network, whatever its MTU."""
        fits = batch.stride[index] <= _LARGEST_UDP_PAYLOAD
        batch.verdict[index] = self._send(batch, index, endpoint, in_fragments=True) if fits else Verdict.TOO_BIG

    def _send(self, batch: Batch, index: int, endpoint: Endpoint, *, in_fragments: bool) -> Verdict:
        host, port = endpoint[0], endpoint[1]
        source = self._source(endpoint)
        if source is None:
            return Verdict.SEND_ERROR
        if host in self.refuse:
            return self.refuse[host]
        train, stride = bytes(batch.packet(index)), batch.stride[index]
        source_port = _FIRST_SOURCE_PORT + batch.flow[index] % LANES
        for at in range(0, max(len(train), 1), max(stride, 1)):
            self._network._carry(Datagram(source, host, port, train[at : at + stride], in_fragments, source_port))
        return Verdict.FORWARDED

    def _source(self, endpoint: Endpoint) -> str | None:
        """The host's address of the endpoint's family."""
        return self._host_by_family.get(4 if len(endpoint) == 2 else 6)

    def path_mtu(self, endpoint: Endpoint) -> int:
        """That of the link, as far as this host knows it."""
        return self._network.path_mtu(self._source(endpoint) or "", endpoint[0])

    def report(self) -> dict[str, Any]:
        """There is no kernel that could drop, and nothing is refused but what `refuse` says."""
        ports = [_FIRST_SOURCE_PORT + lane for lane in range(LANES)]
        source_ports = {f"ipv{family}": ports for family in sorted(self._host_by_family)}
        return {"send_errors": {}, "socket_drops": None, "source_ports": source_ports}

    def rebind(self, addresses: Sequence[Address]) -> None:
        """See `Underlay`, and `FakeNetwork.move`. What waits in the queue stays there: it has arrived."""
        hosts = [str(address) for address in addresses]
        if not hosts:
            raise UnderlayError("no address to bind to")
        self._network.move(self, hosts)
        self._host_by_family = _by_family(hosts)

    def watch(self, ready: Callable[[], None]) -> None:
        """From now on; datagrams that arrived before count."""
        self.queue.watch(ready)

    def unwatch(self) -> None:
        """Datagrams go on arriving in the queue."""
        self.queue.unwatch()

    def close(self) -> None:
        """Leave the network."""
        self.unwatch()
        self._network.detach(self)


def _by_family(hosts: Sequence[str]) -> dict[int, str]:
    return {ip_address(host).version: host for host in hosts}


def add_counts(total: LinkCounts, counts: LinkCounts) -> None:
    """Add `counts` to `total`."""
    for one in fields(LinkCounts):
        setattr(total, one.name, getattr(total, one.name) + getattr(counts, one.name))


def _continues(run: list[bytes], source: str, following: Datagram) -> bool:
    """Whether `following` may stand behind `run` in a slot: same origin, no longer than the first, none after a rest."""
    size = len(run[0])
    return (
        following.source == source
        and 0 < len(following.payload) <= size
        and len(run[-1]) == size
        and (len(run) + 1) * size <= MAX_PACKET_LENGTH
    )
