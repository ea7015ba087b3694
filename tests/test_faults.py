"""The wrappers that impair, on a loop whose clock jumps. Their contracts are in the conformance suites."""

import asyncio
import copy
import random
from collections.abc import Callable

import pytest
from packets import PORT, mac, table_of, underlay_host
from packets import udp as packet

from dataplane.batch import Batch
from dataplane.device import DeviceLostError
from dataplane.device.memory import MemoryDevice
from dataplane.engine import Engine
from dataplane.faults import FaultyDevice, FaultyUnderlay
from dataplane.overlay.virtualtime import VirtualLoop
from dataplane.underlay.fake import Datagram, FakeNetwork, FakeUnderlay
from dataplane.underlay.link import Burst, LinkSpec
from dataplane.verdict import Verdict
from encap import vnet, vxlan

A, B = "192.0.2.1", "192.0.2.2"
ORIGINS = {A: 5}
HARMLESS = LinkSpec(mtu=70_000)
"""Not perfect, so that the link is crossed, but nothing is that large."""


def in_virtual_time(story: Callable) -> Callable:
    """The story's coroutine, on a loop of its own."""

    def run(*arguments, **options) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(story(*arguments, **options))

    run.__name__, run.__doc__ = story.__name__, story.__doc__
    run.pytestmark = getattr(story, "pytestmark", [])
    return run


class Ends:
    """A sends to B, which is behind a link."""

    def __init__(self, spec: LinkSpec, seed: int = 1, **options) -> None:
        self.network = FakeNetwork()
        self.a: FakeUnderlay = self.network.attach(PORT, A, "2001:db8::1")
        self.inner: FakeUnderlay = self.network.attach(PORT, B, "2001:db8::2")
        self.b = FaultyUnderlay(self.inner, spec, random.Random(seed), **options)
        self.got: list[tuple[float, bytes, int]] = []
        self.calls = 0

    def send(self, *payloads: bytes, to: str = B) -> None:
        for payload in payloads:
            batch = Batch(1)
            batch.put(payload)
            batch.verdict[0], batch.stride[0] = Verdict.FORWARDED, len(payload)
            self.a.transmit(batch, [(to, PORT) if ":" not in to else (to, PORT, 0, 0)])

    def receive(self, capacity: int = 64, origins: dict[str, int] | None = None) -> list[tuple[bytes, int]]:
        batch = Batch(capacity)
        self.b.receive(batch, ORIGINS if origins is None else origins)
        return [(bytes(batch.packet(i)), batch.peer[i]) for i in range(batch.count)]

    def watch(self, capacity: int = 64) -> None:
        """From now on note in `got` what arrives, and when."""

        def ready() -> None:
            self.calls += 1
            self.got += [(asyncio.get_running_loop().time(), *one) for one in self.receive(capacity)]

        self.b.watch(ready)

    def times(self) -> list[float]:
        return [when for when, _, _ in self.got]


def assert_adds_up(faulty: FaultyUnderlay | FaultyDevice) -> None:
    counts = faulty.link.counts
    assert counts.sent + counts.duplicated == counts.delivered + counts.lost + counts.queue_full + counts.oversize


# Underlay


@in_virtual_time
async def test_a_delayed_datagram_arrives_when_it_is_due_and_not_before():
    ends = Ends(LinkSpec(delay=0.02))
    ends.watch()
    ends.send(b"one")
    await asyncio.sleep(0.005)
    ends.send(b"two")
    await asyncio.sleep(0.014)
    assert ends.got == []
    assert ends.b.held == 2
    await asyncio.sleep(0.1)
    assert [(round(when, 6), payload, peer) for when, payload, peer in ends.got] == [(0.02, b"one", 5), (0.025, b"two", 5)]
    assert ends.b.held == 0
    ends.b.close()


@in_virtual_time
async def test_without_a_watcher_too():
    ends = Ends(LinkSpec(delay=1.0))
    ends.send(b"x")
    assert ends.receive() == []
    await asyncio.sleep(0.99)
    assert ends.receive() == []
    await asyncio.sleep(0.02)
    assert ends.receive() == [(b"x", 5)]


@in_virtual_time
async def test_loss_is_counted_and_the_rest_arrives_in_order():
    ends = Ends(LinkSpec(loss=0.3, delay=0.01, jitter=0.01))
    ends.watch()
    sent = [bytes([i]) for i in range(200)]
    for one in sent:
        ends.send(one)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    arrived = [payload for _, payload, _ in ends.got]
    assert arrived == [one for one in sent if one in arrived]
    assert 120 <= len(arrived) <= 160  # 140 ± 3 sigma
    assert (ends.b.link.counts.sent, ends.b.link.counts.lost) == (200, 200 - len(arrived))
    assert_adds_up(ends.b)
    assert ends.times() == sorted(ends.times())
    ends.b.close()


