"""What can be wrong with the bytes of a packet or a datagram, one number each.

The numbers are shared with ``dataplane.verdict``: a fault found here is counted there under the same number, so the
compiled loops pass it through without translating. 0 and 1 are left to the dataplane (pending, forwarded).
"""

from enum import IntEnum

OK = 0


class Fault(IntEnum):
    """Why bytes are not a packet of ours. `OK` (0) is not a member: it is the absence of a fault."""

    NOT_IP = 2
    TRUNCATED = 3
    BAD_LENGTH = 4
    BAD_FLAGS = 5
    WRONG_VNI = 6
    WRONG_MAC = 7
    BAD_OFFLOAD = 8
