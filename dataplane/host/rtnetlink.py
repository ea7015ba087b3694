"""Messages to the kernel about links, addresses and routes, and what it answers (rtnetlink(7), RFC 3549).

Theory of operation: a `Channel` is a socket, of the network namespace of the thread that makes it. A `Request` is sent,
and what the kernel says is read until it is done: a message, the parts of a dump, or an acknowledgement, which is a code
and, where the kernel has more to say (NETLINK_EXT_ACK), a sentence. ``reading`` and ``setting`` make the requests, from the
structs and the numbers that stand here.

The kernel may lose an answer for want of memory (ENOBUFS; net/netlink/af_netlink.c, netlink_ack), and a dump is incomplete
if things change meanwhile (NLM_F_DUMP_INTR). Both times the request is made again, which does no harm: what is there
already, or gone already, the kernel says so, and whoever asked takes that for done. Answers to the request before are told
by their sequence number. A call that a signal interrupts Python makes again by itself (PEP 475).

A node used a library for this before, pyroute2, which took 10 of its 50 MiB and 75 ms of each start, for a dozen messages.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple, Self

# include/uapi/linux/netlink.h
_SOL_NETLINK = 270  # include/linux/socket.h
_NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK = 10, 11, 12
_NLM_F_REQUEST, _NLM_F_MULTI, _NLM_F_DUMP_INTR, _NLM_F_ACK_TLVS = 0x1, 0x2, 0x10, 0x200
NLM_F_ACK, NLM_F_DUMP, NLM_F_EXCL, NLM_F_CREATE = 0x4, 0x300, 0x200, 0x400
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLMSGERR_ATTR_MSG = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_ATTRIBUTE_TYPE = 0x3FFF  # less the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER
_CODE = struct.Struct("=i")

# Links: include/uapi/linux/rtnetlink.h, if_link.h, if.h, ip.h
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
LINK = struct.Struct("=BxHiII")
"""struct ifinfomsg: family, type, index, flags, and which of these to change."""
IFF_UP, IFF_LOWER_UP = 1, 1 << 16
IFLA_IFNAME, IFLA_MTU, IFLA_TXQLEN, IFLA_LINKINFO, IFLA_IFALIAS, IFLA_AF_SPEC = 3, 4, 13, 18, 20, 26
IFLA_EXT_MASK, IFLA_GSO_MAX_SIZE = 29, 41
IFLA_INFO_KIND, IFLA_INFO_DATA, IFLA_VXLAN_PORT = 1, 2, 15  # inside IFLA_LINKINFO, the last inside IFLA_INFO_DATA
IFLA_INET_CONF, IPV4_DEVCONF_ACCEPT_LOCAL = 1, 23  # inside IFLA_AF_SPEC and there AF_INET; inside IFLA_INET_CONF
RTEXT_FILTER_SKIP_STATS = 1 << 3

# Addresses: include/uapi/linux/rtnetlink.h, if_addr.h
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
ADDRESS = struct.Struct("=4BI")
"""struct ifaddrmsg: family, prefix length, flags, scope, index."""
IFA_ADDRESS, IFA_LOCAL = 1, 2

# Routes: include/uapi/linux/rtnetlink.h
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
ROUTE = struct.Struct("=8BI")
"""struct rtmsg: family, destination's length, source's, tos, table, protocol, scope, type, flags."""
NEXT_HOP = struct.Struct("=4xi")
"""Of struct rtnexthop the index of the link."""
RTA_DST, RTA_OIF, RTA_PRIORITY, RTA_MULTIPATH = 1, 4, 6, 9
RT_TABLE_MAIN, RTN_UNSPEC, RTN_UNICAST = 254, 0, 1
RT_SCOPE_LINK, RT_SCOPE_NOWHERE = 253, 255

_BUFFER = 1 << 16  # bytes; the kernel's parts of a dump have up to 32 KiB
_TRIES = 5
_PATIENCE = 10.0  # seconds; the kernel has answered before sendto returns, unless the answer was lost


class RefusedError(OSError):
    """The kernel's answer is an error: `errno`, and `strerror` with its sentence where there is one."""