@in_virtual_time
async def test_one_seed_gives_one_story():
    stories = []
    for seed in (1, 1, 2):
        spec = LinkSpec(burst=Burst(0.1, 0.4), delay=0.01, jitter=0.01, reorder=0.2, duplicate=0.2, corrupt=0.2)
        ends = Ends(spec, seed)
        ends.watch()
        begin = asyncio.get_running_loop().time()
        for i in range(100):
            ends.send(bytes([i]) * 3)
            await asyncio.sleep(0.003)
        await asyncio.sleep(1)
        stories.append([(round(when - begin, 6), payload) for when, payload, _ in ends.got])
        ends.b.close()
    assert stories[0] == stories[1] != stories[2]


def test_a_run_is_taken_apart_and_each_datagram_meets_its_fate():
    ends = Ends(LinkSpec(loss=0.5))
    ends.send(*[bytes([i]) * 10 for i in range(60)])
    batch = Batch(64)
    ends.b.receive(batch, ORIGINS)
    assert {batch.length[i] for i in range(batch.count)} == {10}
    assert {batch.stride[i] for i in range(batch.count)} == {0}
    assert ends.b.link.counts.sent == 60
    assert batch.count == ends.b.link.counts.delivered
    assert 15 <= batch.count <= 45


def test_over_a_perfect_link_a_run_stays_a_run_and_is_counted():
    ends = Ends(LinkSpec())
    ends.send(*[bytes([i]) * 10 for i in range(5)], b"abc", b"")
    batch = Batch(64)
    ends.b.receive(batch, ORIGINS)
    assert [(batch.length[i], batch.stride[i]) for i in range(batch.count)] == [(53, 10), (0, 0)]
    assert (ends.b.link.counts.sent, ends.b.link.counts.delivered) == (7, 7)


def test_what_was_in_the_batch_stays_there():
    for spec in (LinkSpec(), HARMLESS):
        ends = Ends(spec)
        ends.send(b"new")
        batch = Batch(2)
        batch.put(b"old")
        ends.b.receive(batch, ORIGINS)
        assert [bytes(batch.packet(i)) for i in range(batch.count)] == [b"old", b"new"]
        assert ends.b.link.counts.sent == 1


def test_a_batch_takes_no_more_than_its_limit():
    ends = Ends(HARMLESS)
    ends.send(*[bytes([i]) for i in range(9)])
    batch, found = Batch(8), []
    for limit in (1, 3, 0, 0):
        batch.clear(limit)
        ends.b.receive(batch, ORIGINS)
        found.append([bytes(batch.packet(i))[0] for i in range(batch.count)])
    assert found == [[0], [1, 2, 3], [4, 5, 6, 7, 8], []]


def test_what_waits_for_a_batch_stays_with_the_wrapped_underlay():
    ends = Ends(HARMLESS, limit=40)
    ends.inner.gro = False
    ends.send(*[i.to_bytes(2, "big") for i in range(200)])
    found = []
    while got := ends.receive(1):
        found += [int.from_bytes(payload, "big") for payload, _ in got]
        assert ends.b.held <= 32
    assert found == list(range(200))
    assert ends.b.link.counts.queue_full == 0


@in_virtual_time
async def test_no_more_are_held_than_the_limit_and_the_rest_is_counted():
    ends = Ends(LinkSpec(delay=1.0, duplicate=0.5), limit=10)
    ends.watch()
    ends.send(*[bytes([i]) for i in range(50)])
    await asyncio.sleep(0.5)
    assert ends.b.held == 10
    await asyncio.sleep(1)
    counts = ends.b.link.counts
    assert counts.delivered == len(ends.got) == 10
    assert counts.queue_full == 40 + counts.duplicated
    assert_adds_up(ends.b)
    ends.b.close()


@in_virtual_time
async def test_a_rate_spreads_a_burst_over_time():
    ends = Ends(LinkSpec(rate=8000.0, queue=4))
    ends.watch()
    ends.send(*[bytes(72)] * 8)  # with IPv4 and UDP headers 100 bytes
    await asyncio.sleep(5)
    assert ends.times() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert ends.b.link.counts.queue_full == 3
    ends.b.close()


