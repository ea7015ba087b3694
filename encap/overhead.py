"""Overhead and MTU arithmetic.

What one inner packet costs on the underlay: outer IP (20 or 40) + UDP (8) + framing. For VXLAN the framing is 8 + 14
bytes, so 50 over IPv4 and 70 over IPv6; the bare packet costs 28 and 48.
"""

from encap.fields import IPV4_HEADER_LENGTH, IPV6_HEADER_LENGTH, UDP_HEADER_LENGTH

MINIMUM_IPV4_MTU = 576
"""What every IPv4 host must accept (RFC 791 3.2); a node refuses to run with less."""

MINIMUM_IPV6_MTU = 1280
"""What every IPv6 link must carry (RFC 8200 section 5)."""

PATH_MTU_FLOOR_IPV4 = 552
"""Below this Linux stops believing path MTU reports (net/ipv4/route.c, ip_rt_min_pmtu)."""


def overhead(framing_header_length: int, underlay_family: int) -> int:
    """Bytes that the underlay adds to an inner packet. `underlay_family` is 4 or 6."""
    outer = {4: IPV4_HEADER_LENGTH, 6: IPV6_HEADER_LENGTH}[underlay_family]
    return outer + UDP_HEADER_LENGTH + framing_header_length


def superpacket_limit(mtu: int, framing_header_length: int) -> int:
    """How long a superpacket from a device of `mtu` may be, in bytes, to leave in one UDP_SEGMENT send.

    One send takes 64 datagrams and 65 507 bytes. With a longer superpacket the rest costs a second send, a second receive
    and a second write. The headers counted are those of TCP over IPv4 with timestamps (52 bytes).
    """
    datagrams = min(64, 65507 // (mtu + framing_header_length))
    return min(datagrams * (mtu - 52) + 52, 65535)


def path_mtu_to_report(path_mtu: int, overhead_length: int, inner_family: int) -> int:
    """The next-hop MTU for an ICMP error about an inner packet that the path cannot carry.

    Never below what the sender's stack would act on: 552 for IPv4, 1280 for IPv6. A packet no longer than that floor
    must be carried in fragments of the outer datagram instead (RFC 2473 section 7.1).
    """
    return max(path_mtu - overhead_length, path_mtu_floor(inner_family))


def path_mtu_floor(inner_family: int) -> int:
    """The least next-hop MTU worth reporting to a sender of `inner_family` (4 or 6)."""
    return PATH_MTU_FLOOR_IPV4 if inner_family == 4 else MINIMUM_IPV6_MTU
