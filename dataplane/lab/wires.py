"""What joins the hosts: a bridge of the kernel, or a process of ours that carries the frames over impaired links.

Theory of operation. A lab starts with the bridge, which costs nothing. The first wish that it cannot fulfil starts the
relay (`dataplane.lab.relay`) in the underlay's namespace; then the outer ends of the hosts leave the bridge and the relay
opens them. There is no way back: a relay whose links are perfect does no harm.

The relay is a process and not a thread, because a thread would wait for the interpreter lock whenever a test or a demo
computes, and that wait would look like jitter. We talk to it over a socket pair that is its standard input: a question is
a tuple of a number, a verb and its arguments, the answer is that number, success and value, and so a change is in force
when the call returns. The number tells an answer from one that nobody waited for to its end, because it was late or because
of Ctrl-C. The relay ends when the socket does, whatever happened to us.

What was asked for and who is cut off are kept here, and the relay is told the sum of both.
"""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from dataplane.lab import offloads
from dataplane.lab.namespace import LabError, Namespace
from dataplane.underlay.link import LinkCounts, LinkSpec

_ANSWER_SECONDS = 10.0
_CUT = LinkSpec(loss=1.0)


@dataclass(frozen=True)
class Wire:
    """A host's connection: `outer` is the end in the underlay of ``eth0`` in `namespace`."""

    label: str
    outer: str
    namespace: str


class Wires:
    """The wires of one lab, in its `underlay`. `default` is the link of each pair that nothing else was said of."""

    def __init__(self, underlay: Namespace, mtu: int, default: LinkSpec, seed: int) -> None:
        self._underlay = underlay
        self._default = default
        self._seed = seed
        self._wires: dict[str, Wire] = {}
        self._specs: dict[tuple[str, str], LinkSpec] = {}
        self._cut: set[tuple[str, str]] = set()
        self._relay: _Relay | None = None
        underlay.ip(f"link add br0 mtu {mtu} type bridge", "link set br0 up")
        if not default.is_perfect:
            self._start_relay()

    def attach(self, wire: Wire) -> None:
        """Join one more host to the others."""
        self._wires[wire.label] = wire
        if self._relay is None:
            self._underlay.ip(f"link set {wire.outer} master br0 up")
        else:
            self._hand_over(wire, self._relay)

    def impair(self, source: str, target: str, spec: LinkSpec) -> None:
        """Let the frames from `source` to `target` cross a link like `spec`."""
        if source == target or not {source, target} <= self._wires.keys():
            raise LabError(f"there is no link from {source} to {target}; the hosts are {', '.join(self._wires)}")
        self._specs[source, target] = spec
        self._tell(source, target)

    def partition(self, groups: Sequence[Sequence[str]]) -> None:
        """Cut all links between hosts of different groups."""
        pairs = [pair for two in itertools.permutations(groups, 2) for pair in itertools.product(*two)]
        for source, target in pairs:
            if source == target:
                raise LabError(f"{source} is on two sides of the partition")
        self._cut.update(pairs)
        for source, target in pairs:
            self._tell(source, target)

    def heal(self) -> None:
        """Undo `partition`."""
        cut, self._cut = self._cut, set()
        for source, target in sorted(cut):
            self._tell(source, target)

    def counts(self) -> Mapping[tuple[str, str], LinkCounts]:
        """Those of each link."""
        counts: Mapping[tuple[str, str], LinkCounts] = self._relay.ask("counts") if self._relay else {}
        return counts

    def overruns(self) -> int:
        """Frames that the relay did not get to read or to deliver, because the machine is too slow for this lab.

        Those that the target's ``eth0`` is too small for are not among them, but in the link's count `oversize`.
        """
        return int(self._relay.ask("overruns")) if self._relay else 0

    def close(self) -> None:
        """Let the relay go; the lab ends its process."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def _tell(self, source: str, target: str) -> None:
        if self._relay is None:
            self._start_relay()
        assert self._relay is not None
        pair = (source, target)
        self._relay.ask("impair", *pair, _CUT if pair in self._cut else self._specs.get(pair, self._default))

    def _start_relay(self) -> None:
        """Only when the process answers do the hosts leave the bridge, so the gap is short."""
        self._relay = _Relay(self._underlay, self._default, self._seed)
        for wire in self._wires.values():
            self._underlay.ip(f"link set {wire.outer} nomaster")
            self._hand_over(wire, self._relay)

    def _hand_over(self, wire: Wire, relay: "_Relay") -> None:
        """The outer end is the relay's alone: the kernel's own IPv6 must not speak there."""
        offloads.turn_off(wire.namespace, "eth0")
        self._underlay.sysctl({f"net/ipv6/conf/{wire.outer}/disable_ipv6": "1"})
        self._underlay.ip(f"link set {wire.outer} up")
        relay.ask("add_port", wire.label, wire.outer)


class _Relay:
    """The relay's process, and the way to talk to it, for any thread."""

    def __init__(self, underlay: Namespace, default: LinkSpec, seed: int) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._connection, theirs = Pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            with theirs:
                command = [sys.executable, "-m", "dataplane.lab.relay"]
                self._process = underlay.popen(command, stdin=theirs.fileno())
            self.ask("start", default, seed)
            undo.pop_all()

    def ask(self, verb: str, *arguments: object) -> Any:
        """Its answer. Raises LabError if it refuses or has ended."""
        try:
            with self._lock:
                self._asked += 1
                self._connection.send((self._asked, verb, *arguments))
                is_done, answer = self._answer(self._asked)
        except (EOFError, OSError) as error:
            raise LabError(f"the relay of the underlay has ended: exit code {self._process.poll()}") from error
        if not is_done:
            raise LabError(f"the relay of the underlay: {answer}")
        return answer

    def _answer(self, number: int) -> tuple[bool, Any]:
        """That to question `number`; earlier ones that were given up may be answered before."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while self._connection.poll(max(0.0, deadline - time.monotonic())):
            answered, is_done, answer = self._connection.recv()
            if answered == number:
                return is_done, answer
        raise LabError("the relay of the underlay does not answer")

    def close(self) -> None:
        """It reads the end of its input, and ends."""
        self._connection.close()
