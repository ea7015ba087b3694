"""Every outcome of a packet, each with its number, its counter's name and its meaning.

A direction counts the verdicts of the packets that it received in one array indexed by these numbers, so that counting
is one addition in a compiled loop. Numbers below 8 are the faults of ``encap.faults``, passed through.
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
    NO_ROUTE = 8
    TTL_EXPIRED = 9
    MULTICAST = 10
    TOO_BIG = 11
    UNKNOWN_VTEP = 12
    SPOOFED_SOURCE = 13
    NOT_FOR_US = 14
    QUEUE_FULL = 15
    SEND_ERROR = 16
    DEVICE_ERROR = 17


MEANING = {
    Verdict.PENDING: "not judged yet; never counted",
    Verdict.FORWARDED: "carried on",
    Verdict.NOT_IP: "neither IPv4 nor IPv6",
    Verdict.TRUNCATED: "shorter than its headers say",
    Verdict.BAD_LENGTH: "its lengths contradict each other",
    Verdict.BAD_FLAGS: "VXLAN header without the I flag",
    Verdict.WRONG_VNI: "VXLAN header with another VNI",
    Verdict.WRONG_MAC: "inner frame for another MAC address",
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
