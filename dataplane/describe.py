"""One readable line a header, for people who watch a packet.

Reads what is there and says so; what it does not know it calls payload. It judges nothing: that is the dataplane's work.

Anybody may send VXLAN in VXLAN in VXLAN. `MAX_TUNNELS` of them are looked into, and what the innermost of those carries is
payload, so a stranger decides neither how deep we go nor how long a line gets.
"""

from ipaddress import IPv4Address, IPv6Address

from encap import vxlan
from encap.fields import (
    ETHERNET_HEADER_LENGTH,
    ETHERNET_TYPE,
    IPV4_HEADER_LENGTH,
    IPV4_TTL,
    IPV6_HEADER_LENGTH,
    IPV6_HOP_LIMIT,
    IPV6_NEXT_HEADER,
    TCP_DATA_OFFSET,
    TCP_FLAGS,
    TCP_HEADER_LENGTH,
    TCP_SEQUENCE,
    UDP_HEADER_LENGTH,
    load16,
    load32,
)

MAX_TUNNELS = 2
"""The overlay's own, and one that somebody runs inside it."""

_PROTOCOLS = {1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6"}
_ICMP_TYPES = {8: "echo request", 0: "echo reply", 3: "unreachable", 11: "time exceeded"}
_ICMPV6_TYPES = {128: "echo request", 129: "echo reply", 1: "unreachable", 2: "too big", 3: "time exceeded"}
_TCP_FLAGS = ("FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR")  # bit 0 first (RFC 9293 3.1, RFC 3168)


def one_line(lines: list[str]) -> str:
    """What the functions here return, in one line."""
    return "; ".join(" ".join(line.split()) for line in lines)


def describe_payload(payload: bytes, *, is_vxlan: bool) -> list[str]:
    """The headers in a datagram of the overlay: VXLAN, or in the ip framing a packet."""
    return _vxlan(payload, vxlan.DEFAULT_PORT, MAX_TUNNELS) if is_vxlan else describe_packet(payload)


def describe_frame(frame: bytes, vxlan_port: int = vxlan.DEFAULT_PORT) -> list[str]:
    """The headers of an Ethernet frame, outermost first; VXLAN is looked into on UDP `vxlan_port`."""
    return _frame(frame, vxlan_port, MAX_TUNNELS)


def describe_packet(packet: bytes, vxlan_port: int = vxlan.DEFAULT_PORT) -> list[str]:
    """The headers of an IP packet, as `describe_frame`."""
    return _packet(packet, vxlan_port, MAX_TUNNELS)


def _frame(frame: bytes, vxlan_port: int, tunnels: int) -> list[str]:
    """`tunnels` is how many may still be looked into, here as in all that follows."""
    if len(frame) < ETHERNET_HEADER_LENGTH:
        return [f"{len(frame)} bytes, too short for Ethernet"]
    line = f"Ethernet  {frame[6:12].hex(':')} → {frame[0:6].hex(':')}, type 0x{load16(frame, ETHERNET_TYPE):04x}"
    return [line, *_packet(frame[ETHERNET_HEADER_LENGTH:], vxlan_port, tunnels)]


def _packet(packet: bytes, vxlan_port: int, tunnels: int) -> list[str]:
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= IPV4_HEADER_LENGTH:
        source, destination = IPv4Address(packet[12:16]), IPv4Address(packet[16:20])
        protocol, rest = packet[9], packet[(packet[0] & 0x0F) * 4 :]
        line = f"IPv4      {source} → {destination}, TTL {packet[IPV4_TTL]}, {len(packet)} bytes"
    elif version == 6 and len(packet) >= IPV6_HEADER_LENGTH:
        protocol, rest = packet[IPV6_NEXT_HEADER], packet[IPV6_HEADER_LENGTH:]
        line = (
            f"IPv6      {IPv6Address(packet[8:24])} → {IPv6Address(packet[24:40])}, "
            f"hop limit {packet[IPV6_HOP_LIMIT]}, {len(packet)} bytes"
        )
    else:
        return [_payload(packet)]
    return [line, *_transport(protocol, rest, vxlan_port, tunnels)]


def _transport(protocol: int, data: bytes, vxlan_port: int, tunnels: int) -> list[str]:
    if protocol == 17 and len(data) >= UDP_HEADER_LENGTH:
        line = f"UDP       {load16(data, 0)} → {load16(data, 2)}, checksum 0x{load16(data, 6):04x}"
        inner = data[UDP_HEADER_LENGTH:]
        return [line, *_vxlan(inner, vxlan_port, tunnels)] if load16(data, 2) == vxlan_port else [line]
    if protocol == 6 and len(data) >= TCP_HEADER_LENGTH:
        flags = " ".join(name for bit, name in enumerate(_TCP_FLAGS) if data[TCP_FLAGS] >> bit & 1) or "none"
        length = max(len(data) - (data[TCP_DATA_OFFSET] >> 4) * 4, 0)
        ports = f"{load16(data, 0)} → {load16(data, 2)}"
        return [f"TCP       {ports}, flags {flags}, sequence {load32(data, TCP_SEQUENCE)}, {length} bytes of payload"]
    if protocol in {1, 58} and len(data) >= 8:
        types = _ICMP_TYPES if protocol == 1 else _ICMPV6_TYPES
        what = types.get(data[0], f"type {data[0]}")
        return [f"{_PROTOCOLS[protocol]:9s} {what}, id {load16(data, 4)}, sequence {load16(data, 6)}"]
    return [f"{_PROTOCOLS.get(protocol, f'protocol {protocol}'):9s} {len(data)} bytes"]


def _vxlan(data: bytes, vxlan_port: int, tunnels: int) -> list[str]:
    if not tunnels or len(data) < vxlan.VXLAN_HEADER_LENGTH:
        return [_payload(data)]
    line = f"VXLAN     flags 0x{data[0]:02x}, VNI {load32(data, 4) >> 8}"
    return [line, *_frame(data[vxlan.VXLAN_HEADER_LENGTH :], vxlan_port, tunnels - 1)]


def _payload(data: bytes) -> str:
    return f"payload   {len(data)} bytes"
