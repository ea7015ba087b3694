"""Faster, slower or noise: decided on rates made by hand."""

import random
from dataclasses import replace

import pytest
from rich.console import Console

from bench.replay.compare import (
    EXIT_WORSE,
    Change,
    ComparisonError,
    Verdict,
    compare,
    conclusion,
    print_comparison,
    quantity,
    signed,
)
from bench.replay.results import Delivery, Histogram, Latency, Loop, Pacing, Run, Stage, Trace

TRACE = Trace("a.pcap", "0123456789abcdef", 1000, 64000, 1.0, {"64": 1000}, {"IPv4 UDP": 1000}, {})


def run_of(*rates: float, **changes) -> Run:
    run = Run(
        mode="memory",
        command=["pyflannel-dp", "replay", "a.pcap"],
        machine={"cpu": "A CPU"},
        settings={"mtu": 1450},
        trace=TRACE,
        loops=[Loop(1000, 64000, 1000 / rate) if rate else Loop(0, 0, 1.0) for rate in rates],
        delivery=Delivery(5000, 5000),
        pacing=Pacing("as fast as possible"),
    )
    return replace(run, **changes)


def noisy(rate: float, spread: float, seed: int, loops: int = 7) -> Run:
    rng = random.Random(seed)
    return run_of(*(rate * rng.uniform(1 - spread, 1 + spread) for _ in range(loops)))


STEADY = run_of(1000, 1001, 999, 1002, 998)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (run_of(1100, 1101, 1099, 1102, 1098), Verdict.FASTER),
        (run_of(900, 901, 899, 902, 898), Verdict.SLOWER),
        (run_of(1000, 1001, 999, 1002, 998), Verdict.NOISE),
        (run_of(950, 1050, 1000, 900, 1100), Verdict.NOISE),
        (run_of(900, 901, 899, 902), Verdict.UNKNOWN),
    ],
)
def test_the_verdict(after, verdict):
    comparison = compare(STEADY, after)
    assert [one.verdict for one in comparison.changes] == [verdict, verdict]
    assert [one.name for one in comparison.changes] == ["packets", "inner bits"]


def test_the_change_is_of_the_medians_and_lies_within_its_noise():
    change = compare(noisy(1000, 0.05, 1), noisy(800, 0.05, 2)).changes[0]
    assert change.percent == pytest.approx(100 * (change.after / change.before - 1))
    assert -30 < change.noise[0] < change.percent < change.noise[1] < -10


def test_noise_is_the_same_each_time():
    assert compare(noisy(1000, 0.05, 1), noisy(950, 0.05, 2)) == compare(noisy(1000, 0.05, 1), noisy(950, 0.05, 2))


def test_runs_that_differ_in_nothing_are_seldom_told_apart():
    rng = random.Random(1)
    pairs = [[[rng.uniform(900, 1100) for _ in range(7)] for _ in range(2)] for _ in range(100)]
    told = [compare(run_of(*before), run_of(*after)).changes[0].verdict for before, after in pairs]
    assert sum(one is not Verdict.NOISE for one in told) <= 10  # 5 are expected


def test_a_loss_far_beyond_noise_is_always_found():
    for i in range(10):
        assert compare(noisy(1000, 0.05, i), noisy(800, 0.05, 100 + i)).changes[0].verdict is Verdict.SLOWER


@pytest.mark.parametrize(
    ("after", "threshold", "exceeds"),
    [
        (run_of(900, 901, 899, 902, 898), 5, True),
        (run_of(900, 901, 899, 902, 898), 9, True),
        (run_of(900, 901, 899, 902, 898), 11, False),
        (run_of(900, 901, 899, 902, 898), 0, True),
        (run_of(1000, 1001, 999, 1002, 998), 0, False),
        (run_of(1100, 1101, 1099, 1102, 1098), 5, False),
        (run_of(900, 1000, 700, 1100, 880), 5, False),  # 10 % less, but it could be none
        (run_of(500, 500), 5, False),  # nobody knows
        (run_of(0, 0, 0, 0, 0), 5, True),
    ],
)
def test_the_exit_code(after, threshold, exceeds):
    comparison = compare(STEADY, after)
    assert comparison.exceeds(threshold) is exceeds
    assert comparison.exit_code(threshold) == (EXIT_WORSE if exceeds else 0) == (3 if exceeds else 0)
    assert conclusion(comparison, threshold).startswith("worse") is exceeds


