"""Two nodes under full mixed load for as long as wanted, watched: does memory grow, do descriptors leak, do counters hold?

Theory of operation: iperf3 drives TCP in both directions, 64-byte UDP one way and 1400-byte UDP the other, all at once,
each as fast as it can; one that gives up (its own control connection shares the overloaded path) is started again. Every
few seconds a *sample* is taken of each daemon: resident memory and descriptors from /proc, CPU time, and the counters that
``status`` tells. At the end `judge` looks at the samples alone, so it can be tested without any traffic:

* received packets equal the sum of their verdicts, both ways, in every sample; no counter ever goes backwards;
* packets move: in no direction does nothing come for `_STILL_SAMPLES` samples;
* memory stayed flat: the median of the last quarter of the samples is at most `GROWTH_MEBIBYTES` above that of the second
  quarter (the first one is warming up: buffers are touched for the first time);
* there are not more descriptors in the last quarter than in the second.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.processes import cpu_time, descriptors, resident_mebibytes, tree
from bench.throughput.contenders import ContenderError, ourselves, run_dir
from bench.throughput.hosts import End, two_hosts
from dataplane.control import ControlError, ask
from dataplane.lab import Lab, LabError, missing

GROWTH_MEBIBYTES = 1.0
_LEAST_SAMPLES = 8
"""Two in each quarter."""

_STILL_SAMPLES = 3
"""An overloaded path may starve TCP for a while."""

_ROWS = 24
_GAUGES = frozenset({"pid", "uptime_seconds", "vni", "port", "mtu", "expiration"})
_LOADS: dict[int, tuple[str, ...]] = {
    5301: ("--bidir",),
    5302: ("-u", "-b", "0", "-l", "1400", "-R"),
    5303: ("-u", "-b", "0", "-l", "64"),
}
"""Options of the iperf3 clients by the port that each has for itself; the one that crowds out the others comes last."""

_HEAD_START_SECONDS = 0.3
_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True)
class Sample:
    """One look at one daemon. `counters` holds every counter of ``status`` by its path, like ``inbound.received``."""

    seconds: float
    resident_mebibytes: float
    descriptors: int
    cpu_seconds: float
    counters: dict[str, int] = field(default_factory=dict)


def counters(status: dict[str, Any]) -> dict[str, int]:
    """Every counter in an answer of ``status``, by its path."""
    return dict(_walk(status, ""))


def _walk(part: dict[str, Any], path: str) -> Iterator[tuple[str, int]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{path}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and name not in _GAUGES:
            yield path + name, value


def judge(name: str, samples: Sequence[Sample]) -> list[str]:
    """What is wrong with the daemon `name`, in order of time; empty if nothing is."""
    if len(samples) < _LEAST_SAMPLES:
        return [f"{name}: only {len(samples)} samples, at least {_LEAST_SAMPLES} are needed to tell anything"]
    faults = [fault for sample in samples for fault in _sums(sample)]
    for before, after in itertools.pairwise(samples):
        faults += _backwards(before, after)
    for before, after in zip(samples, samples[_STILL_SAMPLES:], strict=False):
        faults += _standing_still(before, after)
    growth = memory_growth(samples)
    if growth > GROWTH_MEBIBYTES:
        faults.append(f"memory grew by {growth:.2f} MiB from the second to the last quarter ({GROWTH_MEBIBYTES} allowed)")
    early, late = (int(median([one.descriptors for one in quarter])) for quarter in _quarters(samples))
    if late > early:
        faults.append(f"descriptors leak: {early} in the second quarter, {late} in the last")
    return [f"{name}: {fault}" for fault in faults]


def memory_growth(samples: Sequence[Sample]) -> float:
    """MiB from the median of the second quarter of the samples to that of the last."""
    early, late = (median([one.resident_mebibytes for one in quarter]) for quarter in _quarters(samples))
    return late - early


def _quarters(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The second and the last."""
    quarter = len(samples) // 4
    return samples[quarter : 2 * quarter], samples[-quarter:]


