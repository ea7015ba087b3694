"""One suite for every underlay: the contract of dataplane/underlay/__init__.py. Two hosts, A and B, with both families."""

import asyncio
import io
import random
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
import uvloop

from dataplane.batch import Batch
from dataplane.capture import CapturingUnderlay, Recorder
from dataplane.faults import FaultyUnderlay
from dataplane.lab import Lab, Namespace, inside
from dataplane.offload import Offloads
from dataplane.trace import Tracer, TracingUnderlay
from dataplane.underlay import Underlay, UnderlayError
from dataplane.underlay.fake import FakeNetwork
from dataplane.underlay.link import LinkSpec
from dataplane.underlay.udp import open_udp
from dataplane.verdict import Verdict

PORT = 8472
HOSTS = {4: ("192.0.2.1", "192.0.2.2", "192.0.2.3"), 6: ("2001:db8::1", "2001:db8::2", "2001:db8::3")}
"""A's, B's, and one that neither has at first."""
MTU = 1500


class Ends:
    """Both ends' underlays; `a` sends to `b` in most tests."""

    def __init__(self, a: Underlay, b: Underlay) -> None:
        self.a, self.b = a, b


def tapped(underlay: Underlay, index: int) -> Underlay:
    """With both taps around it."""
    about = {"hosts": {family: HOSTS[family][index] for family in HOSTS}, "port": PORT, "header_length": 0}
    return TracingUnderlay(CapturingUnderlay(underlay, Recorder(io.BytesIO()), **about), Tracer(lambda line: None), **about)


def perfect(underlay: Underlay, _: int) -> Underlay:
    """Behind a link that does nothing."""
    return FaultyUnderlay(underlay, LinkSpec(), random.Random(1))


def linked(underlay: Underlay, _: int) -> Underlay:
    """Behind a link that might do something, but nothing is that large."""
    return FaultyUnderlay(underlay, LinkSpec(mtu=70_000), random.Random(1))


def bare(underlay: Underlay, _: int) -> Underlay:
    return underlay


WRAPPERS = {"tapped": tapped, "perfect": perfect, "linked": linked}


@pytest.fixture(
    params=[
        "fake",
        "tapped fake",
        "perfect fake",
        "linked fake",
        pytest.param("udp", marks=pytest.mark.netns),
        pytest.param("pool", marks=pytest.mark.netns),
        pytest.param("offloads", marks=pytest.mark.netns),
        pytest.param("tapped offloads", marks=pytest.mark.netns),
        pytest.param("linked offloads", marks=pytest.mark.netns),
    ]
)
def ends(request) -> Iterator[Ends]:
    wrapped = WRAPPERS.get(request.param.split()[0], bare)
    if request.param.endswith("fake"):
        network = FakeNetwork(mtu=MTU)
        both = [network.attach(PORT, HOSTS[4][i], HOSTS[6][i]) for i in (0, 1)]
        yield Ends(*[wrapped(one, i) for i, one in enumerate(both)])
        return
    with Lab("und") as lab:
        namespace = Namespace(lab, lab.new_namespace("a"))
        addresses = [
            f"addr add {host}/{'32' if family == 4 else '128 nodad'} dev lo" for family in HOSTS for host in HOSTS[family]
        ]
        namespace.ip(f"link set lo mtu {MTU} up", *addresses)
        namespace.settle()
        with inside(namespace.name):
            both = [
                open_udp(
                    [ip_address(HOSTS[4][i]), ip_address(HOSTS[6][i])],
                    PORT,
                    0 if request.param == "udp" else 4,
                    Offloads() if request.param.endswith("offloads") else None,
                )
                for i in (0, 1)
            ]
            yield Ends(*[wrapped(one, i) for i, one in enumerate(both)])  # inside: path_mtu opens a socket of its own
        for one in both:
            one.close()


def endpoint(family: int, index: int = 1):
    host = HOSTS[family][index]
    return (host, PORT) if family == 4 else (host, PORT, 0, 0)


def batch_of(*payloads: bytes, peer: int = 0) -> Batch:
    batch = Batch(len(payloads))
    for i, payload in enumerate(payloads):
        batch.put(payload, peer)
        batch.verdict[i] = Verdict.FORWARDED
        batch.flow[i] = 7
        batch.stride[i] = len(payload)
    return batch


def received(underlay: Underlay, origins: dict[str, int], capacity: int = 64) -> list[tuple[bytes, int]]:
    """The datagrams that one receive brings, runs of equal ones taken apart by their stride."""
    batch = Batch(capacity)
    underlay.receive(batch, origins)
    found = []
    for i in range(batch.count):
        run, size = bytes(batch.packet(i)), batch.stride[i] or batch.length[i] or 1
        found += [(run[at : at + size], batch.peer[i]) for at in range(0, max(len(run), 1), size)]
    return found


def arriving(underlay: Underlay, count: int, origins: dict[str, int] | None = None, capacity: int = 64) -> list:
    """The next `count` datagrams: on a busy machine the kernel delivers a moment after the send."""
    found = []
    deadline = time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found += received(underlay, origins or {}, capacity)
    return found


