"""Turn off what a device leaves to hardware, so that what is read from its other end is what a wire would carry.

A veth pair hands packets over as the sender's stack made them: checksums only begun, superpackets uncut. Without checksum
offload the kernel finishes the first, and since every segmentation offload needs it (net/core/dev.c,
netdev_fix_features), cuts the second. This is ``ethtool -K DEVICE tx off`` by its ioctl, so that the program ethtool is
not needed.
"""

import ctypes
import fcntl
import socket
import struct

from dataplane.lab.namespace import LabError, inside

_SIOCETHTOOL = 0x8946  # linux/sockios.h
_ETHTOOL_STXCSUM = 0x17  # linux/ethtool.h


def turn_off(namespace: str, device: str) -> None:
    """Make `device` in `namespace` send whole, finished packets. Raises LabError."""
    value = ctypes.create_string_buffer(struct.pack("=II", _ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    try:
        with inside(namespace):
            talker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with talker:
            fcntl.ioctl(talker, _SIOCETHTOOL, request)
    except OSError as error:
        raise LabError(f"the offloads of {device} in {namespace} cannot be turned off: {error}") from error
