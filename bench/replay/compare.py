"""Two runs of the same: is this one faster or slower than the one before, or is it noise?

Theory of operation. Each run repeated its capture in loops; the rate of a run is the median of its loops, and how far that
can be trusted is asked of the loops themselves by the bootstrap: both runs' loops are drawn again with repetition many
times, and the middle 95 % of the changes between the two medians are the noise. A change is one only if that interval is
all on one side of zero. Runs that differ in nothing are then told apart once in 20 times with 5 loops each and more, but
once in 10 with 3 (measured on normal and on skewed rates); hence `LEAST_LOOPS`, below which there is no verdict.

The loops of one run share what changes from run to run (where memory lies, what else the machine does), so the noise told
is the least there is; a threshold must leave room for the rest.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.replay.results import Run, Scalar, Trace

EXIT_WORSE = 3
"""The exit code of a run that is worse than its threshold allows."""

LEAST_LOOPS = 5
_RESAMPLES = 2000
_DRAWS = 2_000_000
"""Of single loops, at most: with thousands of loops fewer resamples tell as much."""

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class ComparisonError(Exception):
    """The two runs are not of the same; the text says in what they differ."""


class Verdict(StrEnum):
    """What a change is."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "within noise"
    UNKNOWN = f"unknown: noise needs {LEAST_LOOPS} loops"


@dataclass(frozen=True)
class Change:
    """One rate, before and after, in `unit`; `noise` is the 95 % interval of the change, in percent."""

    name: str
    unit: str
    before: float
    after: float
    noise: tuple[float, float] | None

    @property
    def percent(self) -> float:
        """The change; below zero is slower."""
        return 100 * (self.after / self.before - 1)

    @property
    def verdict(self) -> Verdict:
        """Whether it is more than noise."""
        if self.noise is None:
            return Verdict.UNKNOWN
        low, high = self.noise
        if low > 0:
            return Verdict.FASTER
        return Verdict.SLOWER if high < 0 else Verdict.NOISE

    def exceeds(self, threshold_percent: float) -> bool:
        """Whether it is slower by more than the threshold even at the better end of the noise."""
        return self.noise is not None and self.noise[1] < -threshold_percent


@dataclass(frozen=True)
class Single:
    """A number that each run has once, so that nothing is known of its noise: a stage's time or a latency."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def percent(self) -> float | None:
        """The change; None from zero."""
        return 100 * (self.after / self.before - 1) if self.before else None


@dataclass(frozen=True)
class Comparison:
    """The main rate comes first in `changes`; `notes` tell what else differs between the runs."""

    changes: list[Change]
    singles: list[Single]
    notes: list[str]

    def exceeds(self, threshold_percent: float) -> bool:
        """Whether the main rate is worse by more than the threshold, beyond noise."""
        return self.changes[0].exceeds(threshold_percent)

    def exit_code(self, threshold_percent: float) -> int:
        """`EXIT_WORSE` or 0."""
        return EXIT_WORSE if self.exceeds(threshold_percent) else 0


def compare(baseline: Run, run: Run, seed: int = 0) -> Comparison:
    """The changes from `baseline` to `run`; `seed` is the bootstrap's. Raises ComparisonError."""
    _refuse_others(baseline, run)
    changes = [
        _change("packets", "pps", baseline.packet_rates, run.packet_rates, seed),
        _change("inner bits", "bit/s", baseline.bit_rates, run.bit_rates, seed),
    ]
    notes = _differences("machine", baseline.machine, run.machine) + _differences(
        "setting", baseline.settings, run.settings
    )
    return Comparison(changes, [*_stages(baseline, run), *_latencies(baseline, run)], notes)


def _refuse_others(baseline: Run, run: Run) -> None:
    if baseline.mode != run.mode:
        raise ComparisonError(f"the baseline was run in mode {baseline.mode}, this in mode {run.mode}")
    before, now = baseline.trace, run.trace
    if (before.fingerprint, before.packets, before.inner_bytes) != (now.fingerprint, now.packets, now.inner_bytes):
        raise ComparisonError(f"the baseline replayed another trace: {_identity(before)}, and not {_identity(now)}")
    if baseline.pacing.pace != run.pacing.pace:
        raise ComparisonError(f"the baseline was sent {baseline.pacing.pace}, this {run.pacing.pace}")
    for name, one in (("the baseline", baseline), ("this run", run)):
        if not one.loops:
            raise ComparisonError(f"{name} has no loops")
    if not all(baseline.packet_rates):
        raise ComparisonError("a loop of the baseline carried nothing, so there is nothing to compare with")


