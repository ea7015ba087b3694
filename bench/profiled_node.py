"""A node that times the stages of its engine: ``python -m bench.profiled_node OPTIONS``, options as ``pyflannel-dp``.

Theory of operation: the product has no code for this. Before the node starts, what the engine calls is replaced from
outside by wrappers that read the clock: functions where the engine finds them, the compiled layout and both sides by
stand-ins that pass everything on. The engine itself runs uncompiled for that, and from there on everything else as
installed. A stage's time is its own: what runs inside another stage is taken off that one. What a
pump spends beside its stages is the stage ``other``. ``status`` then has one more entry, ``stages``.

A wrapper costs about half a microsecond a call, and calls are per batch, not per packet; times are by the wall, so they
hold what a preempted process waits for a core.
"""

import time
from collections.abc import Callable
from typing import Any

from encap.pure import prefer_sources

prefer_sources(["dataplane.engine"])  # before anything imports it

import dataplane.engine  # noqa: E402 - as the line above says
import dataplane.node.node  # noqa: E402
from dataplane.cli import main  # noqa: E402
from dataplane.engine import Direction, Engine  # noqa: E402
from dataplane.node import Node  # noqa: E402

STAGES: dict[str, dict[str, str]] = {
    "outbound": {
        "receive": "readv from the TUN device",
        "judge": "judge_batch",
        "lay out": "segment, finish checksums, write headers",
        "transmit": "sendmsg to the UDP socket",
        "settle": "verdicts of refused trains",
        "count": "tally the verdicts",
        "other": "the loop itself, ICMP errors",
    },
    "inbound": {
        "receive": "recvmsg from the UDP socket",
        "unpack": "find the datagrams",
        "decapsulate": "check, strip, admit",
        "coalesce": "merge packets of one flow",
        "write": "writev to the TUN device",
        "count": "tally the verdicts",
        "other": "the loop itself, ICMP errors",
    },
}
"""What is told apart, by direction, in the order of the packet's way."""


class Stopwatch:
    """Nanoseconds and calls by stage, each stage's own."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now = now
        self._inner = 0
        self._direction = "outbound"
        self.nanoseconds = {way: dict.fromkeys(stages, 0) for way, stages in STAGES.items()}
        self.calls = {way: dict.fromkeys(stages, 0) for way, stages in STAGES.items()}

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time counted under `stage` of the direction whose pump runs."""

        def wrapper(*args: Any) -> Any:
            outer, self._inner = self._inner, 0
            started = self._now()
            try:
                return function(*args)
            finally:
                taken = self._now() - started
                self.nanoseconds[self._direction][stage] += taken - self._inner
                self.calls[self._direction][stage] += 1
                self._inner = outer + taken

        return wrapper

    def pump(self, direction: str, function: Callable[[], None]) -> Callable[[], None]:
        """`function`, a pump of the engine, whose stages belong to `direction`."""
        inside = self.timed("other", function)

        def wrapper() -> None:
            self._direction = direction
            inside()

        return wrapper

    def report(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"nanoseconds": self.nanoseconds, "calls": self.calls}


class _StandIn:
    """Passes everything on to `original`, the methods in `stages` timed."""

    def __init__(self, original: Any, watch: Stopwatch, stages: dict[str, str]) -> None:
        self._original = original
        for method, stage in stages.items():
            setattr(self, method, watch.timed(stage, getattr(original, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def install(watch: Stopwatch) -> None:
    """Replace what the engine and the node call, for the life of this process."""
    module: Any = dataplane.engine
    for function, stage in (
        ("judge_batch", "judge"),
        ("unpack", "unpack"),
        ("decapsulate", "decapsulate"),
        ("coalesce", "coalesce"),
    ):
        setattr(module, function, watch.timed(stage, getattr(module, function)))
    outbound = module.Outbound
    module.Outbound = lambda *args: _StandIn(outbound(*args), watch, {"lay_out": "lay out"})
    direction: Any = Direction
    direction.count = watch.timed("count", Direction.count)

    class ProfiledEngine(Engine):
        def __init__(self, device: Any, underlay: Any, *args: Any, **named: Any) -> None:
            device = _StandIn(device, watch, {"receive": "receive", "transmit": "write"})
            underlay = _StandIn(underlay, watch, {"receive": "receive", "transmit": "transmit"})
            super().__init__(device, underlay, *args, **named)
            this: Any = self
            this.pump_outbound = watch.pump("outbound", super().pump_outbound)
            this.pump_inbound = watch.pump("inbound", super().pump_inbound)
            this._settle = watch.timed("settle", super()._settle)

    node: Any = dataplane.node.node
    node.Engine = ProfiledEngine
    of_node: Any = Node
    status = Node.status
    of_node.status = lambda self: status(self) | {"stages": watch.report()}


if __name__ == "__main__":
    install(Stopwatch())
    main()
