"""What stands around a device or an underlay and passes everything on: the base of taps and faults.

A wrapper satisfies the contract of what it wraps, which is all of it that it does not change. It overrides that part, and
gets the rest from here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataplane.batch import Batch
from dataplane.device import Device
from dataplane.underlay import Underlay
from routing.config import Address
from routing.table import Endpoint


class DeviceWrapper:
    """A `Device` that is `_inner`, which whoever inherits from this sets."""

    _inner: Device

    @property
    def name(self) -> str:
        """See `Device`, as with the following."""
        return self._inner.name

    @property
    def mtu(self) -> int:
        """In bytes."""
        return self._inner.mtu

    @mtu.setter
    def mtu(self, mtu: int) -> None:
        """The wrapped device's, too."""
        self._inner.mtu = mtu

    def receive(self, batch: Batch) -> None:
        """By the wrapped device, as with the following."""
        self._inner.receive(batch)

    def transmit(self, batch: Batch) -> None:
        """To it."""
        self._inner.transmit(batch)

    def watch(self, ready: Callable[[], None]) -> None:
        """It is watched."""
        self._inner.watch(ready)

    def unwatch(self) -> None:
        """It is watched no more."""
        self._inner.unwatch()

    def keep(self) -> None:
        """It is kept."""
        self._inner.keep()

    def close(self) -> None:
        """It is closed."""
        self._inner.close()


class UnderlayWrapper:
    """An `Underlay` that is `_inner`, which whoever inherits from this sets."""

    _inner: Underlay

    @property
    def families(self) -> frozenset[int]:
        """See `Underlay`, as with the following."""
        return self._inner.families

    @property
    def lanes(self) -> int:
        """Those of the wrapped underlay, as with the following."""
        return self._inner.lanes

    @property
    def max_segments(self) -> int:
        """Its own."""
        return self._inner.max_segments

    def receive(self, batch: Batch, origins: Mapping[str, int]) -> None:
        """From it."""
        self._inner.receive(batch, origins)

    def transmit(self, batch: Batch, endpoints: Sequence[Endpoint]) -> int:
        """By it."""
        return self._inner.transmit(batch, endpoints)

    def transmit_in_fragments(self, batch: Batch, index: int, endpoint: Endpoint) -> None:
        """By it."""
        self._inner.transmit_in_fragments(batch, index, endpoint)

    def path_mtu(self, endpoint: Endpoint) -> int:
        """As it knows it."""
        return self._inner.path_mtu(endpoint)

    def report(self) -> dict[str, Any]:
        """What it has to tell."""
        return self._inner.report()

    def rebind(self, addresses: Sequence[Address]) -> None:
        """It is."""
        self._inner.rebind(addresses)

    def watch(self, ready: Callable[[], None]) -> None:
        """It is watched."""
        self._inner.watch(ready)

    def unwatch(self) -> None:
        """It is watched no more."""
        self._inner.unwatch()

    def close(self) -> None:
        """It is closed."""
        self._inner.close()
