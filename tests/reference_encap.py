"""More slow twins, and packets built by hand for what scapy would rather not build: wrong lengths, odd chains."""

import itertools
from collections.abc import Iterator
from ipaddress import ip_address

import reference

NOT_IP, TRUNCATED, BAD_LENGTH, BAD_FLAGS, WRONG_VNI, WRONG_MAC = 2, 3, 4, 5, 6, 7
POISON = 0xA5


def poisoned(octets: bytes, before: int = 9, after: int = 7) -> bytearray:
    """`octets` in the middle of a buffer of poison."""
    return bytearray([POISON] * before) + octets + bytearray([POISON] * after)


def ipv4(
    payload: bytes = b"",
    protocol: int = 17,
    source: str = "10.1.1.5",
    destination: str = "10.1.2.5",
    options: bytes = b"",
    fragment: int = 0,
    ttl: int = 64,
    identification: int = 0x1234,
) -> bytes:
    """RFC 791 3.1. `fragment` is the whole word of flags and offset."""
    assert len(options) % 4 == 0
    before = bytes([0x40 | (5 + len(options) // 4), 0]) + (20 + len(options) + len(payload)).to_bytes(2, "big")
    before += identification.to_bytes(2, "big") + fragment.to_bytes(2, "big") + bytes([ttl, protocol])
    after = ip_address(source).packed + ip_address(destination).packed + options
    return before + reference.internet_checksum(before + b"\0\0" + after).to_bytes(2, "big") + after + payload


def ipv6(
    payload: bytes = b"", next_header: int = 17, source: str = "fd00::1:5", destination: str = "fd00::2:5", hops: int = 64
) -> bytes:
    """RFC 8200 3."""
    fixed = bytes([0x60, 0, 0, 0]) + len(payload).to_bytes(2, "big") + bytes([next_header, hops])
    return fixed + ip_address(source).packed + ip_address(destination).packed + payload


def ip(version: int, payload: bytes, protocol: int, **fields) -> bytes:
    """A packet of either family."""
    return ipv4(payload, protocol, **fields) if version == 4 else ipv6(payload, protocol, **fields)


def extension(next_header: int, units: int = 0) -> bytes:
    """An IPv6 extension header of 8 + 8 * `units` bytes (hop-by-hop, routing and destination options share the shape)."""
    return bytes([next_header, units]) + bytes(6 + 8 * units)


def fragment_header(next_header: int, offset: int, more: bool) -> bytes:
    """RFC 8200 4.5. `offset` in units of 8 bytes."""
    return bytes([next_header, 0]) + (offset << 3 | more).to_bytes(2, "big") + b"\x01\x02\x03\x04"


def udp(payload: bytes = b"payload", checksum: int = 0, sport: int = 1000, dport: int = 2000) -> bytes:
    """RFC 768."""
    return b"".join(word.to_bytes(2, "big") for word in (sport, dport, 8 + len(payload), checksum)) + payload


def tcp(payload: bytes = b"payload", checksum: int = 0, sport: int = 1000, dport: int = 2000) -> bytes:
    """RFC 9293 3.1, an ACK without options."""
    ports = sport.to_bytes(2, "big") + dport.to_bytes(2, "big")
    return ports + bytes.fromhex("00000007000000095010ffff") + checksum.to_bytes(2, "big") + b"\0\0" + payload


def not_complemented(source: str, destination: str, protocol: int, length: int) -> int:
    """The pseudo-header's sum as CHECKSUM_PARTIAL leaves it in the checksum field."""
    return 0xFFFF - reference.internet_checksum(reference.pseudo_header(source, destination, protocol, length))


def check_ip(packet: bytes) -> int:
    """What encap.ip.check promises in its docstring."""
    if not packet:
        return TRUNCATED
    version = packet[0] >> 4
    if version not in {4, 6}:
        return NOT_IP
    if len(packet) < {4: 20, 6: 40}[version]:
        return TRUNCATED
    if version == 4:
        header, total = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
        if not 20 <= header <= total:
            return BAD_LENGTH
    else:
        total = 40 + int.from_bytes(packet[4:6], "big")
    if total == len(packet):
        return 0
    return TRUNCATED if total > len(packet) else BAD_LENGTH


def check_vxlan(datagram: bytes, vni: int, macs: set[bytes]) -> int:
    """What encap.vxlan.check promises in its docstring."""
    if len(datagram) < 22:
        return TRUNCATED
    if datagram[0] & 8 == 0:
        return BAD_FLAGS
    if int.from_bytes(datagram[4:7], "big") != vni:
        return WRONG_VNI
    if datagram[8:14] not in macs:
        return WRONG_MAC
    if len(datagram) == 22:
        return TRUNCATED
    return 0 if (datagram[20:22].hex(), datagram[22] >> 4) in {("0800", 4), ("86dd", 6)} else NOT_IP


def with_length(packet: bytes) -> bytes:
    """`packet` (at least a fixed header) with its length field set to what is there."""
    out = bytearray(packet)
    if out[0] >> 4 == 4:
        out[2:4] = len(out).to_bytes(2, "big")
    else:
        out[4:6] = (len(out) - 40).to_bytes(2, "big")
    return bytes(out)


def shortened(packet: bytes) -> Iterator[bytes]:
    """`packet` cut at every byte behind its fixed header, each with lengths that say so."""
    smallest = (packet[0] & 15) * 4 if packet[0] >> 4 == 4 else 40
    for length in range(smallest, len(packet)):
        yield with_length(packet[:length])


def flows(version: int, count: int) -> list[bytes]:
    """`count` UDP packets of as many flows, as a busy node has them: few hosts, ports that count up."""
    out = []
    for number, (host, port) in enumerate(itertools.product(range(1, 26), range(32768, 32768 + -(-count // 25)))):
        if number == count:
            break
        near, far = (f"10.1.1.{host}", "10.1.2.5") if version == 4 else (f"fd00::1:{host:x}", "fd00::2:5")
        out.append(ip(version, udp(b"", sport=port, dport=53), 17, source=near, destination=far))
    return out