def test_a_threshold_is_exceeded_only_at_the_better_end_of_the_noise():
    change = Change("packets", "pps", 1000, 900, (-14.0, -6.0))
    assert change.exceeds(5)
    assert not change.exceeds(6)
    assert not change.exceeds(8)
    assert change.verdict is Verdict.SLOWER


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "tun"}, "the baseline was run in mode memory, this in mode tun"),
        (
            {"trace": replace(TRACE, name="b.pcap", packets=7, fingerprint="f")},
            r"another trace: a\.pcap \(1000 packets, .*b\.pcap",
        ),
        ({"trace": replace(TRACE, inner_bytes=7)}, "another trace"),
        ({"trace": replace(TRACE, fingerprint="f")}, "another trace"),
        ({"pacing": Pacing("as captured")}, "the baseline was sent as fast as possible, this as captured"),
        ({"loops": []}, "this run has no loops"),
    ],
)
def test_what_is_not_the_same_is_not_compared(changes, said):
    with pytest.raises(ComparisonError, match=said):
        compare(STEADY, replace(STEADY, **changes))


def test_a_baseline_of_nothing_is_not_compared_with():
    with pytest.raises(ComparisonError, match="baseline has no loops"):
        compare(run_of(), STEADY)
    with pytest.raises(ComparisonError, match="baseline carried nothing"):
        compare(run_of(1000, 0), STEADY)


def test_the_name_of_a_trace_may_change_and_other_settings_are_told():
    after = replace(
        STEADY, trace=replace(TRACE, name="copy.pcap"), settings={"mtu": 1400, "batch": 32}, machine={"cpu": "B"}
    )
    assert compare(STEADY, after).notes == [
        "another machine: cpu was A CPU, is B",
        "another setting: mtu was 1450, is 1400",
        "another setting: batch was None, is 32",
    ]


def latency(value: int) -> Latency:
    histogram = Histogram()
    histogram.record(value, 10)
    return Latency.of(histogram)


def test_what_was_measured_once_is_shown_without_a_verdict():
    before = replace(STEADY, stages=[Stage("read", 10), Stage("send", 0), Stage("gone", 1)], latency=latency(1000))
    after = replace(STEADY, stages=[Stage("read", 15), Stage("send", 5), Stage("new", 1)], latency=latency(3000))
    singles = {one.name: one for one in compare(before, after).singles}
    assert list(singles) == ["read", "send", *(f"latency {one}" for one in ("p50", "p90", "p99", "p99.9", "max"))]
    assert singles["read"].percent == pytest.approx(50)
    assert singles["send"].percent is None
    assert singles["latency max"].percent == pytest.approx(200)
    assert compare(before, STEADY).singles == []


def test_thousands_of_loops_take_no_time():
    many = run_of(*(1000 + i % 7 for i in range(20_000)))
    assert compare(many, many).changes[0].verdict is Verdict.NOISE


def test_the_comparison_in_words():
    before = replace(STEADY, stages=[Stage("read", 10)], machine={"cpu": "[A]"})
    after = run_of(900, 901, 899, 902, 898, stages=[Stage("read", 15)])
    console = Console(width=100)
    with console.capture() as caught:
        print_comparison(console, compare(before, after), 5)
    said = caught.get()
    for text in ("1 kpps", "900 pps", "-10.0 %", "slower", "+50.0 %", "cpu was [A], is A CPU"):
        assert text in said
    assert "worse than the baseline by more than 5 %, beyond noise" in said


def test_without_a_threshold_nothing_follows():
    console = Console(width=100)
    with console.capture() as caught:
        print_comparison(console, compare(STEADY, STEADY))
    assert "beyond noise" not in caught.get()
    assert "within noise" in caught.get()


def test_too_few_loops_are_told():
    comparison = compare(STEADY, run_of(500, 500))
    assert "noise needs 5 loops in both runs" in conclusion(comparison, 5)
    console = Console(width=120)
    with console.capture() as caught:
        print_comparison(console, comparison, 5)
    assert "unknown: noise needs 5 loops" in caught.get()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 pps"),
        (12.34, "12.3 pps"),
        (999.4, "999 pps"),
        (999.6, "1 kpps"),
        (1234, "1.23 kpps"),
        (999_600, "1 Mpps"),
        (7.89e9, "7.89 Gpps"),
        (123e9, "123 Gpps"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert quantity(value, "pps") == text


def test_changes_have_their_sign():
    assert [signed(one) for one in (1.23, -4, 0.0, None)] == ["+1.2 %", "-4.0 %", "+0.0 %", ""]