@pytest.mark.parametrize(("host", "longest"), [(B, 1372), ("2001:db8::2", 1352)])
def test_the_mtu_counts_the_headers_of_the_senders_family(host, longest):
    ends = Ends(LinkSpec(mtu=1400, oversize="drop"))
    ends.send(bytes(longest), bytes(longest + 1), to=host)
    assert [payload for payload, _ in ends.receive(origins={A: 1, "2001:db8::1": 2})] == [bytes(longest)]
    assert ends.b.link.counts.oversize == 1


@pytest.mark.parametrize("hosts", [(A, "2001:db8::1"), ("2001:db8::1", A)])
@pytest.mark.parametrize(("to", "longest"), [(B, 1372), ("2001:db8::2", 1352)])
def test_of_a_vtep_with_two_addresses_the_one_that_sent_counts(hosts, to, longest):
    ends = Ends(LinkSpec(mtu=1400, oversize="drop"))
    ends.send(bytes(longest), bytes(longest + 1), to=to)
    assert ends.receive(origins=dict.fromkeys(hosts, 5)) == [(bytes(longest), 5)]
    assert ends.b.link.counts.oversize == 1


def test_a_vtep_with_two_addresses_on_an_underlay_of_one_family():
    network = FakeNetwork()
    sender, inner = network.attach(PORT, A), network.attach(PORT, B)
    faulty = FaultyUnderlay(inner, LinkSpec(mtu=1500), random.Random(1))
    sender._network.send(Datagram(A, B, PORT, bytes(1472)))
    batch = Batch(1)
    faulty.receive(batch, {A: 0, "2001:db8::1": 0})
    assert (batch.count, batch.peer[0]) == (1, 0)


@pytest.mark.parametrize(("to", "longest"), [(B, 1372), ("2001:db8::2", 1352)])
def test_a_strangers_headers_are_those_of_its_family(to, longest):
    ends = Ends(LinkSpec(mtu=1400, oversize="drop"))
    ends.send(bytes(longest), bytes(longest + 1), to=to)
    assert ends.receive(origins={}) == [(bytes(longest), -1)]


@in_virtual_time
async def test_a_stranger_may_have_a_lease_when_its_datagram_arrives():
    ends = Ends(LinkSpec(delay=1.0))
    ends.send(b"x")
    assert ends.receive(origins={}) == []
    await asyncio.sleep(1)
    assert ends.receive(origins={A: 3}) == [(b"x", 3)]


@in_virtual_time
async def test_the_sender_has_the_number_that_it_has_on_arrival():
    ends = Ends(LinkSpec(delay=1.0))
    ends.send(b"x")
    assert ends.receive(origins={A: 5}) == []
    ends.send(b"y")
    assert ends.receive(origins={A: 8, B: 5}) == []
    ends.send(b"z")
    assert ends.receive(origins={A: 8}) == []
    await asyncio.sleep(1)
    assert ends.receive(1, origins={A: 7, B: 5}) == [(b"x", 7)]
    assert ends.receive(1, origins={A: 9, B: 8}) == [(b"y", 9)]
    assert ends.receive(origins={B: 8}) == [(b"z", -1)]


def test_a_stranger_is_a_stranger():
    ends = Ends(HARMLESS)
    ends.send(b"x")
    assert ends.receive(origins={"192.0.2.9": 1}) == [(b"x", -1)]


def test_a_stride_that_the_inner_length_contradicts_is_handed_on():
    inner_packet = packet(payload=bytes(1000))
    datagram = vxlan.header(1, mac(2), mac(1), 0x0800) + inner_packet
    run = datagram + datagram

    class Coalescing(FakeUnderlay):
        """Receives what the test says."""

        arriving: tuple[bytes, int] | None = None

        def receive(self, batch, origins) -> None:
            if self.arriving is not None:
                batch.put(self.arriving[0], 5, self.arriving[1])
                self.arriving = None

    inner = Coalescing(FakeNetwork(), [B])
    faulty = FaultyUnderlay(inner, HARMLESS, random.Random(1), header_length=vxlan.HEADER_LENGTH)
    for arriving, expected in [
        ((run, len(datagram)), [(datagram, 0), (datagram, 0)]),
        ((run, 500), [(run, 500)]),
        ((datagram, 500), [(datagram, 500)]),
        ((datagram, len(datagram)), [(datagram, 0)]),
        ((b"abc", 2), [(b"abc", 2)]),
    ]:
        inner.arriving = arriving
        batch = Batch(4)
        faulty.receive(batch, {})
        assert [(bytes(batch.packet(i)), batch.stride[i]) for i in range(batch.count)] == expected


