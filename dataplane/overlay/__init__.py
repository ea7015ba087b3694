"""Overlay networks inside a test: several nodes in one process, without root, over an underlay that does what it is told.

Contract of this folder:

* An `Overlay` is whole: its nodes take real leases from a book, build real tables from them and run the real engine; in
  memory are only what the kernel would be (the device, the sockets, the host behind the device) and the store.
* Everything runs on one event loop, and time is that loop's: virtual where the overlay makes the loop itself, real where
  it is used from somebody else's. No threads, no sockets, no files.
* The same seed gives the same bytes at the same instants. Whatever is drawn at random comes from the overlay's seed.

What a test does not need is not here: the kernel, and what only processes can show, is ``dataplane.lab``'s.
"""

from dataplane.overlay.host import OverlaySocket
from dataplane.overlay.node import OverlayNode
from dataplane.overlay.overlay import Overlay
from dataplane.overlay.virtualtime import StalledError, VirtualLoop
from dataplane.underlay.fake import Fate
from dataplane.underlay.link import Burst, LinkSpec

__all__ = ["Burst", "Fate", "LinkSpec", "Overlay", "OverlayNode", "OverlaySocket", "StalledError", "VirtualLoop"]