def _sums(sample: Sample) -> list[str]:
    faults = []
    for way in ("outbound", "inbound"):
        received = sample.counters[f"{way}.received"]
        judged = sum(count for path, count in sample.counters.items() if path.startswith(f"{way}.verdicts."))
        if received != judged:
            faults.append(f"{sample.seconds:.0f} s: {way} {received} received, but {judged} verdicts")
    return faults


def _backwards(before: Sample, after: Sample) -> list[str]:
    return [
        f"{after.seconds:.0f} s: {path} went from {count} to {after.counters.get(path, 0)}"
        for path, count in before.counters.items()
        if after.counters.get(path, 0) < count
    ]


def _standing_still(before: Sample, after: Sample) -> list[str]:
    return [
        f"{after.seconds:.0f} s: nothing {way} since {before.seconds:.0f} s"
        for way in ("outbound", "inbound")
        if after.counters[f"{way}.received"] == before.counters[f"{way}.received"]
    ]


class Load:
    """The iperf3 pairs from `first` to `second`. `restarts` counts the clients that gave up and were started again."""

    def __init__(self, first: End, second: End, seconds: float) -> None:
        self._first, self._second = first, second
        self._end = time.monotonic() + seconds
        self._running: dict[int, tuple[subprocess.Popen[str], subprocess.Popen[str]]] = {}
        self.restarts = 0

    def start(self) -> None:
        """Start all that do not run, until the time is over."""
        for port, options in _LOADS.items():
            self._look_after(port, options)

    keep_up = start

    def _look_after(self, port: int, options: Sequence[str]) -> None:
        running = self._running.get(port)
        remaining = self._end - time.monotonic()
        if remaining < 1 or (running is not None and running[1].poll() is None):
            return
        if running is not None:
            self.restarts += 1
            self._end_pair(running)
        common = ["-p", str(port), "-i", "0"]
        server = self._second.namespace.popen(
            ["iperf3", "-s", "-B", str(self._second.overlay), *common], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while f":{port} " not in self._second.namespace.run(["ss", "-Hltn"]).stdout and server.poll() is None:
            time.sleep(0.02)
        client = self._first.namespace.popen(
            ["iperf3", "-c", str(self._second.overlay), "-t", str(int(remaining) + 1), *common, *options],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._running[port] = (server, client)
        time.sleep(_HEAD_START_SECONDS)

    def stop(self) -> None:
        """End them all."""
        for pair in self._running.values():
            self._end_pair(pair)
        self._running.clear()

    def _end_pair(self, pair: tuple[subprocess.Popen[str], subprocess.Popen[str]]) -> None:
        for process in pair:
            process.kill()
            process.wait()
            self._first.namespace.lab.processes.remove(process)


@dataclass
class Soaked:
    """What came of it: the samples by the daemon's name, and what is wrong."""

    samples: dict[str, list[Sample]]
    faults: list[str]
    restarts: int = 0


def soak_for(seconds: float, interval: float, progress: Callable[[str], None] = lambda _: None) -> Soaked:
    """Load two nodes for `seconds`, looking at them every `interval`. Raises LabError and ContenderError."""
    samples: dict[str, list[Sample]] = {"node 1": [], "node 2": []}
    lost: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-soak-") as text, Lab("soak") as lab:
        folder = Path(text)
        ends = two_hosts(lab)
        ourselves("soak").connect(*ends, folder)
        load = Load(*ends, seconds + _INTERVAL_SECONDS)
        load.start()
        started = time.monotonic()
        number = 0
        while not lost and (number := number + 1) * interval <= seconds + 0.001:
            time.sleep(max(0.0, started + number * interval - time.monotonic()))
            for end, (name, taken) in zip(ends, samples.items(), strict=True):
                try:
                    taken.append(_sample(end, run_dir(folder, end), time.monotonic() - started))
                except ControlError as error:
                    lost.append(f"{name}: {error}\n{(folder / f'log{end.number}').read_text(encoding='utf-8').strip()}")
            load.keep_up()
            progress(f"{number * interval:.0f} of {seconds:.0f} s")
        load.stop()
    return Soaked(
        samples, lost or [fault for name, taken in samples.items() for fault in judge(name, taken)], load.restarts
    )


def _sample(end: End, folder: Path, seconds: float) -> Sample:
    process = tree(end.processes)[0]
    open_now = descriptors(process)  # before the question, which opens one
    answer = ask(folder, "status")
    if answer["pid"] != process:
        raise ControlError(f"process {answer['pid']} answers, not {process}")
    return Sample(seconds, resident_mebibytes(process), open_now, cpu_time(process).seconds, counters(answer))


def _print(console: Console, soaked: Soaked) -> None:
    """A table a daemon, of at most `_ROWS` samples, evenly spread."""
    for name, samples in soaked.samples.items():
        table = Table(
            "seconds", "resident MiB", "descriptors", "CPU %", "outbound kpps", "inbound kpps", "not forwarded",
            "queue drops", "socket drops", title=name,
        )  # fmt: skip
        shown = samples[:: max(1, -(-len(samples) // _ROWS))]
        if samples and shown[-1] is not samples[-1]:
            shown.append(samples[-1])
        nothing = Sample(0.0, 0.0, 0, 0.0)
        for before, sample in zip([nothing, *shown], shown, strict=False):
            table.add_row(*_row(before, sample))
        console.print(table)


def _row(before: Sample, sample: Sample) -> list[str]:
    """CPU and rates are those since `before`; the other counters since the start."""
    since = sample.seconds - before.seconds

    def rate(path: str) -> str:
        return f"{(sample.counters[path] - before.counters.get(path, 0)) / since / 1e3:.1f}"

    received = sum(sample.counters[f"{way}.received"] for way in ("outbound", "inbound"))
    forwarded = sum(sample.counters[f"{way}.verdicts.forwarded"] for way in ("outbound", "inbound"))
    return [
        f"{sample.seconds:.0f}",
        f"{sample.resident_mebibytes:.2f}",
        str(sample.descriptors),
        f"{100 * (sample.cpu_seconds - before.cpu_seconds) / since:.0f}",
        rate("outbound.received"),
        rate("inbound.received"),
        str(received - forwarded),
        str(sample.counters.get("device.queue_drops", "")),
        str(sample.counters.get("socket_drops", "")),
    ]


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.05), default=10.0, show_default=True, help="How long; may be a part."
)
@click.option("--interval", type=click.FloatRange(min=0.2), default=_INTERVAL_SECONDS, show_default=True,
              help="Seconds between samples; shorter in a run that would have fewer than 8.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write every sample there.")
def soak(minutes: float, interval: float, json_path: Path | None) -> None:
    """Two nodes under full mixed load: memory, descriptors and counters, watched. Exit code 1 if something is wrong."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    seconds = minutes * 60

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{text} ", err=True, nl=False)

    try:
        soaked = soak_for(seconds, min(interval, seconds / _LEAST_SAMPLES), progress)
    except (LabError, ContenderError) as error:
        raise click.ClickException(str(error)) from None
    if json_path is not None:
        content = {name: [asdict(one) for one in samples] for name, samples in soaked.samples.items()}
        json_path.write_text(json.dumps({"faults": soaked.faults, "samples": content}, indent=1), encoding="utf-8")
    _print(console, soaked)
    for name, samples in soaked.samples.items():
        if len(samples) >= _LEAST_SAMPLES:
            console.print(
                f"{name}: memory {memory_growth(samples):+.2f} MiB from the second to the last quarter, "
                f"{samples[-1].descriptors} descriptors"
            )
    console.print(f"iperf3 gave up and was started again {soaked.restarts} times; {os.cpu_count()} cores")
    for fault in soaked.faults:
        console.print(f"[red]{escape(fault)}")
    if soaked.faults:
        sys.exit(1)
    console.print("memory is flat, no descriptor leaks, every packet has its verdict")