@in_virtual_time
async def test_the_spec_can_be_replaced_while_datagrams_are_on_their_way():
    ends = Ends(LinkSpec(delay=1.0))
    ends.watch()
    ends.send(b"slow")
    await asyncio.sleep(0.1)
    ends.b.link.spec = LinkSpec()
    ends.send(b"next")
    await asyncio.sleep(2)
    ends.send(b"fast")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [(round(when, 6), payload) for when, payload, _ in ends.got] == [(1.0, b"slow"), (1.0, b"next"), (2.1, b"fast")]
    ends.b.link.spec = LinkSpec(loss=1.0)
    ends.send(b"lost")
    await asyncio.sleep(1)
    assert len(ends.got) == 3
    ends.b.close()


@in_virtual_time
async def test_a_watcher_that_stops_in_the_middle_is_called_again_until_nothing_is_left():
    ends = Ends(LinkSpec(delay=0.01))
    ends.watch(capacity=1)
    ends.send(*[bytes([i]) for i in range(20)])
    await asyncio.sleep(0.02)
    assert [payload[0] for _, payload, _ in ends.got] == list(range(20))
    assert {round(when, 6) for when in ends.times()} == {0.01}
    calls = ends.calls
    await asyncio.sleep(10)
    assert ends.calls == calls  # and then no more
    ends.b.close()


@in_virtual_time
async def test_a_watcher_that_takes_nothing_is_called_again_too():
    ends = Ends(LinkSpec(delay=1.0))
    ends.send(b"x")
    assert ends.receive() == []
    calls = []

    def ready() -> None:
        calls.append(len(ends.receive()) if len(calls) == 3 else 0)

    ends.b.watch(ready)
    await asyncio.sleep(2)
    assert calls == [0, 0, 0, 1]
    ends.b.close()


@in_virtual_time
async def test_what_overtakes_is_on_time():
    ends = Ends(LinkSpec(delay=10.0))
    ends.watch()
    ends.send(b"slow")
    await asyncio.sleep(1)
    ends.b.link.spec = LinkSpec(rate=64.0, reorder=1.0)
    ends.send(b"four")  # 32 bytes with the headers: 4 seconds
    await asyncio.sleep(20)
    assert [(when, payload) for when, payload, _ in ends.got] == [(5.0, b"four"), (10.0, b"slow")]
    ends.b.close()


@in_virtual_time
async def test_all_is_taken_from_the_wrapped_underlay_however_much_is_lost():
    ends = Ends(LinkSpec(loss=1.0))
    ends.inner.gro = False
    ends.watch()
    ends.send(*[b"x"] * 3000)
    await asyncio.sleep(1)
    assert ends.b.link.counts.lost == 3000
    assert ends.calls >= 3000 / 256  # a flood that is lost is taken in portions
    ends.b.close()


def pending_timers() -> int:
    loop = asyncio.get_running_loop()
    return sum(not handle.cancelled() for handle in loop._scheduled)


@in_virtual_time
async def test_unwatching_and_closing_leave_no_timer():
    ends = Ends(LinkSpec(delay=1.0))
    ends.watch()
    ends.send(b"x", b"y")
    await asyncio.sleep(0.1)
    assert pending_timers() == 1
    ends.b.unwatch()
    assert pending_timers() == 0
    await asyncio.sleep(2)
    assert (ends.got, ends.b.held) == ([], 2)
    ends.watch()  # what is due already counts
    await asyncio.sleep(0.1)
    assert [payload for _, payload, _ in ends.got] == [b"x", b"y"]
    ends.send(b"z")
    await asyncio.sleep(0.1)
    assert pending_timers() == 1
    ends.b.close()
    ends.b.close()
    assert (pending_timers(), ends.b.held) == (0, 0)
    ends.send(b"nobody there")
    await asyncio.sleep(2)
    assert len(ends.got) == 2


@in_virtual_time
async def test_there_is_one_timer_for_the_first_that_is_due():
    ends = Ends(LinkSpec(delay=1.0, reorder=0.5, jitter=0.5))
    ends.watch()
    for i in range(50):
        ends.send(bytes([i]))
        await asyncio.sleep(0.01)
        assert pending_timers() == (ends.b.held > 0)
    await asyncio.sleep(5)
    assert len(ends.got) == 50
    assert pending_timers() == 0
    ends.b.close()


