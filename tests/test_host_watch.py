"""The watch on the machine: what it tells, how often, and on which loop."""

import asyncio
import errno
import socket
import struct

import pytest
import uvloop

from dataplane.host import HostError
from dataplane.host.watch import NetlinkWatch, Throttle, concerns
from dataplane.lab import Lab, Namespace, inside
from dataplane.overlay.virtualtime import VirtualLoop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def route_message(kind: int, *, flags: int = 0, prefix_length: int = 24, protocol: int = 3) -> memoryview:
    header = struct.pack("=IHHII", 64, kind, flags, 7, 0)
    return memoryview(header + struct.pack("=8B", 2, prefix_length, 0, 0, 254, protocol, 0, 1) + bytes(40))


@pytest.mark.parametrize("kind", [24, 25])
def test_routes_of_others_concern_nobody(kind):
    assert not concerns(route_message(kind))
    assert concerns(route_message(kind, protocol=241))
    assert concerns(route_message(kind, prefix_length=0))
    assert concerns(route_message(kind, flags=0x100))


def test_links_addresses_and_what_is_cut_short_concern_everybody():
    assert all(concerns(route_message(kind)) for kind in (16, 17, 20, 21))
    assert all(concerns(route_message(24)[:length]) for length in (0, 16, 23))
    assert not concerns(route_message(24)[:24])


def calls_of(interval: float, *moments: float, close_at: float | None = None) -> list[float]:
    """When a throttle calls, of triggers at these moments, in virtual time."""
    calls: list[float] = []
    loop = VirtualLoop()
    throttle = Throttle(lambda: calls.append(round(loop.time(), 3)), interval, loop)
    for moment in moments:
        loop.call_at(moment, throttle.trigger)
    if close_at is not None:
        loop.call_at(close_at, throttle.close)
    loop.run_until_complete(asyncio.sleep(10))
    loop.close()
    return calls


def test_a_throttle_calls_at_once_then_once_per_interval_and_after_the_last():
    assert calls_of(0.05, 1.0) == [1.0]
    assert calls_of(0.05, 1.0, 1.01, 1.02, 1.04) == [1.0, 1.05]
    assert calls_of(0.05, 1.0, 1.03, 1.06, 1.09, 1.12) == [1.0, 1.05, 1.1, 1.15]
    assert calls_of(0.05, 1.0, 1.2, 1.21) == [1.0, 1.2, 1.25]
    assert calls_of(0.0, 1.0, 1.0, 1.01) == [1.0, 1.01]


def test_a_closed_throttle_calls_no_more():
    assert calls_of(0.05, 1.0, 1.01, 2.0, close_at=1.02) == [1.0]
    assert calls_of(0.05, close_at=0.0) == []


class Watched:
    """A namespace with eth0 and eth1, watched from `loop`; `calls` are what was told."""

    def __init__(self, namespace: Namespace, loop: asyncio.AbstractEventLoop, interval: float = 0.0) -> None:
        self.namespace, self.loop = namespace, loop
        self.calls = 0
        self._told = asyncio.Event()
        self.watch = loop.run_until_complete(self._open(interval))

    async def _open(self, interval: float) -> NetlinkWatch:
        with inside(self.namespace.name):
            return NetlinkWatch(self._count, interval)

    def _count(self) -> None:
        self.calls += 1
        self._told.set()

    def turns(self) -> int:
        """The number of calls after a few turns of the loop, in which all that waits is read."""

        async def few() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(few())
        return self.calls

    def told(self) -> None:
        """Wait for a call."""
        self.loop.run_until_complete(asyncio.wait_for(self._told.wait(), 5))
        self._told.clear()


@pytest.fixture(params=LOOPS)
def loop(request):
    made = LOOPS[request.param]()
    yield made
    made.close()


@pytest.fixture
def watched(loop):
    with Lab("watch") as lab:
        namespace = Namespace(lab, lab.new_namespace("a"))
        namespace.sysctl({"net/ipv6/conf/default/accept_dad": "0"})  # else the link-local addresses take their time
        namespace.ip(
            "link add eth0 type veth peer name eth1",
            "link set eth1 up",
            "link set eth0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "addr add 2001:db8::1/64 dev eth0 nodad",
            "route add 10.1.0.0/16 dev eth0 proto 241",
            "route add fd00::/48 dev eth0 proto 241",
        )
        namespace.settle()
        made = Watched(namespace, loop)
        assert made.turns() == 0
        yield made
        made.watch.close()


CHANGES = [
    "link set eth0 down",
    "link set eth1 down",
    "link set eth0 mtu 1400",
    "link del eth0",
    "addr add 192.0.2.2/24 dev eth0",
    "addr del 2001:db8::1/64 dev eth0",
    "route del 10.1.0.0/16",
    "route del fd00::/48",
    "route replace 10.1.0.0/16 via 192.0.2.254",
    "route replace fd00::/48 via 2001:db8::fe",
    "route add default via 192.0.2.254",
    "route add default via 2001:db8::fe",
]


@pytest.mark.netns
@pytest.mark.parametrize("change", CHANGES)
def test_what_concerns_a_node_is_told(watched, change):
    watched.namespace.ip(change)
    watched.told()
    assert watched.calls >= 1


@pytest.mark.netns
def test_routes_of_others_wake_nobody(watched):
    routes = [f"route add 10.9.{i}.0/24 via 192.0.2.9" for i in range(20)]
    watched.namespace.ip(*routes, "route add fd09::/64 via 2001:db8::9", "route del 10.9.3.0/24")
    assert watched.turns() == 0
    watched.namespace.ip("addr add 192.0.2.2/24 dev eth0")
    watched.told()


@pytest.mark.netns
def test_a_burst_is_told_of_once(watched):
    watched.watch.close()
    slow = Watched(watched.namespace, watched.loop, interval=60.0)
    slow.namespace.ip(*(f"addr add 192.0.2.{i}/24 dev eth0" for i in range(10, 120)))
    slow.told()
    assert slow.turns() == 1
    slow.watch.close()


@pytest.mark.netns
def test_an_overrun_is_a_change(watched):
    """Only routes of others, which are nobody's concern: what is told is that messages were lost."""
    watched.watch._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel makes it the least there is
    watched.namespace.ip(*(f"route add 10.9.{i}.0/24 via 192.0.2.9" for i in range(100)))
    watched.told()
    assert watched.turns() == 1


@pytest.mark.netns
def test_a_watch_sees_its_own_namespace_only(watched):
    with Lab("other") as lab:
        Namespace(lab, lab.new_namespace("b")).ip("link set lo up")
        assert watched.turns() == 0


def test_no_socket_is_left_when_the_watch_cannot_be_had(loop, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    class Refused(socket.socket):
        bind = refuse

    async def watch() -> None:
        NetlinkWatch(lambda: None)

    monkeypatch.setattr("dataplane.host.watch.socket.socket", Refused)
    with pytest.raises(HostError, match="cannot watch the interfaces: Operation not permitted"):
        loop.run_until_complete(watch())
