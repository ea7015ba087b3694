"""Devices: where inner packets come from and go to.

Contract (`Device`; every implementation passes ``tests/test_device_conformance.py``):

* `receive` fills the free slots of the caller's batch and returns; it never blocks and keeps no reference to the batch.
* `transmit` delivers the packets whose verdict is FORWARDED, in order, and changes the verdict of one that it cannot
  deliver to QUEUE_FULL or DEVICE_ERROR. The ten bytes before each packet are its virtio-net header (``encap.vnet``).
* After `watch(ready)`, `ready` is called from the event loop while there is something to receive, again and again until
  nothing is left; a caller may stop in the middle and will be called again.
"""

from collections.abc import Callable
from typing import Protocol

from dataplane.batch import Batch

__all__ = ["Device", "DeviceLostError"]


class DeviceLostError(Exception):
    """The device is gone: nothing can be received from it or sent to it any more."""


class Device(Protocol):
    """A source and sink of inner IP packets."""

    @property
    def name(self) -> str:
        """What people call it."""

    mtu: int
    """The longest packet that fits, in bytes; whoever changes the link's sets it, too."""

    def receive(self, batch: Batch) -> None:
        """Add what is there to `batch`, until it is full. Raises DeviceLostError."""

    def transmit(self, batch: Batch) -> None:
        """Deliver the FORWARDED packets of `batch`. Raises DeviceLostError."""

    def watch(self, ready: Callable[[], None]) -> None:
        """Call `ready` from the running event loop while there is something to receive."""

    def unwatch(self) -> None:
        """Call it no more."""

    def keep(self) -> None:
        """From now on the device outlives its closing and the end of the process, with its addresses and the routes through
        it, until the host removes it. Raises DeviceLostError, or OSError if it cannot be kept. May be called twice."""

    def close(self) -> None:
        """Give the device back. May be called twice."""
