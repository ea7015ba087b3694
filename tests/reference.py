"""The slow twin of every hot function: obvious, in plain Python, written from the RFCs and not from the code under test."""

from ipaddress import IPv4Address, IPv6Address, ip_address


def internet_checksum(data: bytes) -> int:
    """RFC 1071: the complement of the one's complement sum of 16-bit words."""
    padded = data + b"\0" * (len(data) % 2)
    total = sum(int.from_bytes(padded[i : i + 2], "big") for i in range(0, len(padded), 2))
    while total > 0xFFFF:
        total = total % 0x10000 + total // 0x10000
    return 0xFFFF - total


def pseudo_header(source: str, destination: str, protocol: int, length: int) -> bytes:
    """RFC 9293 3.1 and RFC 8200 8.1."""
    src, dst = ip_address(source), ip_address(destination)
    if isinstance(src, IPv4Address):
        return src.packed + dst.packed + bytes([0, protocol]) + length.to_bytes(2, "big")
    assert isinstance(dst, IPv6Address)
    return src.packed + dst.packed + length.to_bytes(4, "big") + bytes([0, 0, 0, protocol])


def longest_match(networks: list, address) -> int:
    """The index of the longest of `networks` that holds `address`, or -1; by trying them all."""
    best = -1
    for index, network in enumerate(networks):
        holds = address.version == network.version and address in network
        if holds and (best < 0 or network.prefixlen > networks[best].prefixlen):
            best = index
    return best
