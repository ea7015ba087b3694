"""Moves packets.

Contract of this folder:

* **Batches, not packets.** Python runs once per batch; what runs per packet is compiled (``outbound``, ``inbound``) or is
  one system call. Nothing is logged, raised or allocated because of one packet: each gets a verdict, and verdicts are
  counted. Packets received equal the sum of the verdicts, always.
* **Ownership.** Whoever calls allocates: a device or underlay fills the caller's batch and keeps no reference to it.
* **Interchangeable parts.** Every device and every underlay passes the conformance suite of its interface, and each one
  that talks to the kernel has a twin in memory that is part of the product.
* **Time, randomness and the kernel are parameters.**
"""

import routing

__all__ = ["routing"]
