"""What the parts of a replay cost, measured and not measured ones; run by ``./dev bench kernels``.

Batches hold 256 packets as a replay's do, so a time divided by 256 is the time of a packet. Packets are those of `imix`.
"""

from array import array
from ipaddress import ip_address
from typing import Any

import pytest

from bench.replay.capture import Record
from bench.replay.chunk import Chunk
from bench.replay.linklayer import inner_packet
from bench.replay.paths import BATCH
from bench.replay.rewrite import Rewriter
from bench.replay.sides import SENDER, Sides, make_sides
from bench.replay.traces import generate
from bench.replay.verify import Recogniser, count_differences
from dataplane.batch import Batch
from dataplane.inbound import decapsulate, unpack
from dataplane.outbound import Outbound, judge_batch

LANES = 8
LINKTYPE_RAW = 101


@pytest.fixture(scope="module", params=["vxlan", "ip"])
def sides(request: pytest.FixtureRequest) -> Sides:
    hosts = ip_address("127.0.0.1"), ip_address("127.0.0.2")
    framing = str(request.param)
    return make_sides(framing=framing, peers=16, leases=1000, sender_host=hosts[0], peer_hosts=hosts[1:], port=8472)


@pytest.fixture(scope="module")
def packets() -> list[bytes]:
    return [packet for _, packet in generate("imix", 1, BATCH)]


@pytest.fixture
def batch(packets: list[bytes], sides: Sides) -> Batch:
    """Packets that fit the overlay, as they lie in a chunk."""
    chunk, rewriter = Chunk(1 << 20), Rewriter(SENDER, sides.peer_subnets, 0)
    for packet in packets:
        chunk.append(packet, 0)
        rewriter.rewrite(chunk.data, chunk.offset[-1], len(packet))
    made = Batch(BATCH, memoryview(chunk.data))
    made.offset[:BATCH], made.length[:BATCH] = memoryview(chunk.offset), memoryview(chunk.length)
    made.count = BATCH
    return made


def arrived(batch: Batch, sides: Sides) -> Batch:
    """The pieces that a receiver makes of `batch`, which is judged."""
    assert judge_batch(batch, sides.sending) == BATCH
    layout = Outbound(1 << 20, BATCH)
    layout.start(LANES, 64)
    layout.lay_out(batch, sides.sending)
    pieces = Batch(BATCH, layout.trains.data)
    unpack(layout.trains, pieces, sides.receiving, 0)
    for i in range(BATCH):
        pieces.peer[i] = 0
    assert decapsulate(pieces, sides.receiving) == BATCH
    return pieces


def test_inner_packet_of_256(benchmark: Any, packets: list[bytes]) -> None:
    records = [Record(0, packet, len(packet), LINKTYPE_RAW) for packet in packets]

    def find() -> None:
        for record in records:
            inner_packet(record)

    benchmark(find)


def test_append_256(benchmark: Any, packets: list[bytes]) -> None:
    chunk = Chunk(1 << 20)

    def append() -> None:
        chunk.clear()
        for packet in packets:
            chunk.append(packet, 0)

    benchmark(append)


def test_rewrite_256(benchmark: Any, batch: Batch, sides: Sides) -> None:
    """Pairs of addresses that were seen before."""
    rewriter = Rewriter(SENDER, sides.peer_subnets, 0)
    data, places = bytearray(batch.data), list(zip(batch.offset, batch.length, strict=True))
    original = bytes(data)

    def rewrite() -> None:
        for at, length in places:
            rewriter.rewrite(data, at, length)

    def restore() -> None:
        data[:] = original

    benchmark.pedantic(rewrite, setup=restore, rounds=200, warmup_rounds=1)


def test_judge_and_lay_out_256(benchmark: Any, batch: Batch, sides: Sides) -> None:
    layout = Outbound(1 << 20, BATCH)

    def encapsulate() -> int:
        forwarded = judge_batch(batch, sides.sending)
        layout.start(LANES, 64)
        layout.lay_out(batch, sides.sending)
        return forwarded

    assert benchmark(encapsulate) == BATCH


def test_compare_256_in_step(benchmark: Any, batch: Batch, sides: Sides) -> None:
    pieces = arrived(batch, sides)
    assert benchmark(count_differences, batch, pieces, sides.sending.is_vxlan) == 0


def test_recognise_256_lane_by_lane(benchmark: Any, batch: Batch, sides: Sides) -> None:
    pieces = arrived(batch, sides)
    order = sorted(range(BATCH), key=lambda i: batch.flow[i] % LANES)
    for column in (pieces.offset, pieces.length):
        column[:] = memoryview(array("i", [column[i] for i in order]))
    recogniser = Recogniser(LANES)
    benchmark(recogniser.recognise, batch, pieces, sides.sending.is_vxlan)
    assert (recogniser.missing, recogniser.strange, recogniser.reordered) == (0, 0, 0)
