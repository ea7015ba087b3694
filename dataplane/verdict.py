"""Every outcome of a packet, each with its number, its counter's name and its meaning.

A direction counts the verdicts of the packets that it received in one array indexed by these numbers, so that counting
is one addition in a compiled loop. Numbers below 9 are the faults of ``encap.faults``, passed through.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

from encap.faults import Fault


class Verdict(IntEnum):
    """What became of a packet."""

    PENDING = 0
    FORWARDED = 1
    NOT_IP = Fault.NOT_IP
    TRUNCATED = Fault.TRUNCATED
    BAD_LENGTH = Fault.BAD_LENGTH
    BAD_FLAGS = Fault.BAD_FLAGS
    WRONG_VNI = Fault.WRONG_VNI
    WRONG_MAC = Fault.WRONG_MAC
    BAD_OFFLOAD = Fault.BAD_OFFLOAD
    NO_ROUTE = 9
    TTL_EXPIRED = 10
    MULTICAST = 11
    TOO_BIG = 12
    UNKNOWN_VTEP = 13
    SPOOFED_SOURCE = 14
    NOT_FOR_US = 15
    QUEUE_FULL = 16
    SEND_ERROR = 17
    DEVICE_ERROR = 18


MEANING = {
    Verdict.PENDING: "not judged yet; never counted",
    Verdict.FORWARDED: "carried on",
    Verdict.NOT_IP: "neither IPv4 nor IPv6",
    Verdict.TRUNCATED: "shorter than its headers say",
    Verdict.BAD_LENGTH: "its lengths contradict each other",
    Verdict.BAD_FLAGS: "VXLAN header without the I flag",
    Verdict.WRONG_VNI: "VXLAN header with another VNI",
    Verdict.WRONG_MAC: "inner frame for another MAC address",
    Verdict.BAD_OFFLOAD: "a virtio-net header that contradicts its packet",
    Verdict.NO_ROUTE: "no lease for the destination",
    Verdict.TTL_EXPIRED: "TTL or hop limit used up",
    Verdict.MULTICAST: "multicast or broadcast, which is not carried",
    Verdict.TOO_BIG: "larger than the path, and not to be fragmented",
    Verdict.UNKNOWN_VTEP: "outer source is nobody's VTEP",
    Verdict.SPOOFED_SOURCE: "inner source does not live behind the outer source",
    Verdict.NOT_FOR_US: "inner destination is not in this node's subnet",
    Verdict.QUEUE_FULL: "the socket or device had no room",
    Verdict.SEND_ERROR: "the underlay refused the datagram",
    Verdict.DEVICE_ERROR: "the device refused the packet",
}
"""One phrase per verdict, for people."""


def new_counts() -> "array[int]":
    """A zeroed counter array, indexed by verdict."""
    return array("q", bytes(8 * len(Verdict)))


def by_name(counts: Sequence[int]) -> dict[str, int]:
    """The counters under their lower-case names, PENDING left out."""
    return {verdict.name.lower(): counts[verdict] for verdict in Verdict if verdict is not Verdict.PENDING}
