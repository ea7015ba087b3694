"""When packets are due, on a clock that moves only when it is asked to."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.chunk import Chunk
from bench.replay.pacing import Pace, Pacer

MS = 1_000_000
S = 1_000_000_000
EPOCH = 1_700_000_000 * S


class Clock:
    """Sleeping makes it later, and so does looking, a little; `oversleep` is how late a sleeper is woken."""

    def __init__(self, oversleep: int = 0, look: int = 100) -> None:
        self.now = 12345
        self.oversleep = oversleep
        self.look = look
        self.slept = []

    def __call__(self) -> int:
        self.now += self.look
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += round(seconds * S) + self.oversleep


def chunk_of(times: list[int], lengths: list[int] | None = None) -> Chunk:
    chunk = Chunk(1 << 16)
    for time, length in zip(times, lengths or [20] * len(times), strict=True):
        chunk.append(bytes(length), time)
    return chunk


def pacer(clock: Clock | None = None, spin_ns: int = 0, **pace) -> Pacer:
    clock = clock or Clock(look=0)
    return Pacer(Pace(**pace), clock, clock.sleep, spin_ns)


def due_times(pacer: Pacer, *chunks: Chunk) -> list[int]:
    """The due time of each packet from the start of the schedule, over all loops, without ever sending late."""
    found = []
    while pacer.next_loop():
        for chunk in chunks:
            pacer.load(chunk)
            pacer.start()
            begin = pacer._clock() - pacer.elapsed_ns
            found += [pacer.wait(i) - begin for i in range(len(chunk))]
            pacer.stop()
    return found


def replay(pacer: Pacer, chunk: Chunk, limit: int = 64, cost=lambda count: 0) -> list[tuple[int, int]]:
    """As a mode does it; when how many were sent. `cost` is what sending takes."""
    batches = []
    while pacer.next_loop():
        pacer.load(chunk)
        pacer.start()
        position = 0
        while position < len(chunk):
            now = pacer.wait(position)
            count = pacer.due(position, limit, now)
            assert 1 <= count <= limit
            pacer.sent(position, count, now)
            batches.append((now, count))
            position += count
            pacer._clock.now += cost(count)
        pacer.stop()
    return batches


def test_as_captured():
    times = [EPOCH, EPOCH + 3 * MS, EPOCH + 3 * MS, EPOCH + 10 * MS]
    assert due_times(pacer(speed=1), chunk_of(times)) == [0, 3 * MS, 3 * MS, 10 * MS]
    assert due_times(pacer(speed=2), chunk_of(times)) == [0, 1.5 * MS, 1.5 * MS, 5 * MS]
    assert due_times(pacer(speed=0.5), chunk_of(times)) == [0, 6 * MS, 6 * MS, 20 * MS]


def test_packets_per_second():
    assert due_times(pacer(packets_per_second=1000), chunk_of([0] * 4)) == [0, MS, 2 * MS, 3 * MS]


def test_bits_per_second_are_of_the_packets_before():
    chunk = chunk_of([0] * 3, [100, 1500, 40])
    assert due_times(pacer(bits_per_second=8000), chunk) == [0, 100 * MS, 1600 * MS]
    assert due_times(pacer(bits_per_second=8000, overhead_bytes=50), chunk) == [0, 150 * MS, 1700 * MS]


def test_rates_do_not_drift():
    times = due_times(pacer(packets_per_second=3), *[chunk_of([0] * 1000)] * 3)
    assert times[-1] == pytest.approx(2999 / 3 * S, abs=1)


@pytest.mark.parametrize("pace", [{"speed": 1}, {"packets_per_second": 500}, {"bits_per_second": 1e6}])
def test_how_a_capture_is_cut_into_chunks_makes_no_difference(pace):
    times = [EPOCH + i * i * MS for i in range(12)]
    lengths = [20 + 7 * i for i in range(12)]
    whole = due_times(pacer(loops=2, **pace), chunk_of(times, lengths))
    cut = [chunk_of(times[a:b], lengths[a:b]) for a, b in ((0, 1), (1, 7), (7, 7), (7, 12))]
    assert due_times(pacer(loops=2, **pace), *cut) == whole


def test_a_loop_follows_at_the_mean_gap_of_the_capture():
    chunk = chunk_of([EPOCH, EPOCH + 2 * MS, EPOCH + 8 * MS])
    assert due_times(pacer(speed=1, loops=3), chunk) == [t * MS for t in (0, 2, 8, 12, 14, 20, 24, 26, 32)]
    assert due_times(pacer(speed=1, loops=3), chunk_of([EPOCH])) == [0, 0, 0]
    assert due_times(pacer(packets_per_second=1000, loops=2), chunk) == [t * MS for t in range(6)]


def test_as_fast_as_possible_has_everything_due_and_waits_for_nothing():
    clock = Clock()
    fast = pacer(clock)
    batches = replay(fast, chunk_of([EPOCH, EPOCH + S, EPOCH + 9 * S] * 50))
    assert [count for _, count in batches] == [64, 64, 22]
    assert clock.slept == []
    assert fast.wait_ns(0, 0) == 0
    assert fast.result().pace == "as fast as possible"
    assert fast.result().lateness is None


def test_no_more_loops_than_wanted():
    one = pacer(loops=2)
    assert [one.next_loop() for _ in range(4)] == [True, True, False, False]


def test_an_empty_chunk_has_nothing_due():
    one = pacer(speed=1)
    one.next_loop()
    one.load(chunk_of([]))
    one.start()
    assert one.due(0, 64, 1 << 60) == 0
    assert one.wait_ns(0, 0) == 0


# --- times that no clock should show


def test_times_written_out_of_order_do_not_make_it_longer():
    times = [EPOCH + t * MS for t in (0, 10, 9, 10, 11, 8, 12)]
    assert due_times(pacer(speed=1), chunk_of(times)) == [t * MS for t in (0, 10, 10, 10, 11, 11, 12)]


def test_a_clock_that_was_set_back_is_followed():
    hour = 3600 * S
    times = [EPOCH, EPOCH + 5 * MS, EPOCH - hour, EPOCH - hour + 7 * MS]
    assert due_times(pacer(speed=1), chunk_of(times)) == [0, 5 * MS, 5 * MS, 12 * MS]


def test_gaps_of_days_are_shortened_if_wanted():
    day = 86400 * S
    times = [EPOCH, EPOCH + 3 * day, EPOCH + 3 * day + MS]
    assert due_times(pacer(speed=1), chunk_of(times)) == [0, 3 * day, 3 * day + MS]
    assert due_times(pacer(speed=1, max_gap_seconds=0.5), chunk_of(times)) == [0, S // 2, S // 2 + MS]
    assert due_times(pacer(speed=2, max_gap_seconds=0.5), chunk_of(times)) == [0, S // 4, S // 4 + MS // 2]
    assert due_times(pacer(speed=1, max_gap_seconds=0), chunk_of(times)) == [0, 0, 0]


@pytest.mark.parametrize("pace", ["packets_per_second", "bits_per_second", "speed"])
def test_the_slowest_pace_is_still_a_time(pace):
    one = pacer(**{pace: 5e-324})
    one.next_loop()
    one.load(chunk_of([0, S]))
    assert list(one._due) == [0, 1 << 62]


EDGE = (1 << 63) - 1


@given(
    times=st.lists(st.one_of(st.sampled_from([-EDGE, 0, EDGE]), st.integers(-EDGE, EDGE)), min_size=1, max_size=20),
    pace=st.sampled_from(["speed", "packets_per_second", "bits_per_second"]),
    rate=st.floats(1e-300, 1e300),
    loops=st.integers(1, 3),
)
def test_whatever_the_times_packets_are_due_in_their_order(times, pace, rate, loops):
    one = pacer(loops=loops, **{pace: rate})
    last = 0
    chunk = chunk_of(times)
    while one.next_loop():
        one.load(chunk)
        assert list(one._due) == sorted(one._due)
        assert one._due[0] >= last
        last = one._due[-1]


# --- batches, and how late they are


def test_a_batch_is_what_is_due():
    one = pacer(packets_per_second=1000)
    one.next_loop()
    one.load(chunk_of([0] * 10))
    one.start()
    begin = one._clock()
    assert one.due(0, 64, begin) == 1
    assert one.due(0, 64, begin + 3 * MS) == 4
    assert one.due(2, 64, begin + 3 * MS) == 2
    assert one.due(0, 3, begin + 3 * MS) == 3
    assert one.due(5, 64, begin + 3 * MS) == 0
    assert one.due(0, 64, begin + S) == 10
    assert one.due(10, 64, begin + S) == 0
    assert one.wait_ns(5, begin + 3 * MS) == 2 * MS
    assert one.wait_ns(10, begin) == 0


def test_on_time_is_not_late():
    one = pacer(packets_per_second=1000)
    replay(one, chunk_of([0] * 100))
    assert (one.lateness.count, one.lateness.maximum) == (100, 0)


def test_an_overslept_wait_is_late_by_that_and_spinning_avoids_it():
    late = pacer(Clock(oversleep=50_000), packets_per_second=1000)
    replay(late, chunk_of([0] * 1000))
    assert late.lateness.maximum == pytest.approx(50_000, abs=300)
    assert late.lateness.mean == pytest.approx(50_000, rel=0.01)
    spun = pacer(Clock(oversleep=50_000), spin_ns=60_000, packets_per_second=1000)
    replay(spun, chunk_of([0] * 1000))
    assert spun.lateness.count == 1000
    assert spun.lateness.maximum <= 100  # one look at the clock


def test_lateness_is_exact_whatever_the_batches():
    rng = random.Random(4)
    clock = Clock(oversleep=30_000)
    one = pacer(clock, speed=1, loops=2)
    times = sorted(EPOCH + rng.randrange(20 * MS) for _ in range(300))
    batches = replay(one, chunk_of(times), limit=16, cost=lambda count: 20_000 * count)
    due = due_times(pacer(speed=1, loops=2), chunk_of(times))
    begin = 12345 + clock.look
    sent = [now - begin for now, count in batches for _ in range(count)]
    # Each `stop` and `start` look at the clock, between which it does not count.
    late = [max(s - d - (clock.look if i >= 300 else 0), 0) for i, (s, d) in enumerate(zip(sent, due, strict=True))]
    assert one.lateness.count == 600
    assert one.lateness.maximum == max(late)
    assert one.lateness.mean == pytest.approx(sum(late) / 600)
    assert one.result().lateness.max_microseconds == max(late) / 1e3
    assert one.result().lateness.p99_microseconds == pytest.approx(sorted(late)[593] / 1e3, rel=0.01)


def test_who_cannot_keep_up_is_later_and_later_and_sends_full_batches():
    one = pacer(packets_per_second=1e6)
    batches = replay(one, chunk_of([0] * 1000), limit=32, cost=lambda count: 2000 * count)
    assert one.lateness.maximum == pytest.approx(1 * MS, rel=0.1)  # took 2 ms, and 1 ms was scheduled
    assert batches[-2][1] == 32


def test_loading_makes_nothing_late():
    clock = Clock(look=0)
    one = pacer(clock, packets_per_second=1000)
    chunk = chunk_of([0] * 10)
    one.next_loop()
    for _ in range(3):
        one.load(chunk)
        clock.now += 5 * S  # loading
        one.start()
        for i in range(10):
            now = one.wait(i)
            one.sent(i, one.due(i, 1, now), now)
        one.stop()
    assert one.lateness.count == 30
    assert one.lateness.maximum == 0
    assert one.elapsed_ns == 29 * MS


# --- what is asked for


@pytest.mark.parametrize(
    ("pace", "text"),
    [
        ({}, "as fast as possible"),
        ({"speed": 1}, "as captured"),
        ({"speed": 2.5}, "as captured × 2.5"),
        ({"speed": 1, "max_gap_seconds": 0.5}, "as captured, gaps of at most 0.5 s"),
        ({"packets_per_second": 1234567}, "1234567 packets/s"),
        ({"bits_per_second": 1e9}, "1000000000 bits/s"),
        ({"bits_per_second": 1e9, "overhead_bytes": 50}, "1000000000 bits/s with 50 bytes of overhead a packet"),
    ],
)
def test_a_pace_in_words(pace, text):
    assert str(Pace(**pace)) == text
    assert Pace(**pace).has_schedule is bool(pace)


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        ({"speed": 1, "packets_per_second": 5}, "one pace at a time, not speed and packets/s"),
        ({"speed": 0}, "speed must be above 0"),
        ({"packets_per_second": -1}, "packets/s must be above 0"),
        ({"bits_per_second": float("inf")}, "bits/s must be above 0"),
        ({"speed": float("nan")}, "speed must be above 0"),
        ({"speed": 1, "max_gap_seconds": -1}, "longest gap"),
        ({"packets_per_second": 1, "max_gap_seconds": 1}, "only at a capture's own pace"),
        ({"bits_per_second": 1, "overhead_bytes": -1}, "overhead"),
        ({"loops": 0}, "at least once"),
    ],
)
def test_a_pace_that_cannot_be_kept_is_refused(pace, said):
    with pytest.raises(ValueError, match=said):
        Pace(**pace)
