"""The model of a link. Statistics are held against intervals computed here, with fixed seeds: a run repeats exactly."""

import contextlib
import math
import random
from dataclasses import asdict, astuple, fields, replace
from statistics import mean, pstdev

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane.underlay.link import (
    FASTEST_RATE,
    LONGEST_DELAY,
    Burst,
    Link,
    LinkCounts,
    LinkSpec,
    describe_link,
    link_from_mapping,
    parse_link,
)

MANY = 20_000
SIGMAS = 4.0  # a right program fails one statistic in 16 000, and with a fixed seed always or never


class CountingRandom(random.Random):
    """Counts what is drawn from it."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        return super().random()

    def getrandbits(self, bits: int) -> int:
        self.draws += 1
        return super().getrandbits(bits)


def link(seed: int = 1, **spec) -> Link:
    return Link(LinkSpec(**spec), random.Random(seed))


def fates(one: Link, count: int = MANY, spacing: float = 1.0, payload: bytes = b"payload") -> list:
    return [one.cross(i * spacing, payload) for i in range(count)]


def assert_probability(hits: int, trials: int, probability: float) -> None:
    """Whether so many hits are what a binomial distribution lets one expect."""
    sigma = math.sqrt(trials * probability * (1 - probability))
    assert abs(hits - trials * probability) <= SIGMAS * sigma


def assert_adds_up(counts: LinkCounts) -> None:
    assert counts.sent + counts.duplicated == counts.delivered + counts.lost + counts.queue_full + counts.oversize


# A perfect link


def test_a_perfect_link_changes_nothing_and_draws_nothing():
    rng = CountingRandom(1)
    one = Link(LinkSpec(), rng)
    assert one.spec.is_perfect
    for i in range(100):
        payload = bytes(i)
        assert one.cross(i / 2, payload, 28) == [(i / 2, payload)]
    assert rng.draws == 0
    assert one.counts == LinkCounts(sent=100, delivered=100)


@pytest.mark.parametrize(
    "fault",
    [
        {"loss": 0.1}, {"burst": Burst(0.1, 0.1)}, {"delay": 1.0}, {"jitter": 1.0}, {"reorder": 0.1}, {"duplicate": 0.1},
        {"corrupt": 0.1}, {"rate": 1e9}, {"mtu": 1500},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_can_happen_makes_a_link_imperfect(fault):
    assert not LinkSpec(**fault).is_perfect
    assert LinkSpec(distribution="normal", queue=1, oversize="drop").is_perfect


# Loss


@pytest.mark.parametrize("loss", [0.001, 0.1, 0.5, 0.9])
def test_independent_loss(loss):
    one = link(loss=loss)
    arrived = [bool(fate) for fate in fates(one)]
    assert_probability(arrived.count(False), MANY, loss)
    assert one.counts.lost == arrived.count(False)
    both = sum(not a and not b for a, b in zip(arrived[::2], arrived[1::2], strict=True))
    assert_probability(both, MANY // 2, loss * loss)  # independent: no memory of the one before


@pytest.mark.parametrize("loss", [0.0, 1.0])
def test_certain_loss_is_certain(loss):
    assert [bool(fate) for fate in fates(link(loss=loss), 1000)] == [loss == 0] * 1000


def runs_of(value: bool, sequence: list[bool]) -> list[int]:
    """The lengths of the runs of `value`, but for one at the end, which may be incomplete."""
    found, length = [], 0
    for one in sequence:
        if one == value:
            length += 1
        elif length:
            found.append(length)
            length = 0
    return found


@pytest.mark.parametrize(("enter", "leave"), [(0.01, 0.3), (0.05, 0.1), (0.2, 0.9)])
def test_bursts_are_as_frequent_and_as_long_as_the_probabilities_say(enter, leave):
    lost = [not fate for fate in fates(link(burst=Burst(enter, leave)))]
    stationary = enter / (enter + leave)
    memory = 1 - enter - leave  # the correlation of neighbours, which widens the interval
    sigma = math.sqrt(stationary * (1 - stationary) / MANY * (1 + memory) / (1 - memory))
    assert abs(mean(lost) - stationary) <= SIGMAS * sigma
    for value, end in ((True, leave), (False, enter)):
        lengths = runs_of(value, lost)
        assert abs(mean(lengths) - 1 / end) <= SIGMAS * math.sqrt((1 - end) / end**2 / len(lengths))


def test_a_burst_may_let_some_through_and_the_good_state_lose_some():
    one = link(burst=Burst(0.1, 0.1, loss_in_bad=0.6, loss_in_good=0.2))
    lost = [not fate for fate in fates(one)]
    memory = 0.8
    wider = math.sqrt(1 + 2 * 0.2**2 / 0.24 * memory / (1 - memory))  # states differ by ±0.2 from the mean of 0.4
    assert abs(mean(lost) - 0.4) <= SIGMAS * wider * math.sqrt(0.24 / MANY)


def test_the_state_changes_before_the_datagram_crosses():
    one = link(burst=Burst(1.0, 1.0))
    assert [len(fate) for fate in fates(one, 6)] == [0, 1, 0, 1, 0, 1]


def test_burst_and_independent_loss_add():
    one = link(burst=Burst(0.25, 0.75), loss=0.5)  # states without memory: bad for one in four
    assert_probability(sum(not fate for fate in fates(one)), MANY, 0.25 + 0.75 * 0.5)


# Delay


def delays(one: Link, spacing: float = 1000.0) -> list[float]:
    """Far apart, so that keeping order costs nothing."""
    return [fate[0][0] - i * spacing for i, fate in enumerate(fates(one, spacing=spacing))]


def test_a_delay_without_jitter_is_the_same_for_all():
    assert [fate[0][0] for fate in fates(link(delay=0.25), 10)] == [i + 0.25 for i in range(10)]


def assert_mean(samples: list[float], expected: float, sigma: float) -> None:
    assert abs(mean(samples) - expected) <= SIGMAS * sigma / math.sqrt(len(samples))


def assert_deviation(samples: list[float], sigma: float, kurtosis: float) -> None:
    """By the variance of the sample variance, which the fourth moment gives."""
    assert abs(pstdev(samples) ** 2 - sigma**2) <= SIGMAS * sigma**2 * math.sqrt((kurtosis - 1) / len(samples))


@pytest.mark.parametrize(
    ("distribution", "centre", "sigma", "kurtosis"),
    [("uniform", 5.0, 1 / math.sqrt(3), 1.8), ("normal", 5.0, 1.0, 3.0), ("exponential", 6.0, 1.0, 9.0)],
)
def test_the_delay_has_its_distribution(distribution, centre, sigma, kurtosis):
    samples = delays(link(delay=5.0, jitter=1.0, distribution=distribution))
    assert_mean(samples, centre, sigma)
    assert_deviation(samples, sigma, kurtosis)


@pytest.mark.parametrize(
    ("distribution", "bound", "share"),
    [
        ("uniform", 0.5, 0.25),
        ("normal", 1.0, (1 - math.erf(1 / math.sqrt(2))) / 2),
        ("normal", 2.0, (1 - math.erf(2 / math.sqrt(2))) / 2),
        ("exponential", 1.0, math.exp(-1)),
        ("exponential", 4.0, math.exp(-4)),
    ],
)
def test_the_delay_has_the_tail_of_its_distribution(distribution, bound, share):
    samples = delays(link(delay=5.0, jitter=1.0, distribution=distribution))
    assert_probability(sum(delay - 5.0 > bound for delay in samples), MANY, share)


@pytest.mark.parametrize(
    ("distribution", "least", "most"),
    [("uniform", 4.0, 6.0), ("exponential", 5.0, math.inf), ("pareto", 5.0, math.inf), ("normal", 0.0, math.inf)],
)
def test_the_delay_stays_in_its_range(distribution, least, most):
    assert all(
        least - 1e-8 <= delay <= most + 1e-8 for delay in delays(link(delay=5.0, jitter=1.0, distribution=distribution))
    )


def test_pareto_has_its_mean_and_a_heavy_tail():
    extra = [delay - 5.0 for delay in delays(link(delay=5.0, jitter=1.0, distribution="pareto"))]
    assert_mean(extra, 1.0, math.sqrt(3))
    for bound in (1.0, 3.0, 8.0):  # (1 + x / 2) ** -3 is the share above x; exponential has 3 in 10 000 above 8
        assert_probability(sum(one > bound for one in extra), MANY, (1 + bound / 2) ** -3)


def test_a_delay_below_zero_is_zero():
    samples = delays(link(jitter=1.0, distribution="normal"))
    assert min(samples) == 0.0
    assert_probability(samples.count(0.0), MANY, 0.5)


@pytest.mark.parametrize("distribution", ["uniform", "normal", "exponential", "pareto"])
def test_jitter_alone_does_not_reorder(distribution):
    arrivals = [fate[0][0] for fate in fates(link(delay=5.0, jitter=5.0, distribution=distribution), 2000, spacing=0.1)]
    assert arrivals == sorted(arrivals)
    assert all(arrival >= i * 0.1 for i, arrival in enumerate(arrivals))


def test_reordering_skips_the_delay_and_overtakes_what_is_on_the_way():
    one = link(delay=10.0, reorder=0.2)
    found = fates(one)
    skipped = {i for i, fate in enumerate(found) if fate[0][0] == i}
    assert_probability(len(skipped), MANY, 0.2)
    assert {fate[0][0] - i for i, fate in enumerate(found)} == {0.0, 10.0}
    assert one.counts.reordered == sum(any(j not in skipped for j in range(max(0, i - 9), i)) for i in skipped)


def test_with_nothing_on_the_way_nothing_is_overtaken():
    one = link(delay=0.5, reorder=1.0)
    assert [fate[0][0] for fate in fates(one, 10)] == [float(i) for i in range(10)]
    assert one.counts.reordered == 0


# Duplicates, corruption


def test_duplicates_arrive_twice_each_with_a_delay_of_its_own():
    one = link(duplicate=0.3, delay=5.0, jitter=1.0)
    found = fates(one, spacing=100.0)
    twice = [fate for fate in found if len(fate) == 2]
    assert_probability(len(twice), MANY, 0.3)
    assert one.counts.duplicated == len(twice)
    assert one.counts.delivered == MANY + len(twice)
    assert all(first[0] <= second[0] for first, second in twice)
    assert any(first[0] < second[0] for first, second in twice)


def test_corruption_flips_one_bit_any():
    payload = bytes(range(16))
    one = link(corrupt=0.25)
    flips = [0] * 128
    for fate in fates(one, payload=payload):
        difference = int.from_bytes(fate[0][1], "big") ^ int.from_bytes(payload, "big")
        if difference:
            assert difference.bit_count() == 1
            flips[difference.bit_length() - 1] += 1
    assert_probability(sum(flips), MANY, 0.25)
    assert one.counts.corrupted == sum(flips)
    expected = sum(flips) / 128
    chi_squared = sum((flip - expected) ** 2 / expected for flip in flips)
    assert abs(chi_squared - 127) <= SIGMAS * math.sqrt(2 * 127)


def test_there_is_nothing_to_corrupt_in_an_empty_datagram():
    one = link(corrupt=1.0)
    assert one.cross(0.0, b"") == [(0.0, b"")]
    assert one.counts.corrupted == 0


def test_the_copies_of_a_duplicate_are_corrupted_each_by_itself():
    found = fates(link(duplicate=1.0, corrupt=0.5), payload=b"x")
    assert_probability(sum(a[1] == b"x" != b[1] for a, b in found), MANY, 0.25)


# Rate and queue


def test_datagrams_take_the_time_of_their_bits_one_after_the_other():
    one = link(rate=8000.0, queue=1000)
    arrivals = [one.cross(0.0, bytes(72), 28)[0][0] for _ in range(500)]
    assert arrivals == pytest.approx([0.1 * (i + 1) for i in range(500)])


def test_an_idle_transmitter_begins_at_once():
    one = link(rate=8000.0, delay=1.0)
    assert [one.cross(now, bytes(100))[0][0] for now in (0.0, 0.05, 10.0)] == pytest.approx([1.1, 1.2, 11.1])


@pytest.mark.parametrize("queue", [0, 1, 7])
def test_so_many_wait_and_the_next_is_dropped(queue):
    one = link(rate=8000.0, queue=queue)
    assert [bool(one.cross(0.0, bytes(100))) for _ in range(queue + 4)] == [True] * (queue + 1) + [False] * 3
    assert one.counts.queue_full == 3
    assert one.cross(0.0999, bytes(100)) == []
    assert one.cross(0.1001, bytes(100)) != []  # one more has begun to leave
    assert_adds_up(one.counts)


def test_twice_the_rate_loses_half_and_fills_the_queue():
    one = link(rate=8000.0, queue=10)
    found = [one.cross(i * 0.05, bytes(100)) for i in range(1000)]
    assert one.counts.queue_full == pytest.approx(500, abs=12)
    assert max(fate[0][0] - i * 0.05 for i, fate in enumerate(found) if fate) == pytest.approx(1.1, abs=0.051)


def test_what_is_lost_on_the_wire_was_transmitted():
    one = link(rate=8000.0, loss=0.5)
    arrivals = [fate[0][0] for fate in (one.cross(0.0, bytes(100)) for _ in range(50)) if fate]
    assert arrivals != []
    assert all(math.isclose(arrival * 10, round(arrival * 10)) for arrival in arrivals)
    assert len(arrivals) < 50
    assert arrivals[-1] > 0.1 * len(arrivals) + 0.05


# Size


@pytest.mark.parametrize("oversize", ["refuse", "drop"])
def test_what_is_too_large_does_not_arrive(oversize):
    one = link(mtu=1500, oversize=oversize, duplicate=1.0)
    assert len(one.cross(0.0, bytes(1472), 28)) == 2
    assert one.cross(0.0, bytes(1473), 28) == []
    assert (one.counts.oversize, one.counts.fragmented) == (1, 0)
    assert_adds_up(one.counts)


@pytest.mark.parametrize("oversize", ["refuse", "drop", "fragment"])
def test_what_may_be_cut_is_cut(oversize):
    one = link(mtu=1500, oversize=oversize)
    payload = random.Random(0).randbytes(4000)
    assert one.cross(0.0, payload, 28, fragmentable=True) == [(0.0, payload)]
    assert one.counts == LinkCounts(sent=1, delivered=1, fragmented=1)


@pytest.mark.parametrize(
    ("length", "overhead", "mtu", "fragments"),
    [
        (1472, 28, 1500, 1), (1473, 28, 1500, 2), (1480 + 1472, 28, 1500, 2), (1480 + 1473, 28, 1500, 3),
        (65507, 28, 1500, 45), (1452, 48, 1500, 1), (1453, 48, 1500, 2), (1448 + 1444, 48, 1500, 2),
        (1448 + 1445, 48, 1500, 3), (552 + 548, 28, 576, 2), (552 + 549, 28, 576, 3), (1101, 28, 577, 2),
        (1102, 28, 577, 3), (100, 0, 68, 2), (100, 28, 68, 3),
    ],
)  # fmt: skip
def test_loss_takes_part_once_a_fragment(length, overhead, mtu, fragments):
    loss = 0.2
    one = link(mtu=mtu, oversize="fragment", loss=loss)
    arrived = sum(bool(one.cross(0.0, bytes(length), overhead)) for _ in range(2000))
    assert_probability(arrived, 2000, (1 - loss) ** fragments)
    rng = CountingRandom(1)
    Link(LinkSpec(mtu=mtu, oversize="fragment", loss=loss), rng).cross(0.0, bytes(length), overhead)
    assert rng.draws == fragments


def test_the_headers_of_fragments_take_their_time():
    one = link(mtu=1500, oversize="fragment", rate=8.0)
    assert one.cross(0.0, bytes(1480 * 2), 28)[0][0] == 2960 + 8 + 3 * 20
    one = link(mtu=1500, oversize="fragment", rate=8.0)
    assert one.cross(0.0, bytes(2000), 48)[0][0] == 2008 + 2 * 48


# One seed, one fate


EVERYTHING = LinkSpec(
    loss=0.05, burst=Burst(0.05, 0.3, 0.9, 0.01), delay=0.02, jitter=0.01, distribution="normal", reorder=0.1,
    duplicate=0.1, corrupt=0.1, rate=1e6, queue=5, mtu=600, oversize="fragment",
)  # fmt: skip


def traffic(one: Link, count: int = 2000) -> list:
    source = random.Random(99)
    return [one.cross(i * 0.001, source.randbytes(source.randrange(900)), 28) for i in range(count)]


def test_the_same_seed_gives_the_same_fates():
    first, second, other = (Link(EVERYTHING, random.Random(seed)) for seed in (1, 1, 2))
    found = traffic(first)
    assert found == traffic(second)
    assert first.counts == second.counts
    assert found != traffic(other)
    assert all(value > 0 for name, value in asdict(first.counts).items() if name != "oversize")
    assert_adds_up(first.counts)


def test_the_draws_come_in_the_documented_order():
    spec = LinkSpec(
        burst=Burst(0.5, 0.5, 0.5, 0.5), loss=0.1, duplicate=1.0, corrupt=0.5, reorder=0.5, jitter=50.0, mtu=100,
        oversize="fragment",
    )  # fmt: skip
    twin, one = random.Random(6), Link(spec, random.Random(6))
    last, arrived = -math.inf, 0
    for now in range(0, 2000, 10):
        expected = []
        fragments = [[twin.random() for _ in range(3)] for _ in range(2)]  # change of state, loss in that state, loss
        if not any(in_state < 0.5 or by_itself < 0.1 for _, in_state, by_itself in fragments):
            twin.random()  # duplication
            for _ in range(2):
                payload = bytearray(150)
                if twin.random() < 0.5:
                    bit = twin.randrange(1200)
                    payload[bit // 8] ^= 1 << bit % 8
                if twin.random() < 0.5:
                    expected.append((now, bytes(payload)))
                    continue
                last = max(last, now + max(0.0, twin.uniform(-50.0, 50.0)))
                expected.append((last, bytes(payload)))
        assert one.cross(now, bytes(150)) == expected
        arrived += len(expected)
    assert arrived > 20


# Changed while datagrams are on their way


def test_a_shorter_delay_does_not_overtake_what_is_on_the_way():
    one = link(delay=10.0)
    assert one.cross(0.0, b"slow")[0][0] == 10.0
    one.spec = LinkSpec()
    assert [one.cross(now, b"fast")[0][0] for now in (1.0, 9.0, 11.0)] == [10.0, 10.0, 11.0]


def test_another_rate_counts_from_the_next_datagram():
    one = link(rate=8.0, queue=5)
    assert [one.cross(0.0, bytes(10))[0][0] for _ in range(2)] == [10.0, 20.0]
    one.spec = replace(one.spec, rate=80.0)
    assert one.cross(1.0, bytes(10))[0][0] == 21.0
    one.spec = LinkSpec()
    assert one.cross(2.0, bytes(10))[0][0] == 21.0
    assert one.cross(30.0, bytes(10))[0][0] == 30.0
    one.spec = LinkSpec(rate=80.0)
    assert one.cross(30.0, bytes(10))[0][0] == 31.0


def test_a_shorter_queue_lets_those_leave_that_wait():
    one = link(rate=8.0, queue=5)
    assert all(one.cross(0.0, b"x") for _ in range(6))
    one.spec = replace(one.spec, queue=2)
    assert [bool(one.cross(now, b"x")) for now in (0.0, 3.5, 4.5, 4.6)] == [False, False, True, False]


def test_a_burst_that_is_taken_away_is_over():
    one = link(burst=Burst(1.0, 0.0))
    assert one.cross(0.0, b"x") == []
    one.spec = LinkSpec()
    assert one.cross(1.0, b"x") == [(1.0, b"x")]
    one.spec = LinkSpec(burst=Burst(0.0, 0.0))
    assert one.cross(2.0, b"x") == [(2.0, b"x")]


def test_loss_can_be_turned_on_and_off():
    one = link()
    arrived = []
    for spec in (LinkSpec(), LinkSpec(loss=1.0), LinkSpec()):
        one.spec = spec
        arrived.append(bool(one.cross(0.0, b"x")))
    assert arrived == [True, False, True]


# Properties


probabilities = st.floats(0, 1)
bursts = st.builds(Burst, probabilities, probabilities, probabilities, probabilities)
specs = st.builds(
    LinkSpec,
    loss=probabilities,
    burst=st.none() | bursts,
    delay=st.floats(0, LONGEST_DELAY),
    jitter=st.floats(0, LONGEST_DELAY),
    distribution=st.sampled_from(["uniform", "normal", "exponential", "pareto"]),
    reorder=probabilities,
    duplicate=probabilities,
    corrupt=probabilities,
    rate=st.none() | st.floats(1, FASTEST_RATE),
    queue=st.integers(0, 1000),
    mtu=st.none() | st.integers(68, 70_000),
    oversize=st.sampled_from(["refuse", "drop", "fragment"]),
)
datagrams = st.lists(
    st.tuples(st.floats(0, 1), st.binary(max_size=200), st.sampled_from([0, 28, 48]), st.booleans()), max_size=40
)


@given(st.lists(specs, min_size=1, max_size=3), datagrams, st.integers(0, 100))
@example([EVERYTHING], [(0.0, b"", 0, False)] * 3, 1)
def test_every_datagram_is_accounted_for_and_none_arrives_before_it_was_sent(some_specs, sent, seed):
    one = Link(some_specs[0], random.Random(seed))
    now, arrived = 0.0, 0
    for i, (pause, payload, overhead, fragmentable) in enumerate(sent):
        one.spec = some_specs[i % len(some_specs)]
        now += pause
        found = one.cross(now, payload, overhead, fragmentable=fragmentable)
        arrived += len(found)
        for when, arriving in found:
            assert now <= when < math.inf
            assert len(arriving) == len(payload)
            assert sum((a ^ b).bit_count() for a, b in zip(arriving, payload, strict=True)) <= (one.spec.corrupt > 0)
        assert len(one._starts) <= 1000
    assert one.counts.sent == len(sent)
    assert one.counts.delivered == arrived
    assert one.counts.corrupted <= arrived
    assert all(count >= 0 for count in astuple(one.counts))
    assert_adds_up(one.counts)


@given(st.lists(specs, min_size=1, max_size=3), datagrams, st.integers(0, 100))
def test_order_is_kept_where_nothing_says_otherwise(some_specs, sent, seed):
    one = Link(some_specs[0], random.Random(seed))
    now, arrivals = 0.0, []
    for i, (pause, payload, overhead, _) in enumerate(sent):
        one.spec = replace(some_specs[i % len(some_specs)], reorder=0.0)
        now += pause
        arrivals += [when for when, _ in one.cross(now, payload, overhead)]
    assert arrivals == sorted(arrivals)
    assert one.counts.reordered == 0


# As text


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", LinkSpec()),
        (" perfect ", LinkSpec()),
        ("loss=10%", LinkSpec(loss=0.1)),
        ("loss=.1", LinkSpec(loss=0.1)),
        ("loss=1e-3,corrupt=1.5E-1%", LinkSpec(loss=0.001, corrupt=0.0015)),
        ("delay=20ms", LinkSpec(delay=0.02)),
        ("delay=1.5s,jitter=300us", LinkSpec(delay=1.5, jitter=0.0003)),
        ("delay=0.3", LinkSpec(delay=0.3)),
        ("rate=10mbit", LinkSpec(rate=1e7)),
        ("rate=1.5Gbit", LinkSpec(rate=1.5e9)),
        ("rate=64kbit", LinkSpec(rate=64000.0)),
        ("rate=9600 bit", LinkSpec(rate=9600.0)),
        ("rate=9600", LinkSpec(rate=9600.0)),
        ("burst=1%/30%", LinkSpec(burst=Burst(0.01, 0.3))),
        ("burst=1%/30%/0.9", LinkSpec(burst=Burst(0.01, 0.3, 0.9))),
        ("burst=1% / 30% / 90% / 1%", LinkSpec(burst=Burst(0.01, 0.3, 0.9, 0.01))),
        ("mtu=1400 , oversize = DROP", LinkSpec(mtu=1400, oversize="drop")),
        (
            "loss=10%,delay=20ms,jitter=5ms,distribution=normal,rate=10mbit,queue=50,mtu=1400,oversize=drop,burst=1%/30%",
            LinkSpec(
                loss=0.1, delay=0.02, jitter=0.005, distribution="normal", rate=1e7, queue=50, mtu=1400, oversize="drop",
                burst=Burst(0.01, 0.3),
            ),
        ),
    ],
)  # fmt: skip
def test_text_is_read(text, spec):
    assert parse_link(text) == spec


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("loss", "'loss' is not of the form KEY=VALUE"),
        ("loss=", "'loss=' is not of the form KEY=VALUE"),
        ("loss=1%,", "'' is not of the form KEY=VALUE"),
        ("loss=1%,loss=2%", "loss is given twice"),
        ("los=1%", "'los' is unknown; known are loss, burst, delay"),
        ("loss=ten", "loss: 'ten' is not a probability: a number from 0 to 1, or a percentage like 10%"),
        ("loss=5", "loss must be a probability from 0 to 1 (or from 0% to 100%), not 5"),
        ("loss=101%", "loss must be a probability from 0 to 1"),
        ("loss=-1%", "loss: '-1%' is not a probability"),
        ("loss=nan", "loss: 'nan' is not a probability"),
        ("delay=20", None),
        ("delay=20 m", "delay: '20 m' is not a time: a number of seconds, or one with s, ms or us, like 20ms"),
        ("delay=-1ms", "delay: '-1ms' is not a time"),
        ("delay=1e999", "delay must be a time in seconds from 0 to 86400, not inf"),
        ("delay=2e5", "delay must be a time in seconds from 0 to 86400, not 200000.0"),
        ("rate=10mbps", "rate: '10mbps' is not a rate: a number of bits per second, or one with bit, kbit, mbit or gbit"),
        ("rate=0", "rate must be 1 to 1e+15 bits per second, not 0"),
        ("queue=1.5", "queue: '1.5' is not a whole number"),
        ("queue=-1", "queue: '-1' is not a whole number"),
        ("mtu=60", "mtu must be a whole number, at least 68, not 60"),
        ("oversize=ignore", "oversize must be one of refuse, drop, fragment, not 'ignore'"),
        ("distribution=gauss", "distribution must be one of uniform, normal, exponential, pareto, not 'gauss'"),
        ("burst=1%", "burst: '1%' is not a burst: ENTER/LEAVE[/LOSS_IN_BAD[/LOSS_IN_GOOD]]"),
        ("burst=1/1/1/1/1", "burst: '1/1/1/1/1' is not a burst"),
        ("burst=1%/x", "burst: leave: 'x' is not a probability"),
        ("burst=2/1", "burst: enter must be a probability from 0 to 1 (or from 0% to 100%), not 2.0"),
    ],
)
def test_text_that_is_no_link_is_refused_with_a_reason(text, complaint):
    if complaint is None:
        parse_link(text)
        return
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole text is compared
        parse_link(text)
    assert str(refusal.value).startswith(complaint)


@given(st.text(alphabet="loss=delayratquemu,/%.0123456789e-+ ms", max_size=40))
def test_text_is_read_or_refused_with_a_value_error(text):
    with contextlib.suppress(ValueError):
        parse_link(text)


def test_a_mapping_is_read():
    assert link_from_mapping({}) == LinkSpec()
    assert link_from_mapping(
        {"loss": 0.1, "delay": "20ms", "jitter": 0.005, "rate": 10_000_000, "queue": 5, "mtu": "1400"}
    ) == (LinkSpec(loss=0.1, delay=0.02, jitter=0.005, rate=1e7, queue=5, mtu=1400))
    assert link_from_mapping({"burst": "1%/30%"}).burst == Burst(0.01, 0.3)
    assert link_from_mapping({"burst": {"enter": 0.01, "leave": "30%", "loss_in_good": "1%"}}).burst == Burst(
        0.01, 0.3, 1, 0.01
    )


@pytest.mark.parametrize(
    ("mapping", "complaint"),
    [
        (
            {"los": 1},
            "'los' is unknown; known are loss, burst, delay, jitter, distribution, reorder, duplicate, corrupt, rate",
        ),
        ({"loss": True}, "loss: True is not a probability"),
        ({"loss": [1]}, "loss: [1] is not a probability"),
        ({"loss": math.nan}, "loss must be a probability from 0 to 1 (or from 0% to 100%), not nan"),
        ({"delay": 10**400}, "delay must be a time in seconds"),
        ({"queue": 1.5}, "queue: 1.5 is not a whole number"),
        ({"queue": False}, "queue: False is not a whole number"),
        ({"oversize": 3}, "oversize: 3 is not a word"),
        ({"burst": 0.1}, "burst: 0.1 is not a burst"),
        ({"burst": {"enter": 0.1}}, "burst: leave is missing"),
        (
            {"burst": {"enter": 0.1, "exit": 0.1}},
            "burst: 'exit' is unknown; known are enter, leave, loss_in_bad, loss_in_good",
        ),
    ],
)
def test_a_mapping_that_is_no_link_is_refused_with_a_reason(mapping, complaint):
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole text is compared
        link_from_mapping(mapping)
    assert str(refusal.value).startswith(complaint)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *[(name, [-0.1, 1.1, math.nan, "0.1", True, None]) for name in ("loss", "reorder", "duplicate", "corrupt")],
        *[(name, [-1.0, math.nan, math.inf, 1e6, "1s", True, None]) for name in ("delay", "jitter")],
        ("rate", [0, -1.0, 0.5, math.nan, math.inf, "1mbit", True]),
        ("queue", [-1, 1.0, True, None, "5"]),
        ("mtu", [0, 67, 1500.0, True, "1500"]),
        ("oversize", ["", "Drop", None]),
        ("distribution", ["", "Normal", None]),
        ("burst", ["1%/30%", (0.1, 0.1), 0.1]),
    ],
)
def test_what_no_link_can_be_is_refused_by_its_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} must be .*, not {value!r}".replace("(", r"\(").replace(")", r"\)")):
            LinkSpec(**{field: value})


@pytest.mark.parametrize("field", [one.name for one in fields(Burst)])
def test_what_no_burst_can_be_is_refused_by_its_name(field):
    for value in (-0.1, 1.1, math.nan, None, True):
        with pytest.raises(ValueError, match=f"^{field} must be a probability"):
            Burst(**{"enter": 0.1, "leave": 0.1, field: value})


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (LinkSpec(), "perfect"),
        (LinkSpec(queue=5), "queue=5"),
        (LinkSpec(loss=0.07, delay=0.02, jitter=0.0005), "loss=7%,delay=20ms,jitter=500us"),
        (LinkSpec(delay=60, rate=1_500_000), "delay=60s,rate=1.5mbit"),
        (LinkSpec(corrupt=1e-6), "corrupt=0.0001%"),
        (LinkSpec(burst=Burst(0.01, 0.3)), "burst=1%/30%"),
        (LinkSpec(burst=Burst(0.01, 0.3, 0.5)), "burst=1%/30%/50%"),
        (LinkSpec(burst=Burst(0.0, 0.3, 1.0, 0.1)), "burst=0%/30%/100%/10%"),
        (LinkSpec(mtu=1400, oversize="fragment", distribution="pareto"), "distribution=pareto,mtu=1400,oversize=fragment"),
    ],
)
def test_a_link_is_described(spec, text):
    assert describe_link(spec) == text


@given(specs)
@example(LinkSpec(loss=5e-324, delay=5e-324, jitter=0.1 + 0.2, rate=1.1))
@example(EVERYTHING)
def test_what_is_described_is_read_back(spec):
    assert parse_link(describe_link(spec)) == spec
