"""What is measured: iperf3 and ping between the overlay addresses, and what the daemons used meanwhile.

Each measure returns numbers whose names end in their unit, the one that counts first. CPU time and memory are those of the
contender's processes and their children.
"""

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.processes import cpu_time, resident_mebibytes, tree
from bench.throughput.hosts import End

Numbers = dict[str, float]
"""The first number is the one that contenders are compared by."""

_PORT = 5201


class MeasureError(Exception):
    """iperf3 or ping failed; the text holds what it said."""


def tcp(first: End, second: End, seconds: float, *options: str) -> Numbers:
    """TCP throughput at the receivers, retransmits, and the daemons' CPU time per gigabyte."""
    before = [_cpu_seconds(end) for end in (first, second)]
    report = iperf3(first, second, seconds, *options)
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
    """UDP datagrams of `length` bytes of payload, offered as fast as iperf3 can, which is more than most paths carry.

    The sockets get the largest buffers that the machine allows. With the usual 208 KiB, which some 270 small datagrams
    fill, what is measured behind a path that delivers in bursts is how soon the receiving iperf3 gets a processor.
    """
    before = [_cpu_seconds(end) for end in (first, second)]
    total = iperf3(first, second, seconds, "-u", "-b", "0", "-l", str(length), "-w", str(_socket_buffer()))["end"]["sum"]
    used = [_cpu_seconds(end) - then for end, then in zip((first, second), before, strict=True)]
    offered, lost = total["packets"], total["lost_packets"]
    numbers = {
        "delivered_kilopackets_per_second": (offered - lost) / total["seconds"] / 1e3,
        "lost_percent": 100.0 * lost / max(offered, 1),
        "offered_kilopackets_per_second": offered / total["seconds"] / 1e3,
    }
    if first.processes and offered > lost:
        for name, seconds_used in zip(("sender", "receiver"), used, strict=True):
            numbers[f"{name}_cpu_microseconds_per_packet_delivered"] = seconds_used * 1e6 / (offered - lost)
    return numbers


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


def iperf3(first: End, second: End, seconds: float, *options: str) -> Any:
    """The report of an iperf3 client at `first` whose server is at `second`. Raises MeasureError."""
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


def _socket_buffer() -> int:
    """Bytes: at most 4 MiB, and what iperf3 may have on both ends."""
    limits = [int(Path(f"/proc/sys/net/core/{name}").read_text(encoding="ascii")) for name in ("rmem_max", "wmem_max")]
    return min(4 << 20, *limits)


def _cpu_seconds(end: End) -> float:
    """What the contender's processes have used so far."""
    return sum(cpu_time(process).seconds for process in tree(end.processes))


def _memory_mebibytes(end: End) -> float:
    return sum(resident_mebibytes(process) for process in tree(end.processes))


def _wait_for_listener(end: End) -> None:
    for _ in range(500):
        if f":{_PORT}" in end.namespace.run(["ss", "-Hltn"]).stdout:
            return
        time.sleep(0.01)
    raise MeasureError("the iperf3 server does not come up")
