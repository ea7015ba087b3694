"""From rounds of numbers to a table: medians, spread, and ratios to the first contender."""

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


def medians(rounds: Rounds) -> dict[str, dict[str, dict[str, float]]]:
    """The median of each number over the rounds."""
    return {
        contender: {
            measure: {name: median([one[name] for one in results if name in one]) for name in results[0]}
            for measure, results in measures.items()
            if results
        }
        for contender, measures in rounds.items()
    }


def print_tables(console: Console, rounds: Rounds) -> None:
    """One table a measure; the first column of numbers with its ratio to the first contender and its spread."""
    middle = medians(rounds)
    measures = list(dict.fromkeys(measure for one in rounds.values() for measure in one))
    for measure in measures:
        names = list(dict.fromkeys(name for one in middle.values() for name in one.get(measure, {})))
        table = Table("", f"ratio to {next(iter(rounds))}", *(name.replace("_", " ") for name in names), title=measure)
        base = next(iter(middle.values())).get(measure, {})
        for contender, numbers in middle.items():
            if measure not in numbers:
                continue
            own = numbers[measure]
            ratio = f"{own[names[0]] / base[names[0]]:.2f}" if base.get(names[0]) else ""
            cells = [_cell(name, own, [one for one in rounds[contender][measure] if name in one]) for name in names]
            table.add_row(contender, ratio, *cells)
        console.print(table)


def _cell(name: str, own: Mapping[str, float], rounds: Sequence[Mapping[str, float]]) -> str:
    if name not in own:
        return ""
    low, high = min(one[name] for one in rounds), max(one[name] for one in rounds)
    return f"{own[name]:.3g}" if low == high else f"{own[name]:.3g}  ({low:.3g} … {high:.3g})"


def write_json(path: Path, rounds: Rounds, command: Sequence[str]) -> None:
    """Machine, command, medians and every round."""
    content = {"machine": machine(), "command": list(command), "medians": medians(rounds), "rounds": rounds}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
