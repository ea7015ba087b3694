"""`Overlay`: nodes in memory on a fake network, and what a test says to them.

Theory of operation. The nodes (``node``) take leases from one book. After each change in the book one table is built of all
leases, and each node gets its view of it (`Table.seen_by`): what a thousand nodes know in common is laid out once. Leases
are renewed and end by the loop's clock.

Whoever has no event loop says what is to happen and calls `run` or `settle`, which drive the overlay's own loop, a virtual
one. Whoever has one makes the overlay inside it and awaits; the overlay then keeps that loop's time.

What the overlay itself sets timers for, renewing leases and ending them, goes on in a virtual loop's background: it happens
while a test lets time pass, and does not hide that everything else has come to a stop.

On a loop of its own nothing fails unheard. Exceptions in callbacks, and in tasks that nobody has asked for theirs, are
collected (``failures``), and `close` raises them.
"""

import asyncio
import contextlib
import itertools
import json
import math
import random
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

from dataplane.batch import MAX_PACKET_LENGTH
from dataplane.capture import Recorder
from dataplane.engine import Buffers
from dataplane.overlay.failures import Failures, cancel_tasks
from dataplane.overlay.node import Cancellable, OverlayNode
from dataplane.overlay.virtualtime import StalledError, VirtualLoop
from dataplane.underlay.fake import RECORDED, Datagram, FakeNetwork, Fate, add_counts
from dataplane.underlay.link import LinkCounts, LinkSpec, link_from_mapping, parse_link
from encap.overhead import MINIMUM_IPV4_MTU, MINIMUM_IPV6_MTU, overhead
from encap.vxlan import HEADER_LENGTH
from routing import route
from routing.allocator import Subnets
from routing.config import Address, Network, Pool, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac
from routing.route import BACKEND_OF_FRAMING, FRAMING_VXLAN
from routing.stores import LEASE_SECONDS
from routing.stores.memory import LeaseBook
from routing.table import Identity, Table, build

T = TypeVar("T")

_IPV4_UNDERLAY = IPv4Address("198.18.0.0")  # for tests of networks (RFC 2544, RFC 6890)
_IPV6_UNDERLAY = IPv6Address("2001:db8::")  # documentation (RFC 3849)
_FAMILIES = {"ipv4": (4,), "ipv6": (6,), "both": (4, 6)}