def test_receives_nothing_when_there_is_nothing(ends):
    assert received(ends.a, {}) == []


def test_both_families(ends):
    assert ends.a.families == {4, 6}


@pytest.mark.parametrize("family", [4, 6])
def test_carries_payloads_in_order_and_tells_the_origin(ends, family):
    payloads = [bytes([i]) * (i * 40 + 1) for i in range(30)]
    assert ends.a.transmit(batch_of(*payloads), [endpoint(family)]) == 30
    assert arriving(ends.b, 30, {HOSTS[family][0]: 5}) == [(payload, 5) for payload in payloads]


def test_an_origin_that_nobody_knows_is_unknown(ends):
    ends.a.transmit(batch_of(b"x"), [endpoint(4)])
    assert arriving(ends.b, 1, {"192.0.2.99": 3}) == [(b"x", -1)]


def test_a_full_batch_leaves_the_rest_for_the_next(ends):
    payloads = [bytes([i]) * (i + 1) for i in range(10)]  # growing, so that no two can share a slot
    ends.a.transmit(batch_of(*payloads), [endpoint(4)])
    assert [payload for payload, _ in arriving(ends.b, 10, capacity=4)] == payloads


def train_of(payloads: list[bytes]) -> Batch:
    batch = Batch(1)
    batch.put(b"".join(payloads))
    batch.verdict[0], batch.stride[0] = Verdict.FORWARDED, len(payloads[0])
    return batch


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("sizes", [[100] * 44, [1400] * 44, [8] * 64, [700, 700, 1], [5, 5]])
def test_a_train_arrives_as_its_datagrams(ends, family, sizes):
    payloads = [bytes([i]) * size for i, size in enumerate(sizes)]
    assert ends.a.transmit(train_of(payloads), [endpoint(family)]) == 1
    assert [payload for payload, _ in arriving(ends.b, len(payloads))] == payloads


def test_a_train_too_big_for_the_path_can_go_in_fragments(ends):
    payloads = [bytes([i]) * 3000 for i in range(5)]
    batch = train_of(payloads)
    assert ends.a.transmit(batch, [endpoint(4)]) == 0
    assert batch.verdict[0] == Verdict.TOO_BIG
    ends.a.transmit_in_fragments(batch, 0, endpoint(4))
    assert batch.verdict[0] == Verdict.FORWARDED
    assert [payload for payload, _ in arriving(ends.b, len(payloads))] == payloads


def test_only_what_is_forwarded_is_sent(ends):
    batch = batch_of(b"a", b"b", b"c")
    batch.verdict[1] = Verdict.NO_ROUTE
    assert ends.a.transmit(batch, [endpoint(4)]) == 2
    assert [payload for payload, _ in arriving(ends.b, 2)] == [b"a", b"c"]
    assert list(batch.verdict) == [Verdict.FORWARDED, Verdict.NO_ROUTE, Verdict.FORWARDED]


def test_each_datagram_goes_to_the_endpoint_of_its_row(ends):
    batch = batch_of(b"to b", b"to a")
    batch.peer[1] = 1
    ends.a.transmit(batch, [endpoint(4, 1), endpoint(4, 0)])
    assert arriving(ends.b, 1) == [(b"to b", -1)]
    assert arriving(ends.a, 1) == [(b"to a", -1)]


@pytest.mark.parametrize(("family", "largest"), [(4, MTU - 28), (6, MTU - 48)])
def test_larger_than_the_path_is_too_big_and_stops_nobody(ends, family, largest):
    payloads = [b"x" * largest, b"y" * (largest + 1), b"z"]
    batch = batch_of(*payloads)
    assert ends.a.transmit(batch, [endpoint(family)]) == 2
    assert list(batch.verdict) == [Verdict.FORWARDED, Verdict.TOO_BIG, Verdict.FORWARDED]
    assert [payload for payload, _ in arriving(ends.b, 2)] == [payloads[0], payloads[2]]
    assert ends.a.path_mtu(endpoint(family)) == MTU


@pytest.mark.parametrize("family", [4, 6])
def test_fragments_carry_what_is_larger_than_the_path(ends, family):
    payload = bytes(range(256)) * 200
    batch = batch_of(payload)
    batch.verdict[0] = Verdict.TOO_BIG
    ends.a.transmit_in_fragments(batch, 0, endpoint(family))
    assert batch.verdict[0] == Verdict.FORWARDED
    assert [got for got, _ in arriving(ends.b, 1)] == [payload]


def test_what_no_datagram_can_hold_stays_too_big(ends):
    batch = batch_of(b"x" * 65508)
    ends.a.transmit_in_fragments(batch, 0, endpoint(4))
    assert batch.verdict[0] == Verdict.TOO_BIG