def _identity(trace: Trace) -> str:
    return f"{trace.name} ({trace.packets} packets, {trace.inner_bytes} bytes, fingerprint {trace.fingerprint})"


def _change(name: str, unit: str, before: Sequence[float], after: Sequence[float], seed: int) -> Change:
    return Change(name, unit, median(before), median(after), _noise(before, after, random.Random(seed)))


def _noise(before: Sequence[float], after: Sequence[float], rng: random.Random) -> tuple[float, float] | None:
    """The middle 95 % of the bootstrapped changes in percent, or None with too few loops."""
    if min(len(before), len(after)) < LEAST_LOOPS:
        return None
    count = max(min(_RESAMPLES, _DRAWS // (len(before) + len(after))), 200)
    changes = sorted(
        100 * (median(rng.choices(after, k=len(after))) / median(rng.choices(before, k=len(before))) - 1)
        for _ in range(count)
    )
    outside = round(count * 0.025)
    return changes[outside], changes[-1 - outside]


def _stages(baseline: Run, run: Run) -> Iterator[Single]:
    """Of the stages that both have."""
    before = {one.name: one.ns_per_packet for one in baseline.stages}
    for one in run.stages:
        if one.name in before:
            yield Single(one.name, "ns/packet", before[one.name], one.ns_per_packet)


def _latencies(baseline: Run, run: Run) -> Iterator[Single]:
    if baseline.latency is not None and run.latency is not None:
        before = baseline.latency.percentiles()
        for name, value in run.latency.percentiles().items():
            yield Single(f"latency {name}", "µs", before[name], value)


def _differences(what: str, before: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> list[str]:
    return [
        f"another {what}: {key} was {before.get(key)}, is {now.get(key)}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]


def quantity(value: float, unit: str) -> str:
    """Three digits that count, with a prefix above 1000."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:  # 999.6 would be rounded to 1000
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def signed(percent: float | None) -> str:
    """A change for people."""
    return "" if percent is None else f"{percent:+.1f} %"


def change_rows(comparison: Comparison) -> list[list[str]]:
    """Rate, before, now, change, noise and verdict of each rate, for a table."""
    return [
        [
            one.name,
            quantity(one.before, one.unit),
            quantity(one.after, one.unit),
            signed(one.percent),
            f"{signed(one.noise[0])} … {signed(one.noise[1])}" if one.noise else "",
            one.verdict.value,
        ]
        for one in comparison.changes
    ]


def single_rows(comparison: Comparison) -> list[list[str]]:
    """Name, before, now and change of each number without noise, for a table."""
    return [
        [one.name, f"{one.before:.3g} {one.unit}", f"{one.after:.3g} {one.unit}", signed(one.percent)]
        for one in comparison.singles
    ]


def conclusion(comparison: Comparison, threshold_percent: float) -> str:
    """What the exit code says, in words."""
    if comparison.exceeds(threshold_percent):
        return f"worse than the baseline by more than {threshold_percent:g} %, beyond noise"
    if comparison.changes[0].verdict is Verdict.UNKNOWN:
        return f"not judged against the threshold of {threshold_percent:g} %: noise needs {LEAST_LOOPS} loops in both runs"
    return f"not worse than the baseline by more than {threshold_percent:g} %, beyond noise"


def print_comparison(console: Console, comparison: Comparison, threshold_percent: float | None = None) -> None:
    """The changes, what they are worth, and what follows from the threshold, if there is one."""
    colours = {Verdict.FASTER: "green", Verdict.SLOWER: "red", Verdict.NOISE: "dim", Verdict.UNKNOWN: "yellow"}
    table = Table("rate", "baseline", "now", "change", "noise (95 %)", "verdict", title="Compared with the baseline")
    for one, row in zip(comparison.changes, change_rows(comparison), strict=True):
        table.add_row(*row, style=colours[one.verdict])
    console.print(table)
    if comparison.singles:
        table = Table("measured once", "baseline", "now", "change", style="dim")
        for row in single_rows(comparison):
            table.add_row(*map(escape, row))
        console.print(table)
    for note in comparison.notes:
        console.print(f"[yellow]{escape(note)}")
    if threshold_percent is not None:
        colour = "bold red" if comparison.exceeds(threshold_percent) else "default"
        console.print(f"[{colour}]{conclusion(comparison, threshold_percent)}")
