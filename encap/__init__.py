"""The bytes of a tunnel: pure functions over buffers.

Contract of this folder:

* Nothing here opens a socket, reads a clock, logs, or knows of leases. Buffers come in, bytes and small integers go out.
* A function that judges a packet returns a :class:`encap.faults.Fault` (0 means nothing is wrong) and changes nothing; a
  function that changes bytes expects a packet that was judged before. Deciding, changing and fixing up are separate.
* Offsets and lengths are in bytes. ``at`` is where a header starts in its buffer. Multi-byte fields are big-endian
  unless a docstring says otherwise.
* Buffers belong to the caller; nothing here keeps a reference to one.

The modules named in :data:`HOT_MODULES` (of this folder and of the ones above it) are ordinary Python that Cython
compiles at install, with the C types in the ``.pxd`` beside each. Without a compiler the same files run as they are.
Setting ``PYFLANNEL_DP_PURE=1`` makes a compiled installation run the ``.py`` files too, which is how the tests compare
both and how one steps through a hot loop with a debugger.
"""

import os

HOT_MODULES = (
    "encap.ip",
    "encap.vnet",
    "encap.vxlan",
    "encap.segment",
    "encap.coalesce",
    "routing.table",
    "dataplane.batch",
    "dataplane.kernel",
    "dataplane.outbound",
    "dataplane.inbound",
    "dataplane.engine",
    "dataplane.device.tun",
    "dataplane.underlay.udp",
    "bench.replay.verify",
)

if os.environ.get("PYFLANNEL_DP_PURE"):
    from encap import pure

    pure.prefer_sources(HOT_MODULES)
