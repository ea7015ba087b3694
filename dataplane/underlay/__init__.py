"""Underlays: what carries datagrams between VTEPs.

Contract (`Underlay`; every implementation passes ``tests/test_underlay_conformance.py``):

* `receive` fills the free slots of the caller's batch and returns; it never blocks and keeps no reference to the
  batch. A slot holds one datagram, or several of one origin and one size, the last maybe shorter, which its `stride`
  tells. `origins` maps the hosts of known VTEPs, in the text form of ``ipaddress``, to their numbers; a datagram from
  any other host gets the peer UNKNOWN_VTEP.
* `transmit` sends the trains whose verdict is FORWARDED, each to the endpoint of its row (`peer`), in order for each lane
  (`flow`), and changes the verdict of one that it cannot send: QUEUE_FULL, TOO_BIG (larger than the path carries in one
  piece), SEND_ERROR. Trouble with one train does not stop the others. Returns how many were sent.
* `transmit_in_fragments` sends one train, its datagrams in fragments of the outer packet where it must be.
* `lanes` and `max_segments` tell whoever lays out trains what they may be.
* `report` tells, for `status`, at least: `send_errors`, how often sending failed, by the reason's name; `socket_drops`, how
  many datagrams the kernel dropped before they could be received, None where there is no kernel; `source_ports`, for each
  family that has some (``ipv4``, ``ipv6``), the UDP ports that the lanes send from, lane by lane.
* `watch` as for devices.
* `rebind` goes on with other addresses of our own, on the same port and as watched as before; the object stays the same, so
  that whatever stands around it goes on. All of them can be had, or UnderlayError is raised and nothing has changed. A
  family whose address stays keeps all that it has; of another, what has arrived and was not received is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dataplane.batch import Batch
from routing.config import Address
from routing.table import Endpoint

__all__ = ["Underlay", "UnderlayError"]


class UnderlayError(Exception):
    """The sockets cannot be had; `port_taken` tells whether somebody else holds the port."""

    def __init__(self, message: str, *, port_taken: bool = False) -> None:
        super().__init__(message)
        self.port_taken = port_taken


class Underlay(Protocol):
    """A carrier of datagrams."""

    @property
    def families(self) -> frozenset[int]:
        """Which of 4 and 6 can be reached."""

    @property
    def lanes(self) -> int:
        """How many source ports flows can be spread over, at least 1."""

    @property
    def max_segments(self) -> int:
        """How many datagrams a train may have; may fall to 1 at run time, and never rises."""

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """Add what is there to `batch`, until it is full."""

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """Send the FORWARDED trains of `batch`."""

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """Send train `index`; its verdict says what became of it."""

    def path_mtu(self, endpoint: Endpoint) -> int:
        """The longest outer IP packet, in bytes, that goes to `endpoint` in one piece, as far as is known now."""

    def report(self) -> dict[str, Any]:
        """What there is to say in `status`, as plain data for JSON."""

    def rebind(self, addresses: Sequence[Address]) -> None:
        """Be at `addresses` (at most one of each family) from now on. Raises UnderlayError, and is where it was then."""

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` from the running event loop while there is something to receive."""

    def unwatch(self) -> None:
        """Call it no more."""

    def close(self) -> None:
        """Give the sockets back. May be called twice."""