@in_virtual_time
async def test_a_watcher_may_stop_watching_while_it_is_called():
    ends = Ends(LinkSpec(delay=1.0))
    calls = []

    def ready() -> None:
        calls.append(len(ends.receive(1)))
        if calls[-1]:
            ends.b.unwatch()

    ends.b.watch(ready)
    ends.send(b"x", b"y")
    await asyncio.sleep(5)
    assert sum(calls) == 1
    assert ends.b.held == 1
    assert pending_timers() == 0
    ends.b.close()


class Clock:
    """A clock and timers that are called when the test says so, maybe too early."""

    def __init__(self) -> None:
        self.time = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.Handle:
        self.timers.append((when, callback))
        return asyncio.get_running_loop().call_at(1e9, lambda: None)

    def fire(self) -> None:
        self.timers.pop()[1]()


@in_virtual_time
async def test_a_clock_may_be_given_and_a_timer_may_be_early():
    clock = Clock()
    ends = Ends(LinkSpec(delay=0.5), now=clock.now, call_at=clock.call_at)
    ends.watch()
    ends.send(b"x")
    await asyncio.sleep(0.001)
    assert [when for when, _ in clock.timers] == [100.5]
    clock.time = 100.4999
    calls = ends.calls
    clock.fire()
    assert ends.calls == calls  # nothing to see yet: the watcher is not bothered
    assert [when for when, _ in clock.timers] == [pytest.approx(100.5009)]  # and no race with a coarse clock
    clock.time = 100.5 - 1e-10
    clock.fire()
    assert [payload for _, payload, _ in ends.got] == [b"x"]
    assert clock.timers == []
    ends.b.close()


def test_everything_else_is_the_wrapped_underlays():
    ends = Ends(LinkSpec(loss=1.0))
    faulty, inner = ends.b, ends.inner
    assert (faulty.families, faulty.lanes, faulty.max_segments) == (frozenset({4, 6}), inner.lanes, inner.max_segments)
    assert faulty.queue is inner.queue
    inner.max_segments = 1
    assert faulty.max_segments == 1
    assert faulty.path_mtu((A, PORT)) == 1500
    with pytest.raises(AttributeError, match="nonsense"):
        _ = faulty.nonsense
    with pytest.raises(AttributeError):
        _ = copy.copy(FaultyUnderlay.__new__(FaultyUnderlay)).families
    batch = Batch(2)
    for payload in (b"out", bytes(2000)):
        batch.put(payload)
        batch.verdict[batch.count - 1], batch.stride[batch.count - 1] = Verdict.FORWARDED, len(payload)
    assert faulty.transmit(batch, [(A, PORT)]) == 1
    assert list(batch.verdict) == [Verdict.FORWARDED, Verdict.TOO_BIG]
    faulty.transmit_in_fragments(batch, 1, (A, PORT))
    assert list(batch.verdict) == [Verdict.FORWARDED] * 2
    assert [len(datagram.payload) for datagram in ends.network.crossed] == [3, 2000]


def test_the_report_tells_of_the_link():
    ends = Ends(LinkSpec(loss=1.0))
    ends.send(b"x")
    ends.receive()
    told = ends.b.report()
    assert {key: value for key, value in told.items() if key != "link"} == ends.inner.report()
    assert (told["link"]["spec"], told["link"]["sent"], told["link"]["lost"]) == ("loss=100%", 1, 1)


# Device


class Host:
    """A memory device behind a link."""

    def __init__(self, spec: LinkSpec, **options) -> None:
        self.inner = MemoryDevice(mtu=1400)
        self.device = FaultyDevice(self.inner, spec, random.Random(1), **options)
        self.got: list[tuple[float, bytes, bytes]] = []

    def receive(self, capacity: int = 64) -> list[tuple[bytes, bytes]]:
        batch = Batch(capacity)
        self.device.receive(batch)
        return [(bytes(batch.packet(i)), bytes(batch.vnet_header(i))) for i in range(batch.count)]

    def watch(self) -> None:
        self.device.watch(lambda: self.got.extend((asyncio.get_running_loop().time(), *one) for one in self.receive()))


def header(gso_size: int) -> bytes:
    found = bytearray(vnet.VNET_LENGTH)
    vnet.store(found, 0, vnet.FLAG_NEEDS_CSUM, vnet.GSO_TCPV4, 40, gso_size, 20, 16)
    return bytes(found)


