"""What is measured: iperf3 and ping between the overlay addresses, and what the daemons used meanwhile.

Each measure returns numbers whose names end in their unit. CPU time and memory are read from /proc for the contender's
processes and their children.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.throughput.hosts import End

Numbers = dict[str, float]
_PORT = 5201
_TICKS = os.sysconf("SC_CLK_TCK")


class MeasureError(Exception):
    """iperf3 or ping failed; the text holds what it said."""


def tcp(first: End, second: End, seconds: float, *options: str) -> Numbers:
    """TCP throughput at the receivers, retransmits, and the daemons' CPU time per gigabyte."""
    before = [_cpu_seconds(end) for end in (first, second)]
    report = _iperf3(first, second, seconds, *options)
    used = [_cpu_seconds(end) - then for end, then in zip((first, second), before, strict=True)]
    sums = [report["end"]["sum_received"], report["end"].get("sum_received_bidir_reverse")]
    received = sum(one["bytes"] for one in sums if one)
    numbers = {
        "gigabits_per_second": sum(one["bits_per_second"] for one in sums if one) / 1e9,
        "retransmits": float(report["end"]["sum_sent"].get("retransmits") or 0),
    }
    if first.processes and received:
        for name, seconds_used in zip(("sender", "receiver"), used, strict=True):
            numbers[f"{name}_cpu_seconds_per_gigabyte"] = seconds_used / (received / 1e9)
        numbers["memory_mebibytes"] = max(_memory_mebibytes(end) for end in (first, second))
    return numbers


def udp(first: End, second: End, seconds: float, length: int) -> Numbers:
    """UDP datagrams of `length` bytes of payload, offered as fast as iperf3 can."""
    report = _iperf3(first, second, seconds, "-u", "-b", "0", "-l", str(length))
    total = report["end"]["sum"]
    offered, lost = total["packets"], total["lost_packets"]
    return {
        "offered_kilopackets_per_second": offered / total["seconds"] / 1e3,
        "delivered_kilopackets_per_second": (offered - lost) / total["seconds"] / 1e3,
        "lost_percent": 100.0 * lost / max(offered, 1),
    }


def idle_rtt(first: End, second: End, count: int) -> Numbers:
    """Round trips on an idle path, one every 5 ms."""
    done = first.namespace.run(["ping", "-n", "-i", "0.005", "-c", str(count), str(second.overlay)])
    times = sorted(float(text) for text in re.findall(r"time=([\d.]+)", done.stdout))
    if not times:
        raise MeasureError(done.stdout + done.stderr)
    return {
        "median_milliseconds": times[len(times) // 2],
        "p99_milliseconds": times[min(len(times) - 1, int(len(times) * 0.99))],
    }


def _iperf3(first: End, second: End, seconds: float, *options: str) -> Any:
    server = second.namespace.popen(
        ["iperf3", "-s", "-1", "-B", str(second.overlay), "-p", str(_PORT)], stdout=subprocess.DEVNULL
    )
    try:
        _wait_for_listener(second)
        command = ["iperf3", "-c", str(second.overlay), "-p", str(_PORT), "-t", str(seconds), "-J", *options]
        done = first.namespace.run(command, timeout=seconds + 30)
        report = json.loads(done.stdout)
        if done.returncode or "error" in report:
            raise MeasureError(report.get("error", done.stderr))
        return report
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise MeasureError(f"iperf3: {error}") from None
    finally:
        server.kill()
        server.wait()


def _wait_for_listener(end: End) -> None:
    for _ in range(500):
        if f":{_PORT}" in end.namespace.run(["ss", "-Hltn"]).stdout:
            return
        time.sleep(0.01)
    raise MeasureError("the iperf3 server does not come up")


def _tree(end: End) -> list[int]:
    """The contender's processes with all their descendants."""
    found = list(end.processes)
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found


def _read(end: End, name: str, extract: Callable[[str], float]) -> float:
    total = 0.0
    for process in _tree(end):
        try:
            total += extract(Path(f"/proc/{process}/{name}").read_text(encoding="ascii"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _cpu_seconds(end: End) -> float:
    """User and system time (proc(5), fields 14 and 15 of stat, counted behind the command's closing bracket)."""
    return _read(end, "stat", lambda text: sum(map(int, text.rpartition(")")[2].split()[11:13])) / _TICKS)


def _memory_mebibytes(end: End) -> float:
    """Resident set size."""

    def extract(text: str) -> float:
        found = re.search(r"^VmRSS:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0

    return _read(end, "status", extract)
