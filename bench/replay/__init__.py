"""Replay of captures: how fast, and how correctly, an encapsulation path carries traffic that was seen somewhere.

Contract of this folder: nothing here is imported by the node. Loading is never inside a measured time, and memory stays
bounded however large a capture is: packets are read, fitted to the overlay and packed into a `Chunk`, and the next chunk is
loaded when the last one was replayed. The engine's own functions carry them; what is measured is the product.
"""

import encap  # noqa: F401 - it decides whether the hot modules, of which one is in here, run compiled