async def test_watch_calls_until_nothing_is_left_and_unwatch_ends_it(ends):
    got, quiet = [], asyncio.Event()

    def ready() -> None:
        got.extend(payload for payload, _ in received(ends.b, {}, 1))
        if len(got) >= 4:
            quiet.set()

    ends.a.transmit(batch_of(b"0", b"1"), [endpoint(4)])
    ends.b.watch(ready)
    ends.a.transmit(batch_of(b"2"), [endpoint(4)])
    ends.a.transmit(batch_of(b"3"), [endpoint(4)])
    await asyncio.wait_for(quiet.wait(), 5)
    ends.b.unwatch()
    ends.a.transmit(batch_of(b"4"), [endpoint(4)])
    for _ in range(5):
        await asyncio.sleep(0)
    assert got == [b"0", b"1", b"2", b"3"]


def at(*numbers: tuple[int, int]) -> list:
    return [ip_address(HOSTS[family][index]) for family, index in numbers]


@pytest.mark.parametrize("family", [4, 6])
def test_after_a_rebind_it_sends_from_and_receives_at_the_new_address(ends, family):
    ends.a.transmit(batch_of(b"before"), [endpoint(family)])
    assert arriving(ends.b, 1, {HOSTS[family][0]: 5}) == [(b"before", 5)]
    ends.a.rebind(at((4, 2), (6, 2)))
    assert ends.a.families == {4, 6}
    ends.a.transmit(batch_of(b"after"), [endpoint(family)])
    assert arriving(ends.b, 1, {HOSTS[family][2]: 7}) == [(b"after", 7)]
    ends.b.transmit(batch_of(b"to the old"), [endpoint(family, 0)])
    ends.b.transmit(batch_of(b"to the new"), [endpoint(family, 2)])
    assert arriving(ends.a, 1) == [(b"to the new", -1)]
    assert ends.a.path_mtu(endpoint(family)) == MTU
    assert list(ends.a.report()["source_ports"]) == ["ipv4", "ipv6"]
    batch = batch_of(b"x" * 3000)
    ends.a.transmit_in_fragments(batch, 0, endpoint(family))
    assert arriving(ends.b, 1, {HOSTS[family][2]: 7}) == [(b"x" * 3000, 7)]


def test_a_rebind_changes_the_families(ends):
    ends.a.rebind(at((6, 0)))
    assert ends.a.families == {6}
    ends.a.rebind(at((4, 2), (6, 0)))
    assert ends.a.families == {4, 6}
    for family, index in ((4, 2), (6, 0)):
        ends.b.transmit(batch_of(b"x"), [endpoint(family, index)])
        assert arriving(ends.a, 1, {HOSTS[family][1]: 3}) == [(b"x", 3)]


def test_a_family_whose_address_stays_keeps_what_has_arrived(ends):
    ends.b.transmit(batch_of(b"waits"), [endpoint(4, 0)])
    ends.a.rebind(at((4, 0), (6, 2)))
    assert arriving(ends.a, 1) == [(b"waits", -1)]


@pytest.mark.parametrize("addresses", [at((6, 2), (4, 1)), []])
def test_a_rebind_that_fails_changes_nothing(ends, addresses):
    lanes = ends.a.report()["source_ports"]
    with pytest.raises(UnderlayError):
        ends.a.rebind(addresses)  # B has that one
    assert (ends.a.families, ends.a.report()["source_ports"]) == ({4, 6}, lanes)
    for family in (4, 6):
        ends.a.transmit(batch_of(b"there"), [endpoint(family)])
        assert arriving(ends.b, 1, {HOSTS[family][0]: 5}) == [(b"there", 5)]
        ends.b.transmit(batch_of(b"back"), [endpoint(family, 0)])
        assert arriving(ends.a, 1, {HOSTS[family][1]: 6}) == [(b"back", 6)]


def test_what_is_closed_cannot_be_rebound(ends):
    ends.a.close()
    with pytest.raises(UnderlayError):
        ends.a.rebind(at((4, 2)))


async def until_received(got: list, count: int) -> None:
    deadline = time.monotonic() + 5
    while len(got) < count and time.monotonic() < deadline:  # noqa: ASYNC110 - the watcher has no event to set
        await asyncio.sleep(0)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_rebind_keeps_the_watch_and_a_rebind_without_one_makes_none(ends, new_loop):
    async def change() -> None:
        got: list = []
        ends.a.watch(lambda: got.extend(received(ends.a, {})))
        for turn in range(6):  # descriptors are used again, each time by another socket
            index = 2 * ((turn + 1) % 2)
            ends.a.rebind(at((4, index), (6, index)))
            for family in (4, 6):
                ends.b.transmit(batch_of(b"%d" % turn), [endpoint(family, index)])
            await until_received(got, 2 * turn + 2)
        assert [payload for payload, _ in got] == [b"%d" % turn for turn in range(6) for _ in (4, 6)]
        ends.a.unwatch()
        ends.a.rebind(at((4, 2), (6, 2)))
        ends.b.transmit(batch_of(b"nobody looks"), [endpoint(4, 2)])
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(got) == 12
        assert arriving(ends.a, 1) == [(b"nobody looks", -1)]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(change())


def test_closing_twice_does_no_harm(ends):
    ends.a.close()
    ends.a.close()