@in_virtual_time
async def test_a_packet_keeps_its_virtio_net_header_on_its_way():
    host = Host(LinkSpec(delay=0.5))
    host.watch()
    for i in range(3):
        host.inner.inject(packet(payload=bytes([i])), header(1000 + i))
    await asyncio.sleep(1)
    assert host.got == [(0.5, packet(payload=bytes([i])), header(1000 + i)) for i in range(3)]
    host.device.close()


def test_corruption_is_of_the_packet_alone():
    host = Host(LinkSpec(corrupt=1.0))
    sent = packet(payload=bytes(100))
    for _ in range(20):
        host.inner.inject(sent, header(1000))
    found = host.receive()
    assert {told for _, told in found} == {header(1000)}
    assert [(int.from_bytes(got, "big") ^ int.from_bytes(sent, "big")).bit_count() for got, _ in found] == [1] * 20


def test_packets_are_lost_duplicated_and_counted():
    host = Host(LinkSpec(loss=0.3, duplicate=0.3))
    for i in range(60):
        host.inner.inject(packet(payload=bytes([i])))
    found = [got for got, _ in host.receive(128)]
    counts = host.device.link.counts
    assert len(found) == counts.delivered == 60 - counts.lost + counts.duplicated
    assert 0 < counts.lost < 60
    assert counts.duplicated > 0
    assert_adds_up(host.device)


def test_over_a_perfect_link_packets_are_counted():
    host = Host(LinkSpec())
    host.inner.inject(packet())
    assert host.receive() == [(packet(), bytes(10))]
    assert (host.device.link.counts.sent, host.device.link.counts.delivered) == (1, 1)


@in_virtual_time
async def test_no_more_packets_are_held_than_the_limit():
    host = Host(LinkSpec(delay=1.0), limit=5)
    host.watch()
    for _ in range(8):
        host.inner.inject(packet())
    await asyncio.sleep(0.1)
    assert (host.device.held, host.device.link.counts.queue_full) == (5, 3)
    host.device.unwatch()
    assert pending_timers() == 0
    host.device.close()
    host.device.close()
    assert host.device.held == 0


def test_everything_else_is_the_wrapped_devices():
    host = Host(LinkSpec(loss=1.0))
    assert (host.device.name, host.device.mtu) == ("memory0", 1400)
    batch = Batch(1)
    batch.put(packet())
    batch.verdict[0] = Verdict.FORWARDED
    host.device.transmit(batch)
    assert host.device.delivered == [packet()]


@pytest.mark.parametrize("spec", [LinkSpec(), HARMLESS], ids=["perfect", "harmless"])
def test_a_device_that_is_lost_is_lost(spec):
    class Lost(MemoryDevice):
        def receive(self, batch) -> None:
            raise DeviceLostError("gone")

    with pytest.raises(DeviceLostError):
        FaultyDevice(Lost(), spec, random.Random(1)).receive(Batch(1))


# Under an engine


@in_virtual_time
async def test_an_engine_runs_on_both_and_every_packet_has_a_verdict():
    network = FakeNetwork()
    engines = []
    for node, peer in ((1, 2), (2, 1)):
        device = FaultyDevice(MemoryDevice(), LinkSpec(loss=0.1, delay=0.001), random.Random(node))
        spec = LinkSpec(loss=0.1, delay=0.02, jitter=0.01, duplicate=0.1, corrupt=0.1, rate=1e7)
        inner = network.attach(PORT, underlay_host(node))
        underlay = FaultyUnderlay(inner, spec, random.Random(10 + node), header_length=vxlan.HEADER_LENGTH)
        failures: list[Exception] = []
        engine = Engine(device, underlay, table_of(node, [peer]), failed=failures.append)
        engine.start()
        engines.append((engine, device, underlay, failures))
    for i in range(300):
        engines[0][1].inject(packet(payload=bytes([i % 256]) * (i % 50)))
        engines[1][1].inject(packet(source=2, destination=1))
        if i % 10 == 0:
            await asyncio.sleep(0.005)
    await asyncio.sleep(2)
    for engine, device, underlay, failures in engines:
        assert failures == []
        assert engine.outbound.received == device.link.counts.delivered > 200
        assert engine.inbound.received == underlay.link.counts.delivered > 200
        for direction in (engine.outbound, engine.inbound):
            assert direction.received == sum(direction.verdicts)
        assert (device.held, underlay.held) == (0, 0)
        assert_adds_up(device)
        assert_adds_up(underlay)
        engine.stop()
        device.close()
        underlay.close()
    assert pending_timers() == 0
