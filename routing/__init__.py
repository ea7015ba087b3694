"""Who owns which subnet.

Contract of this folder: leases and the network configuration come in from a store, and an immutable table that the hot
path reads goes out. Except for ``stores/``, which do the I/O behind one protocol, and ``subnetfile``/``durable``, which
write one file, everything here is sans-I/O: time and randomness are arguments. Nothing here knows of devices or
sockets.

Importing this package imports ``encap`` first, which decides whether the hot modules run compiled.
"""

import encap

__all__ = ["encap"]
