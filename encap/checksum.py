"""The Internet checksum (RFC 1071): sum, fold, pseudo-headers, incremental update.

Theory of operation: a checksum is the one's complement of the one's complement sum of 16-bit words. `add` joins the
sums of parts, in any order as long as each part starts at an even distance from the others; `fold` brings the result
to 16 bits. A *partial* checksum, as Linux leaves one for hardware to finish (CHECKSUM_PARTIAL,
include/linux/skbuff.h), is the folded sum of the pseudo-header alone, not complemented; `finish` completes it.
"""

from encap import fields
from encap.fields import IPV4_CHECKSUM, Octets, WritableOctets


def add(buf: Octets, at: int, length: int, total: int = 0) -> int:
    """`total` plus the folded sum of buf[at:at + length]; an odd last byte counts as the high half of a word.

    Raises IndexError beyond the buffer.
    """
    return total + fields.sum_words(buf, at, length)


def fold(total: int) -> int:
    """`total` reduced to 16 bits with end-around carry (RFC 1071 section 2)."""
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def internet_checksum(buf: Octets, at: int, length: int, total: int = 0) -> int:
    """The value for the checksum field over buf[at:at + length], the field itself being zero, seeded with `total`."""
    return fold(add(buf, at, length, total)) ^ 0xFFFF


def pseudo_sum(buf: Octets, addresses_at: int, addresses_length: int, protocol: int, length: int) -> int:
    """The folded, not complemented pseudo-header sum (RFC 9293 3.1, RFC 8200 8.1).

    Source and destination address stand together at `addresses_at` (8 or 32 bytes); `length` is that of the transport
    header and payload.
    """
    return fold(add(buf, addresses_at, addresses_length, protocol + length))


def finish(buf: WritableOctets, start: int, end: int, field: int) -> None:
    """Complete the partial checksum at `field`: sum buf[start:end], which holds the pseudo-header sum in that field.

    A computed 0 is stored as 0xFFFF, which RFC 768 and RFC 8200 8.1 ask of UDP and which TCP takes as the same number.
    """
    value = internet_checksum(buf, start, end - start)
    fields.store16(buf, field, value if value else 0xFFFF)


def replace_word(checksum: int, old: int, new: int) -> int:
    """`checksum` after one 16-bit word under it went from `old` to `new` (RFC 1624, equation 3)."""
    return fold((checksum ^ 0xFFFF) + (old ^ 0xFFFF) + new) ^ 0xFFFF


def write_ipv4_header_checksum(buf: WritableOctets, at: int, header_length: int) -> None:
    """Compute and store the checksum of the IPv4 header at `at` (RFC 791 3.1)."""
    fields.store16(buf, at + IPV4_CHECKSUM, 0)
    fields.store16(buf, at + IPV4_CHECKSUM, internet_checksum(buf, at, header_length))
