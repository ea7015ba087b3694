"""What the kernel tells of running processes, read from /proc (proc(5)); one that has ended counts as nothing."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ENDED = (FileNotFoundError, ProcessLookupError)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """CPU time used so far, in seconds."""

    user: float = 0.0
    system: float = 0.0

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.user + self.system

    def __add__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.user + other.user, self.system + other.system)

    def __sub__(self, other: "CpuTime") -> "CpuTime":
        return CpuTime(self.user - other.user, self.system - other.system)


def children(process: int) -> list[int]:
    """The processes that `process` has started and that still run."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(*_ENDED):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found


def tree(processes: Sequence[int]) -> list[int]:
    """`processes` with all their descendants."""
    found = list(processes)
    for process in found:
        found += children(process)
    return found


def cpu_time(process: int) -> CpuTime:
    """Fields 14 and 15 of stat, counted behind the command's closing bracket."""
    with contextlib.suppress(*_ENDED):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return CpuTime(int(fields[11]) / _TICKS, int(fields[12]) / _TICKS)
    return CpuTime()


def resident_mebibytes(process: int) -> float:
    """Resident set size."""
    with contextlib.suppress(*_ENDED):
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def descriptors(process: int) -> int:
    """How many descriptors it has open."""
    with contextlib.suppress(*_ENDED):
        return len(os.listdir(f"/proc/{process}/fd"))
    return 0
