"""The batch's layout and its two compiled helpers against slow twins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch import HEADROOM, MAX_PACKET_LENGTH, Batch
from dataplane.verdict import MEANING, Verdict, by_name, new_counts
from encap.faults import Fault


def test_slots_do_not_overlap_and_have_headroom():
    batch = Batch(3)
    for i in range(3):
        batch.slots[i][:] = bytes([i + 1]) * MAX_PACKET_LENGTH
        batch.add(MAX_PACKET_LENGTH)
    for i in range(3):
        assert set(batch.packet(i)) == {i + 1}
        start = batch.offset[i]
        assert bytes(batch.data[start - HEADROOM : start]) == bytes(HEADROOM)


def test_a_scattered_read_fills_header_and_slot():
    batch = Batch(2)
    for i in range(2):
        header, slot = batch.vnet_slots[i]
        header[:], slot[:3] = bytes([i]) * 10, b"abc"
        batch.add(3)
    assert [bytes(batch.vnet_header(i)) for i in range(2)] == [bytes(10), b"\x01" * 10]
    assert bytes(batch.packet(1)) == b"abc"


def test_a_batch_may_describe_the_bytes_of_another():
    whole = Batch(1)
    whole.put(b"abcdef")
    part = Batch(5, whole.data)
    part.offset[0], part.length[0], part.count = whole.offset[0] + 2, 3, 1
    assert bytes(part.packet(0)) == b"cde"
    assert part.slots == []


def test_merged_entries_share_the_verdict_of_their_head():
    batch = Batch(4)
    for i, head in enumerate((0, 0, 2, 0)):
        batch.add(1)
        batch.head[i] = head
    batch.verdict[0], batch.verdict[2] = Verdict.QUEUE_FULL, Verdict.FORWARDED
    batch.share_verdicts()
    assert list(batch.verdict) == [Verdict.QUEUE_FULL, Verdict.QUEUE_FULL, Verdict.FORWARDED, Verdict.QUEUE_FULL]


def test_add_fills_the_columns_and_clear_forgets():
    batch = Batch(2)
    batch.put(b"one", peer=4)
    batch.slots[1][:3] = b"two"
    batch.add(3, peer=5, stride=2)
    assert batch.is_full
    assert (list(batch.peer), list(batch.stride), list(batch.length)) == ([4, 5], [0, 2], [3, 3])
    assert [bytes(batch.packet(i)) for i in range(2)] == [b"one", b"two"]
    batch.clear()
    assert (batch.count, batch.is_full) == (0, False)


def test_slots_do_not_share_a_cache_set():
    batch = Batch(64)
    for _ in range(64):
        batch.add(0)
    assert len({offset % 4096 // 64 for offset in batch.offset}) > 8


def test_more_than_fits_raises():
    batch = Batch(1)
    batch.add(1)
    with pytest.raises(IndexError):
        batch.add(1)


def batch_of(verdicts: list[int], lengths: list[int]) -> Batch:
    batch = Batch(64)
    for i, (verdict, length) in enumerate(zip(verdicts, lengths, strict=True)):
        batch.add(length)
        batch.verdict[i] = verdict
    return batch


PACKETS = st.lists(st.tuples(st.sampled_from(list(Verdict)), st.integers(0, 65535)), max_size=64)


@given(PACKETS)
def test_tally_counts_each_verdict_and_the_bytes_forwarded(packets):
    batch = batch_of([verdict for verdict, _ in packets], [length for _, length in packets])
    counts = new_counts()
    assert batch.tally(counts) == sum(length for verdict, length in packets if verdict == Verdict.FORWARDED)
    assert list(counts) == [sum(verdict == each for verdict, _ in packets) for each in Verdict]


@given(PACKETS, st.sampled_from(list(Verdict)))
def test_indices_of_a_verdict(packets, wanted):
    batch = batch_of([verdict for verdict, _ in packets], [length for _, length in packets])
    assert batch.indices(wanted) == [i for i, (verdict, _) in enumerate(packets) if verdict == wanted]


def test_every_fault_is_a_verdict_of_the_same_number_and_every_verdict_has_a_meaning():
    for fault in Fault:
        assert Verdict[fault.name] == fault
    assert set(MEANING) == set(Verdict)
    assert [int(verdict) for verdict in Verdict] == list(range(len(Verdict)))


def test_counters_go_by_lower_case_name():
    counts = new_counts()
    counts[Verdict.NO_ROUTE] = 3
    named = by_name(counts)
    assert named["no_route"] == 3
    assert "pending" not in named
    assert sum(named.values()) == 3