class Overlay:
    """An overlay network in memory.

    `network` and `ipv6_network` (either may be None) are cut into subnets of `subnet_length` and `ipv6_subnet_length` bits,
    one a node. `framing` is "vxlan" or "ip"; `underlay` is "ipv4", "ipv6" or "both". `link` is what every link is like,
    a `LinkSpec` or its text form; `mtu` that of the underlay's interfaces, in bytes. `record` datagrams are kept to be
    looked at. Without `loop` the overlay keeps the time of the loop that runs, or makes a virtual one where none does.

    Use it as a context manager, or call `close`. Raises ValueError for what makes no sense, ConfigError for networks.
    """

    def __init__(
        self,
        *,
        network: str | None = "10.0.0.0/8",
        ipv6_network: str | None = None,
        subnet_length: int = 24,
        ipv6_subnet_length: int = 64,
        framing: str = FRAMING_VXLAN,
        vni: int = 1,
        underlay: str = "ipv4",
        mtu: int = 1500,
        link: LinkSpec | str = LinkSpec(),  # noqa: B008 - it is immutable
        seed: int = 0,
        lease_seconds: float = LEASE_SECONDS,
        check_sources: bool = True,
        record: int = RECORDED,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if framing not in BACKEND_OF_FRAMING:
            raise ValueError(f"framing {framing!r} is none of {', '.join(BACKEND_OF_FRAMING)}")
        if underlay not in _FAMILIES:
            raise ValueError(f"underlay {underlay!r} is none of {', '.join(_FAMILIES)}")
        self.seed = seed
        self.framing = framing
        self.nodes: list[OverlayNode] = []
        self._by_name: dict[str, OverlayNode] = {}
        """The last node that took each name."""
        self.buffers = Buffers()
        self._families = _FAMILIES[underlay]
        self._check_sources = check_sources
        if not (math.isfinite(lease_seconds) and lease_seconds > 0):
            raise ValueError(f"a lease lasts longer than 0 s, not {lease_seconds}")
        least = MINIMUM_IPV6_MTU if ipv6_network is not None else MINIMUM_IPV4_MTU
        header = HEADER_LENGTH if framing == FRAMING_VXLAN else 0
        lost = max(overhead(header, family) for family in _FAMILIES[underlay])
        if not least + lost <= mtu <= MAX_PACKET_LENGTH:
            raise ValueError(f"an underlay's MTU of {mtu} will not do: it must lie in {least + lost}..{MAX_PACKET_LENGTH}")
        config = _config_text(network, ipv6_network, subnet_length, ipv6_subnet_length, framing, vni)
        parse_config(config)  # whatever can be wrong is, before there is a loop to close
        everywhere = _spec(link, {})
        is_own, self.loop = _loop_for(loop)
        self._failures: Failures | None = None
        if is_own:
            self.adopt_loop()
        self.underlay = FakeNetwork(mtu, link=everywhere, seed=seed, record=record, loop=self.loop)
        self.book = LeaseBook(
            config,
            lease_seconds=lease_seconds,
            now=self.loop.time,
            rng=random.Random(f"{seed} leases"),
        )
        self.port = self.book.config.backend.port
        self._vni = self.book.config.backend.vni
        self.device_mtu = mtu - lost
        self._numbers = itertools.count(1)
        self._base: tuple[int, Table] | None = None
        self._refreshing: asyncio.Handle | None = None
        self._expiry: Cancellable | None = None
        self._stop_listening = self.book.listen(self._on_change)

    # Life

    def __enter__(self) -> "Overlay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for failure in self._end():  # beside what the block raised they are only told of
            error.add_note(f"besides, on the overlay's loop there was {failure!r}, and nobody asked for it")

    async def __aenter__(self) -> "Overlay":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()  # the loop is another's, and so are its failures

    def close(self) -> None:
        """End everything. May be called twice.

        Raises what was raised on the overlay's own loop, in a callback or in a task, and asked for by nobody: one exception
        as it is, several as an ExceptionGroup. On a loop that is another's they are left to asyncio, which logs them.
        """
        failures = self._end()
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("on the overlay's loop, and nobody asked for them", failures)

    def adopt_loop(self) -> None:
        """From now on the loop that was given is the overlay's own: nothing fails on it unheard, and `close` closes it."""
        self._failures = Failures(self.loop)

    def _end(self) -> list[Exception]:
        """What nobody has asked for until then."""
        for node in self.nodes:
            node.stop()
        self._stop_listening()
        self._stop_listening = _nothing
        self.underlay.close()
        for handle in (self._refreshing, self._expiry):
            if handle is not None:
                handle.cancel()
        if self._failures is None or self.loop.is_closed():
            return []
        try:
            ended = cancel_tasks(self.loop)
            return self._failures.take() + ended
        finally:
            self.loop.close()

    # Nodes and leases

    def add_node(
        self,
        name: str | None = None,
        *,
        subnet: str | None = None,
        ipv6_subnet: str | None = None,
        public_ip: str | None = None,
        public_ipv6: str | None = None,
    ) -> OverlayNode:
        """A node, with the next free subnets or the given ones. Raises NoFreeSubnetError, ValueError if one is taken.

        With `public_ip` or `public_ipv6` it is behind a NAT that gives it this address, and its lease tells the others so,
        as flannel's options of these names do. A name belongs to one running node. Raises ValueError.
        """
        if name is not None:
            self._require_free(name)
        outside = self._outside_addresses(public_ip, public_ipv6)
        number = self._next_number()
        wanted = Subnets(
            IPv4Network(subnet) if subnet else self._nth_ipv4(number),
            IPv6Network(ipv6_subnet) if ipv6_subnet else self._nth_ipv6(number),
        )
        ipv4, ipv6 = self._addresses(number)
        attributes = self._attributes(outside.get(4, ipv4), outside.get(6, ipv6))
        lease = self.book.acquire(attributes, wanted)
        if (subnet and lease.subnet != wanted.ipv4) or (ipv6_subnet and lease.ipv6_subnet != wanted.ipv6):
            self.book.release(lease)
            raise ValueError(f"the subnet {subnet or ipv6_subnet} is taken, or no subnet of this overlay")
        addresses = [str(one) for one in (ipv4, ipv6) if one is not None]
        for inside in (ipv4, ipv6):
            if inside is not None and inside.version in outside:
                self.underlay.translate(str(inside), str(outside[inside.version]))
        made = OverlayNode(self, number, name or self._default_name(number), addresses, attributes, lease)
        self.nodes.append(made)
        self.take_name(made)
        return made

    def add_nodes(self, count: int) -> list[OverlayNode]:
        """So many nodes."""
        return [self.add_node() for _ in range(count)]

    def add_leases(self, count: int) -> list[Lease]:
        """Reservations for so many nodes that are elsewhere: they are in every table, and nobody answers behind them."""
        numbers = [self._next_number() for _ in range(count)]
        leases = [
            Lease(self._nth_ipv4(number), self._nth_ipv6(number), self._attributes(*self._addresses(number)))
            for number in numbers
        ]
        self.book.reserve(leases)
        return leases

    def node(self, name: str) -> OverlayNode:
        """The node of that name: the one that runs, or else the last that did. Raises KeyError."""
        found = self._by_name.get(name)
        if found is None:
            raise KeyError(f"there is no node {name!r}; there are {', '.join(self._by_name)}")
        return found

    def take_name(self, node: OverlayNode) -> None:
        """Let `node` be who is meant by its name. Raises ValueError if another one of that name runs."""
        self._require_free(node.name, node)
        self._by_name[node.name] = node

    def _require_free(self, name: str, candidate: OverlayNode | None = None) -> None:
        found = self._by_name.get(name)
        if found is not None and found is not candidate and found.is_running:
            raise ValueError(f"there is a node {name!r} already, and it runs: {found}")

    def _default_name(self, number: int) -> str:
        """A name that nobody has had, so that whoever looks for the node of an earlier one finds that."""
        return next(name for name in (f"node{n}" for n in itertools.count(number)) if name not in self._by_name)

    def _next_number(self) -> int:
        """One whose underlay addresses are not outside addresses of others."""
        while True:
            number = next(self._numbers)
            if not any(self.underlay.is_outside(str(one)) for one in self._addresses(number)):
                return number

    def _outside_addresses(self, public_ip: str | None, public_ipv6: str | None) -> dict[int, Address]:
        """Those that were given, by IP version. Raises ValueError for one that does not fit, or somebody has."""
        outside: dict[int, Address] = {}
        if public_ip is not None:
            outside[4] = IPv4Address(public_ip)
        if public_ipv6 is not None:
            outside[6] = IPv6Address(public_ipv6)
        for version, address in outside.items():
            if version not in self._families:
                raise ValueError(f"{address} is no address for this underlay, which has no IPv{version}")
            known = [(lease.attributes.public_ip, lease.attributes.public_ipv6) for lease in self.book.leases()]
            hosts = [host for node in self.nodes for host in node.addresses]
            if self.underlay.is_outside(str(address)) or str(address) in hosts or any(address in pair for pair in known):
                raise ValueError(f"{address} is the address of another node")
        return outside

    def _nth_ipv4(self, number: int) -> IPv4Network | None:
        subnet = _nth(self.book.config.ipv4, number)
        assert not isinstance(subnet, IPv6Network)
        return subnet

    def _nth_ipv6(self, number: int) -> IPv6Network | None:
        subnet = _nth(self.book.config.ipv6, number)
        assert not isinstance(subnet, IPv4Network)
        return subnet

    def _addresses(self, number: int) -> tuple[IPv4Address | None, IPv6Address | None]:
        """Those of node `number` on the underlay."""
        return (
            _IPV4_UNDERLAY + number if 4 in self._families else None,
            _IPV6_UNDERLAY + number if 6 in self._families else None,
        )

    def _attributes(self, ipv4: Address | None, ipv6: Address | None) -> LeaseAttributes:
        """What a node says of itself that others reach by these addresses."""
        assert not isinstance(ipv4, IPv6Address)
        assert not isinstance(ipv6, IPv4Address)
        is_vxlan = self.framing == FRAMING_VXLAN
        return LeaseAttributes(
            ipv4,
            ipv6,
            BACKEND_OF_FRAMING[self.framing],
            VtepData(derive_vtep_mac(ipv4), self._vni) if ipv4 and is_vxlan else None,
            VtepData(derive_vtep_mac(ipv6), self._vni) if ipv6 and is_vxlan else None,
        )

    def identity_of(self, node: OverlayNode) -> Identity:
        """What the table of `node` says of it."""
        attributes, lease = node.attributes, node.lease
        ipv4 = self.book.config.ipv4.network if self.book.config.ipv4 else None
        assert not isinstance(ipv4, IPv6Network)
        return Identity(
            framing=self.framing,
            subnet=lease.subnet,
            ipv6_subnet=lease.ipv6_subnet,
            port=self.port,
            vni=self._vni,
            vtep_mac=attributes.backend_data.vtep_mac if attributes.backend_data else None,
            vtep_mac_v6=attributes.backend_v6_data.vtep_mac if attributes.backend_v6_data else None,
            check_sources=self._check_sources,
            network=ipv4,
        )

    # Tables

    def table_for(self, node: OverlayNode) -> Table:
        """The table of `node` as the book stands now."""
        identity = self.identity_of(node)
        if self._base is None or self._base[0] != self.book.version:
            routes, _ = route.plan(self.book.leases(), self.framing, frozenset(self._families))
            self._base = self.book.version, build(identity, routes)
        return self._base[1].seen_by(identity)

    def refresh(self) -> None:
        """Give every node that hears from the store the table of now."""
        self._refreshing = None
        self._watch_expirations()
        for node in self.nodes:
            if node.is_running and node.sees_store:
                if self.book.holds(node.lease):
                    node.engine.table = self.table_for(node)
                else:
                    node.fail(f"the lease {node.lease.key} is gone from the store, has ended, or is somebody else's")

    def _on_change(self) -> None:
        """Once for any number of changes in one turn of the loop."""
        if self._refreshing is None:
            self._refreshing = self.loop.call_soon(self.refresh)

    def _watch_expirations(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        moment = self.book.next_expiration()
        if moment is not None:
            self._expiry = self.call_at_in_background(moment, self._expire)

    def _expire(self) -> None:
        self.book.expire()
        self._watch_expirations()

    # The network

    def impair(
        self, source: OverlayNode | None = None, destination: OverlayNode | None = None, spec: LinkSpec | str | None = None,
        *, both: bool = True, **fields: Any,
    ) -> None:  # fmt: skip
        """Make links bad: all of them, or those between two nodes, or with ``both=False`` the one direction.

        What a link is like is said by `spec`, or by the fields of `LinkSpec`, in its units or as text: ``loss=0.3``,
        ``delay="20ms"``. It replaces what was said of those links before; ``impair()`` makes all of them perfect again.
        Raises ValueError.
        """
        wanted = _spec(spec, fields)
        if source is None and destination is None:
            self.underlay.set_link(wanted)
            return
        if source is None or destination is None:
            raise ValueError("name both nodes of a link, or none for all links")
        ways = [(source, destination), (destination, source)] if both else [(source, destination)]
        for one, other in ways:
            for start, end in itertools.product(one.addresses, other.addresses):
                if (":" in start) == (":" in end):
                    self.underlay.set_link(wanted, start, end)

    def partition(self, *sides: OverlayNode | Iterable[OverlayNode]) -> None:
        """From now on nodes on different sides do not reach each other; a node on no side reaches all."""
        self.underlay.partition(*(_addresses_of(side) for side in sides))

    def heal(self) -> None:
        """End the partition."""
        self.underlay.heal()

    def counts(self, source: OverlayNode, destination: OverlayNode) -> LinkCounts:
        """What has become of the datagrams from `source` to `destination` so far, over both families of the underlay.

        Of those that came to the link: what a partition stops does not. A datagram that the link delivers has come to the
        address; whether somebody took it there is told by its fate.
        """
        total = LinkCounts()
        for start, end in itertools.product(source.addresses, destination.addresses):
            if (":" in start) == (":" in end):
                add_counts(total, self.underlay.counts(start, end))
        return total

    # Time

    @property
    def now(self) -> float:
        """Seconds by the overlay's clock."""
        return self.loop.time()

    def call_at_in_background(self, when: float, call: Callable[[], None]) -> Cancellable:
        """Call `call` at that time. A virtual loop does not let time pass for this alone."""
        if isinstance(self.loop, VirtualLoop):
            return self.loop.call_at_in_background(when, call)
        return self.loop.call_at(when, call)

    @overload
    def run(self, what: float | str) -> None: ...

    @overload
    def run(self, what: Awaitable[T]) -> T: ...

    def run(self, what: float | str | Awaitable[T]) -> T | None:
        """Let so much time pass, or run `what` to its end and return what it returns; from outside of any loop.

        Time is in seconds, or a text like "20ms". Raises ValueError for what is no time, and StalledError if `what` waits
        for something that cannot happen any more; it is cancelled then.
        """
        try:
            self.refuse_inside("await it, or asyncio.sleep,")
        except RuntimeError:
            if asyncio.iscoroutine(what):
                what.close()  # nobody can await it any more
            raise
        if isinstance(what, (int, float, str)):
            self.loop.run_until_complete(asyncio.sleep(_seconds(what)))
            return None
        if not isinstance(what, Awaitable):
            raise TypeError(f"run takes seconds, a time like '20ms', or something to await, not {what!r}")
        task = self.loop.create_task(_as_coroutine(what))
        try:
            return self.loop.run_until_complete(task)
        except StalledError:  # it must not go on waiting, and take what somebody else waits for later
            task.cancel()
            with contextlib.suppress(StalledError):
                self.loop.run_until_complete(asyncio.wait([task]))
            raise

    def settle(self, limit: float = 3600.0) -> None:
        """Let everything arrive that is on its way, and what it gives rise to; from outside of any loop.

        Raises RuntimeError if after `limit` seconds something is still on its way.
        """
        self.refuse_inside("await settled()")
        self.loop.run_until_complete(self.settled(limit))

    async def settled(self, limit: float = 3600.0) -> None:
        """Wait until nothing is on its way any more, for at most `limit` seconds. Raises RuntimeError after them.

        What waits for a timer, as a protocol that sends once a second, is not waited for.
        """
        self.require_this_loop()
        end = self.loop.time() + limit
        while True:
            await self._quiet()
            arrival = self.underlay.next_arrival
            if arrival is None:
                return
            if arrival > end:
                raise RuntimeError(f"after {limit} s there is still something on its way\n{self.report()}")
            await asyncio.sleep(max(arrival - self.loop.time(), 0))

    async def _quiet(self) -> None:
        """Wait until nothing is left to do at this instant: a virtual loop knows; another is given some turns."""
        if isinstance(self.loop, VirtualLoop):
            idle: asyncio.Future[None] = self.loop.create_future()
            self.loop.when_idle(lambda: None if idle.done() else idle.set_result(None))
            try:
                await idle
            finally:
                self.loop.when_idle(None)
            return
        quiet = 0
        while quiet < _QUIET_TURNS:
            before = self._activity()
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._activity() == before else 0

    def _activity(self) -> int:
        """A number that moves whenever a packet does."""
        return self.underlay.sent + sum(node.engine.outbound.received + node.engine.inbound.received for node in self.nodes)

    def require_this_loop(self) -> None:
        """Raises RuntimeError in a coroutine that runs on another loop than the overlay, where it would wait for ever."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                "the overlay has an event loop of its own: give the coroutine to its run(), or make the overlay in here"
            )

    def refuse_inside(self, instead: str) -> None:
        """Raises RuntimeError if the overlay's loop runs, in which nobody can wait for it to do something."""
        if self.loop.is_running():
            raise RuntimeError(f"the event loop runs already: {instead} instead")

    # Looking at it

    def pings_all(self) -> int:
        """Let every node ping every other one; returns how many of the pings were answered. From outside of any loop.

        A node's pings are sent five hundred at a time, and are answered or lost before the next ones.
        """
        self.refuse_inside("await ping() for each pair")
        before = sum(node.host.replies for node in self.nodes)
        for node in self.nodes:
            self.ping_from(node)
        return sum(node.host.replies for node in self.nodes) - before

    def ping_from(self, node: OverlayNode) -> int:
        """Let `node` ping every other one; returns how many pings that were. From outside of any loop."""
        others = [other for other in self.nodes if other is not node]
        for first in range(0, len(others), _PINGS_AT_ONCE):
            for other in others[first : first + _PINGS_AT_ONCE]:
                node.send_echo(other)
            self.settle()
        return len(others)

    def report(self) -> str:
        """What there is to say when a test fails: the seed, and each node's lease and counters."""
        network, links = self.underlay, self.underlay.total_counts()
        lines = [f"seed {self.seed}, {self.now:.6f} s, {network.sent} datagrams sent, {network.in_flight} on their way, "]
        lines[0] += f"{network.cut_off} stopped by partitions"
        losses = {
            "lost": links.lost,
            "stopped by a full queue": links.queue_full,
            "longer than the link's MTU": links.oversize,
            "to an address that nobody has": network.nobody_there,
            "refused by a full receive queue": network.queue_full,
        }
        lines[0] += "".join(f", {count} {why}" for why, count in losses.items() if count)
        for node in self.nodes[:_REPORTED_NODES]:
            state = "" if node.is_running else f", stopped{': ' + node.failure if node.failure else ''}"
            lines.append(f"{node.name}: {node.lease.key} at {node.where}{state}")
            lines += [f"    {way}: {_counts(verdicts)}" for way, verdicts in node.verdicts.items()]
            drops = {
                "by the host's device, its queue being full": node.host.refused,
                "by the node's underlay, its queue being full": node.underlay.queue.refused,
                "by the host, for a wrong checksum": node.host.bad_checksums,
            }
            lines += [f"    dropped {where}: {count}" for where, count in drops.items() if count]
        if len(self.nodes) > _REPORTED_NODES:
            lines.append(f"and {len(self.nodes) - _REPORTED_NODES} nodes more")
        return "\n".join(lines)

    def write_capture(self, path: Path) -> int:
        """Write the datagrams that were kept to `path`, as pcapng; returns how many. Raises OSError.

        Each stands at the time at which it was sent, with a comment that says when it arrived, or why it did not.
        """
        with open(path, "wb") as file:
            recorder = Recorder(file, now_ns=lambda: 0)
            for one in self.underlay.crossed:
                recorder.datagram(
                    one.source, one.source_port, one.destination, one.port, one.payload,
                    time_ns=round(one.sent_at * 1e9), comment=_comment(one),
                )  # fmt: skip
            recorder.close()
        return len(self.underlay.crossed)


_QUIET_TURNS = 20
"""Turns of a real loop without any packet moving after which none is expected to. A packet itself waits two turns, for the
callbacks of the queues; the others are for tasks that wake each other before one of them sends."""

_REPORTED_NODES = 20
_PINGS_AT_ONCE = 500
"""Fewer than a device's queue holds."""


def _nothing() -> None:
    pass


def _loop_for(loop: asyncio.AbstractEventLoop | None) -> tuple[bool, asyncio.AbstractEventLoop]:
    """Whether the overlay owns its loop, and which that is."""
    if loop is not None:
        return False, loop
    try:
        return False, asyncio.get_running_loop()
    except RuntimeError:
        return True, VirtualLoop()


def _seconds(time: float | str) -> float:
    """A span of time in seconds. Raises ValueError."""
    if isinstance(time, str):
        try:
            return link_from_mapping({"delay": time}).delay
        except ValueError:
            raise ValueError(f"{time!r} is not a time like 10ms or 1.5s, of a day at most") from None
    if not (math.isfinite(time) and time >= 0):
        raise ValueError(f"time that passes is a number of seconds, 0 or more, not {time}")
    return time


async def _as_coroutine(what: Awaitable[T]) -> T:
    return await what


def _spec(spec: LinkSpec | str | None, fields: dict[str, Any]) -> LinkSpec:
    """A link from whichever form it was given in. Raises ValueError."""
    if spec is None:
        return link_from_mapping(fields)
    if fields:
        raise ValueError("give a link spec or its fields, not both")
    return parse_link(spec) if isinstance(spec, str) else spec


def _addresses_of(side: OverlayNode | Iterable[OverlayNode]) -> list[str]:
    nodes = [side] if isinstance(side, OverlayNode) else list(side)
    return [address for node in nodes for address in node.addresses]


def _nth(pool: Pool | None, number: int) -> Network | None:
    """The subnet that node `number` asks for; None beyond the pool's end, where any free one will do."""
    if pool is None:
        return None
    size = 1 << (pool.network.max_prefixlen - pool.subnet_length)
    start = int(pool.minimum) + (number - 1) * size
    if start > int(pool.maximum):
        return None
    return (
        IPv4Network((start, pool.subnet_length)) if pool.network.version == 4 else IPv6Network((start, pool.subnet_length))
    )


def _config_text(
    network: str | None, ipv6_network: str | None, length: int, ipv6_length: int, framing: str, vni: int
) -> str:
    """Flannel's network configuration, as JSON."""
    backend: dict[str, Any] = {"Type": BACKEND_OF_FRAMING[framing]}
    if framing == FRAMING_VXLAN:
        backend["VNI"] = vni
    config: dict[str, Any] = {"EnableIPv4": network is not None, "Backend": backend}
    if network is not None:
        config |= {"Network": network, "SubnetLen": length}
    if ipv6_network is not None:
        config |= {"EnableIPv6": True, "IPv6Network": ipv6_network, "IPv6SubnetLen": ipv6_length}
    return json.dumps(config)


def _counts(verdicts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in verdicts.items()) or "nothing"


def _comment(one: Datagram) -> str:
    """What became of a datagram, for a capture."""
    times = ", ".join(f"{(when - one.sent_at) * 1000:.3f} ms" for when in one.arrivals)
    if one.fate is Fate.ARRIVED:
        return f"arrived after {times}"
    return f"{one.fate} after {times}" if times else str(one.fate)
