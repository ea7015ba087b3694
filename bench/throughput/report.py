"""From rounds of numbers to tables: medians, spread, and ratios to the first contender."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

Rounds = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""contender → measure → one mapping of numbers a round."""

_LESS_IS_BETTER = ("milliseconds", "retransmits", "percent", "cpu_", "mebibytes")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
         if line.startswith("model name")),
        platform.machine(),
    )  # fmt: skip
    return {
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "cpu": cpu,
        "cores": os.cpu_count(),
    }


def measures(rounds: Rounds) -> list[str]:
    """Every measure once, in the order in which they were taken."""
    return list(dict.fromkeys(measure for one in rounds.values() for measure, results in one.items() if results))


def numbers(rounds: Rounds, measure: str) -> list[str]:
    """The names of the numbers of `measure`, the one that counts first; not every contender has all."""
    results = [one for contender in rounds.values() for one in contender.get(measure, ())]
    return list(dict.fromkeys(name for one in results for name in one))


def less_is_better(name: str) -> bool:
    """Whether a smaller number of this name is the better one."""
    return any(part in name for part in _LESS_IS_BETTER)


def medians(rounds: Rounds) -> dict[str, dict[str, dict[str, float]]]:
    """The median of each number over the rounds."""
    return {
        contender: {
            measure: {
                name: median([one[name] for one in results if name in one])
                for name in dict.fromkeys(name for one in results for name in one)
            }
            for measure, results in measures.items()
            if results
        }
        for contender, measures in rounds.items()
    }


def spread(rounds: Rounds, contender: str, measure: str, name: str) -> tuple[float, float] | None:
    """The least and the greatest value of a number, or None if the contender has none."""
    values = [one[name] for one in rounds[contender].get(measure, ()) if name in one]
    return (min(values), max(values)) if values else None


def ratios(rounds: Rounds) -> dict[str, dict[str, float]]:
    """By measure and contender: its median of the number that counts, divided by that of the first contender.

    Empty for a measure that the first contender lacks or has a zero in.
    """
    middle = medians(rounds)
    first = next(iter(middle.values()), {})
    found: dict[str, dict[str, float]] = {}
    for measure in measures(rounds):
        counts = numbers(rounds, measure)[0]
        base = first.get(measure, {}).get(counts)
        found[measure] = {
            contender: one[measure][counts] / base
            for contender, one in middle.items()
            if base and counts in one.get(measure, {})
        }
    return found


def readable(name: str) -> str:
    """The name of a number, for people."""
    return name.replace("_", " ")


def print_tables(console: Console, rounds: Rounds) -> None:
    """One table a measure; the first column of numbers with its ratio to the first contender, and the spread of each."""
    of_measure = ratios(rounds)
    for measure in measures(rounds):
        names = numbers(rounds, measure)
        table = Table("", f"ratio to {next(iter(rounds))}", *(readable(name) for name in names), title=measure)
        for contender, results in rounds.items():
            if results.get(measure):
                ratio = of_measure[measure].get(contender)
                cells = [cell(rounds, contender, measure, name) for name in names]
                table.add_row(contender, "" if ratio is None else f"{ratio:.2f}", *cells)
        console.print(table)


def cell(rounds: Rounds, contender: str, measure: str, name: str) -> str:
    """Median and spread of one number, or nothing."""
    ends = spread(rounds, contender, measure, name)
    if ends is None:
        return ""
    low, high = ends
    middle = median([one[name] for one in rounds[contender][measure] if name in one])
    return figure(middle) if low == high else f"{figure(middle)}  ({figure(low)} … {figure(high)})"


def figure(value: float) -> str:
    """Three digits that count, and never an exponent above 1."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write_json(path: Path, rounds: Rounds, command: Sequence[str]) -> None:
    """Machine, command, medians, ratios and every round."""
    content = {
        "machine": machine(),
        "command": list(command),
        "ratios": ratios(rounds),
        "medians": medians(rounds),
        "rounds": rounds,
    }
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