class Request(NamedTuple):
    """A message to be sent: type, flags besides NLM_F_REQUEST, and the head struct with attributes behind it."""

    kind: int
    flags: int
    body: bytes


class Channel:
    """A connection to the kernel, closed at the end of a ``with`` block. Raises OSError."""

    def __init__(self) -> None:
        self._sequence = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            # Acknowledgements with a sentence (Linux 4.12) but without the request (4.3), and filtered dumps (4.20).
            for option in (_NETLINK_EXT_ACK, _NETLINK_CAP_ACK, _NETLINK_GET_STRICT_CHK):
                self._socket.setsockopt(_SOL_NETLINK, option, 1)
            self._socket.settimeout(_PATIENCE)
        except OSError:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: Request) -> list[memoryview]:
        """What follows the headers of the messages that answer: none to a request with `NLM_F_ACK`, which is done then.

        A dump that is interrupted time and again is given as it is. Raises RefusedError, and OSError if there is no answer.
        """
        for left in reversed(range(_TRIES)):
            try:
                found, is_whole = self._exchange(request)
            except OSError as error:
                if error.errno != errno.ENOBUFS or not left:
                    raise
                continue
            if is_whole:
                break
        return found

    def _exchange(self, request: Request) -> tuple[list[memoryview], bool]:
        """The answer, and whether nothing is missing."""
        self._sequence = sequence = self._sequence + 1
        length, wishes = _HEADER.size + len(request.body), request.flags | _NLM_F_REQUEST
        self._socket.sendto(_HEADER.pack(length, request.kind, wishes, sequence, 0) + request.body, (0, 0))
        found: list[memoryview] = []
        is_whole, is_done = True, False
        while not is_done:
            for kind, flags, answered, payload in messages(memoryview(self._socket.recv(_BUFFER))):
                if answered != sequence:
                    continue
                is_whole = is_whole and not flags & _NLM_F_DUMP_INTR
                is_done = kind in {_NLMSG_ERROR, _NLMSG_DONE}
                if is_done:
                    _require_success(kind, flags, payload)
                else:
                    found.append(payload)
                    is_done = not flags & _NLM_F_MULTI and not request.flags & NLM_F_ACK
        return found, is_whole


def messages(data: memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """Those in a datagram, each as type, flags, sequence number and what follows the header.

    Raises OSError (EBADMSG) if one is cut short.
    """
    at, end = 0, len(data)
    while at < end:
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at) if at + _HEADER.size <= end else (0,) * 5
        if not _HEADER.size <= length <= end - at:
            raise OSError(errno.EBADMSG, "a message of the kernel's is cut short")
        yield kind, flags, sequence, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def _require_success(kind: int, flags: int, payload: memoryview) -> None:
    """Raises RefusedError if an acknowledgement, or the end of a dump, is an error."""
    (negative,) = _CODE.unpack_from(payload)
    if not negative:
        return
    text = os.strerror(-negative)
    if flags & _NLM_F_ACK_TLVS:
        # Behind the code, in an acknowledgement also behind the header of the request (struct nlmsgerr).
        at = _CODE.size + (_HEADER.size if kind == _NLMSG_ERROR else 0)
        said = attributes(payload[at:]).get(_NLMSGERR_ATTR_MSG)
        if said is not None:
            text += f" ({bytes(said).rstrip(bytes(1)).decode(errors='replace').rstrip('.')})"
    raise RefusedError(-negative, text)


def attributes(data: memoryview) -> dict[int, memoryview]:
    """Attributes by type, from a sequence of them."""
    found = {}
    at = 0
    while at + 4 <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        found[kind & _ATTRIBUTE_TYPE] = data[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)
    return found


def attribute(kind: int, value: bytes | int) -> bytes:
    """An attribute, padded; a number has 32 bits."""
    content = struct.pack("=I", value) if isinstance(value, int) else value
    length = _ATTRIBUTE.size + len(content)
    return _ATTRIBUTE.pack(length, kind) + content + bytes(-length % 4)
