"""A gossip protocol over a bad network: does it converge, how long does that take, and what does a partition do to it?

Run it with ``pytest examples/test_gossip.py``. The protocol is asyncio code that knows nothing of this package: it has a
socket, the addresses of its peers, and timers made with `asyncio.sleep`. Minutes of it take milliseconds here, and the same
seed tells the same story again.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

import pytest

from dataplane.overlay import Overlay

# The protocol


Peer = tuple[IPv4Address | IPv6Address, int]


class Socket(Protocol):
    """What the protocol needs of a network. On a host it would be an asyncio DatagramTransport."""

    def send_to(self, data: bytes, to: Peer) -> None:
        """Send a datagram, which may be lost."""

    async def receive(self) -> tuple[bytes, Peer]:
        """The next datagram, and whom it is from."""
        ...


class Gossip:
    """Push-pull anti-entropy: a member tells now and then some peer all that it knows, and is told what is newer there.

    Of two values of a key the one with the higher version wins, and at equal versions the greater value.
    """

    def __init__(self, socket: Socket, peers: list[Peer], rng: random.Random, interval: float = 0.2) -> None:
        self.entries: dict[str, tuple[int, str]] = {}
        self._socket = socket
        self._peers = peers
        self._rng = rng
        self._interval = interval

    def set(self, key: str, value: str) -> None:
        """Give `key` a new value."""
        version, _ = self.entries.get(key, (0, ""))
        self.entries[key] = version + 1, value

    def get(self, key: str) -> str | None:
        """The value of `key` as far as this member knows."""
        return self.entries[key][1] if key in self.entries else None

    async def run(self) -> None:
        """Take part until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell())
            group.create_task(self._listen())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(self._interval * self._rng.uniform(0.5, 1.5))
            self._send(self.entries, self._rng.choice(self._peers), wants_answer=True)

    async def _listen(self) -> None:
        while True:
            data, peer = await self._socket.receive()
            message = json.loads(data)
            theirs = {key: (version, value) for key, (version, value) in message["entries"].items()}
            newer = {key: entry for key, entry in self.entries.items() if entry > theirs.get(key, (0, ""))}
            for key, entry in theirs.items():
                self.entries[key] = max(entry, self.entries.get(key, entry))
            if newer and message["wants_answer"]:
                self._send(newer, peer, wants_answer=False)

    def _send(self, entries: dict[str, tuple[int, str]], peer: Peer, *, wants_answer: bool) -> None:
        self._socket.send_to(json.dumps({"entries": entries, "wants_answer": wants_answer}).encode(), peer)


# On an overlay


@contextmanager
def gossiping(overlay: Overlay) -> Iterator[list[Gossip]]:
    """A member on each node. Whatever raised in one of them raises when the overlay is closed, unless it is asked for."""
    sockets = [node.open_udp(7946) for node in overlay.nodes]
    addresses: list[Peer] = [(socket.address, socket.port) for socket in sockets]
    members = []
    for socket in sockets:
        others = [peer for peer in addresses if peer[0] != socket.address]
        members.append(Gossip(socket, others, random.Random(f"{overlay.seed} {socket.address}")))

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.run())

    running = overlay.loop.create_task(run())
    try:
        yield members
    finally:
        running.cancel()


@pytest.fixture
def members(overlay: Overlay) -> Iterator[list[Gossip]]:
    """One on each node of the fixture `overlay`."""
    with gossiping(overlay) as made:
        yield made


def seconds_until(overlay: Overlay, holds: Callable[[], bool], at_most: float = 60.0) -> float:
    """Let time pass until it `holds`, and say how much that was. Looking every millisecond costs nothing."""

    async def wait() -> None:
        async with asyncio.timeout(at_most):
            while not holds():  # noqa: ASYNC110 - whatever is asked of the protocol, it need not know
                await asyncio.sleep(0.001)

    started = overlay.now
    overlay.run(wait())
    return overlay.now - started


def everybody_knows(members: list[Gossip], key: str, value: str) -> Callable[[], bool]:
    """Whether the value has reached every one of them."""
    return lambda: all(member.get(key) == value for member in members)


LOSSY = "loss=30%,delay=10ms,jitter=5ms,duplicate=5%,reorder=5%"


@pytest.mark.overlay(nodes=16, link=LOSSY, seed=1)
def test_news_reaches_everybody_though_a_third_is_lost(overlay: Overlay, members: list[Gossip]) -> None:
    """Sixteen members that speak five times a second: a second or so, not five."""
    members[0].set("leader", "node1")
    assert 0.3 < seconds_until(overlay, everybody_knows(members, "leader", "node1")) < 2.0
    members[7].set("leader", "node8")  # the higher version wins
    assert 0.3 < seconds_until(overlay, everybody_knows(members, "leader", "node8")) < 2.0


@pytest.mark.overlay(nodes=10, link=LOSSY, seed=1)
def test_news_does_not_cross_a_partition_and_does_when_it_heals(overlay: Overlay, members: list[Gossip]) -> None:
    """Both sides go on by themselves, a minute long; what either has learned then reaches the other."""
    left, right = members[:5], members[5:]
    overlay.partition(overlay.nodes[:5], overlay.nodes[5:])
    left[0].set("left", "here")
    right[0].set("right", "here")
    overlay.run(60)
    assert everybody_knows(left, "left", "here")()
    assert everybody_knows(right, "right", "here")()
    assert {member.get("right") for member in left} == {None}
    assert {member.get("left") for member in right} == {None}
    assert overlay.underlay.cut_off > 100

    overlay.heal()
    for key in ("left", "right"):
        assert seconds_until(overlay, everybody_knows(members, key, "here")) < 2.0


@pytest.mark.overlay(nodes=6, seed=1)
def test_a_member_that_hears_nothing_still_makes_itself_heard(overlay: Overlay, members: list[Gossip]) -> None:
    """A link that is bad in one direction: push gets through where pull does not."""
    deaf, *others = overlay.nodes
    for other in others:
        overlay.impair(other, deaf, loss=1.0, both=False)
    members[0].set("mine", "here")
    members[1].set("theirs", "here")
    overlay.run(30)
    assert everybody_knows(members, "mine", "here")()
    assert everybody_knows(members[1:], "theirs", "here")()
    assert members[0].get("theirs") is None


def test_the_same_seed_tells_the_same_story() -> None:
    """The instant at which everybody knows, and every datagram on the way there. So a seed that fails can become a test."""

    def story(seed: int) -> tuple[object, ...]:
        with Overlay(seed=seed, link=LOSSY) as overlay:
            overlay.add_nodes(8)
            with gossiping(overlay) as members:
                members[0].set("leader", "node1")
                took = seconds_until(overlay, everybody_knows(members, "leader", "node1"))
            return took, list(overlay.underlay.crossed)

    assert story(1) == story(1)
    assert story(1) != story(2)


@pytest.mark.parametrize("seed", range(20))
def test_it_converges_whatever_happens(seed: int) -> None:
    """Twenty networks, each bad in another way: half of the datagrams are lost, in runs."""
    with Overlay(seed=seed, link="burst=20%/20%,delay=50ms,jitter=50ms,distribution=pareto") as overlay:
        overlay.add_nodes(8)
        with gossiping(overlay) as members:
            members[seed % 8].set("leader", "somebody")
            assert seconds_until(overlay, everybody_knows(members, "leader", "somebody")) < 10.0
