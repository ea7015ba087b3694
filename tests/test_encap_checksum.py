"""encap/checksum.py against RFC 1071 done slowly, and against scapy."""

import random
from ipaddress import ip_address

import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import POISON, ipv4, not_complemented, poisoned
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from encap import checksum

words = st.integers(0, 0xFFFF)


@pytest.mark.parametrize(
    ("name", "octets", "expected"),
    [
        ("nothing", "", 0xFFFF),
        ("RFC 1071 section 3", "0001f203f4f5f6f7", 0x220D),
        ("one byte is the high half", "01", 0xFEFF),
        ("odd", "000102", 0xFDFE),
        ("all ones", "ffff", 0x0000),
        ("two carries", "ffffffff", 0x0000),
        ("zeros", "0000", 0xFFFF),
        ("an IPv4 header", "4500003c1c4640004006" + "0000" + "ac100a63ac100a0c", 0xB1E6),
    ],
)
def test_internet_checksum(name, octets, expected):
    assert checksum.internet_checksum(bytes.fromhex(octets), 0, len(octets) // 2) == expected


@pytest.mark.parametrize("fill", ["random", "ones"])
def test_internet_checksum_at_every_length(fill):
    octets = random.Random(1071).randbytes(2100) if fill == "random" else b"\xff" * 2100
    buf = poisoned(octets, before=3, after=5)
    for length in range(2101):
        assert checksum.internet_checksum(buf, 3, length) == reference.internet_checksum(octets[:length]), length


def test_internet_checksum_of_the_longest_packet():
    octets = b"\xff" * 65534 + b"\xfe"
    assert checksum.internet_checksum(octets, 0, 65535) == reference.internet_checksum(octets)


def test_add_joins_partial_sums_at_every_even_split():
    octets = random.Random(3).randbytes(301)
    whole = checksum.add(octets, 0, 301)
    for split in range(0, 302, 2):
        assert checksum.fold(checksum.add(octets, split, 301 - split, checksum.add(octets, 0, split))) == whole
        assert checksum.fold(checksum.add(octets, 0, split, checksum.add(octets, split, 301 - split))) == whole


def test_add_of_nothing_is_the_seed():
    assert checksum.add(b"", 0, 0) == 0
    assert checksum.add(b"\xa5", 1, 0, 0x1_2345_6789) == 0x1_2345_6789


def test_add_beyond_the_buffer_raises():
    for length in range(9):
        for at in range(length + 2):
            with pytest.raises(IndexError):
                checksum.add(bytes(length), at, length - at + 1 if at <= length else 1)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (0, 0),
        (1, 1),
        (0xFFFF, 0xFFFF),
        (0x1_0000, 1),
        (0x1_FFFE, 0xFFFF),
        (0x1_FFFF, 1),  # two rounds of carry
        (0xFFFF_FFFF, 0xFFFF),
        (0xFFFF_0001, 1),
        (0xFFFF_FFFF_FFFF_FFFF, 0xFFFF),
        (0x8000_0000_0000_0000, 0x8000),
    ],
)
def test_fold(total, expected):
    assert checksum.fold(total) == expected


@given(st.integers(1, 2**64 - 1))
def test_fold_keeps_the_residue_and_never_turns_something_into_zero(total):
    folded = checksum.fold(total)
    assert 0 < folded <= 0xFFFF
    assert folded % 0xFFFF == total % 0xFFFF


ADDRESSES = [
    ("10.1.1.5", "10.1.2.5"),
    ("0.0.0.0", "0.0.0.0"),
    ("255.255.255.255", "255.255.255.255"),
    ("fd00::1:5", "fd00::2:5"),
    ("::", "::"),
    ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
]


@pytest.mark.parametrize(("source", "destination"), ADDRESSES)
@pytest.mark.parametrize("protocol", [0, 1, 6, 17, 58, 255])
@pytest.mark.parametrize("length", [0, 1, 8, 20, 1480, 65515, 65535])
def test_pseudo_sum(source, destination, protocol, length):
    packed = ip_address(source).packed + ip_address(destination).packed
    expected = not_complemented(source, destination, protocol, length)
    assert checksum.pseudo_sum(poisoned(packed), 9, len(packed), protocol, length) == expected


LAYERS = {
    "4": IP(src="10.1.1.5", dst="10.1.2.5"),
    "4 with options": IP(src="10.1.1.5", dst="10.1.2.5", options=b"\x01" * 8),
    "6": IPv6(src="fd00::1:5", dst="fd00::2:5"),
}


@pytest.mark.parametrize("network", LAYERS)
@pytest.mark.parametrize(("transport", "protocol", "offset"), [(UDP, 17, 6), (TCP, 6, 16)])
def test_finish_gives_scapys_packet_at_every_payload_length(network, transport, protocol, offset):
    layer = LAYERS[network]
    start = len(bytes(layer))
    payload = random.Random(768).randbytes(40)
    for length in range(41):
        whole = bytes(layer / transport(sport=1, dport=9, chksum=None) / Raw(payload[:length]))
        partial = bytearray(whole)
        pseudo = not_complemented(layer.src, layer.dst, protocol, len(whole) - start)
        partial[start + offset : start + offset + 2] = pseudo.to_bytes(2, "big")
        buf = poisoned(partial)
        checksum.finish(buf, 9 + start, 9 + len(whole), 9 + start + offset)
        assert bytes(buf) == bytes(poisoned(whole))


@pytest.mark.parametrize("network", LAYERS)
@pytest.mark.parametrize(("transport", "protocol", "offset"), [(UDP, 17, 6), (TCP, 6, 16)])
def test_finish_stores_a_computed_zero_as_all_ones(network, transport, protocol, offset):
    layer = LAYERS[network]
    start = len(bytes(layer))
    with_zeros = bytes(layer / transport(sport=1, dport=9, chksum=0) / Raw(b"\0\0rest"))
    pseudo = not_complemented(layer.src, layer.dst, protocol, len(with_zeros) - start)
    field = start + offset
    partial = bytearray(with_zeros)
    partial[field : field + 2] = pseudo.to_bytes(2, "big")
    missing = reference.internet_checksum(bytes(partial[start:]))  # put into the data, makes the sum 0xFFFF
    partial[-6:-4] = missing.to_bytes(2, "big")
    assert reference.internet_checksum(bytes(partial[start:])) == 0
    expected = bytearray(partial)
    expected[field : field + 2] = b"\xff\xff"
    buf = poisoned(partial)
    checksum.finish(buf, 9 + start, 9 + len(partial), 9 + field)
    assert buf == poisoned(expected)


def test_finish_beyond_the_buffer_raises():
    with pytest.raises(IndexError):
        checksum.finish(bytearray(20), 0, 21, 6)
    with pytest.raises(IndexError):
        checksum.finish(bytearray(20), 0, 20, 19)


@pytest.mark.parametrize(
    ("old_checksum", "old", "new", "expected"),
    [
        (0xDD2F, 0x5555, 0x3285, 0x0000),  # the example of RFC 1624 section 4, where equation 2 of RFC 1141 errs
        (0x0000, 0x4011, 0x3F11, 0x0100),
        (0xFEFF, 0x4011, 0x3F11, 0x0000),
        (0xFFFF, 0x4011, 0x3F11, 0x0100),
        (0x1234, 0xABCD, 0xABCD, 0x1234),
    ],
)
def test_replace_word(old_checksum, old, new, expected):
    # 0x0000 and 0xFFFF are the same number; which one comes out matters only to whoever compares bytes
    assert checksum.replace_word(old_checksum, old, new) % 0xFFFF == expected % 0xFFFF


def test_replace_word_of_rfc_1624_is_zero_not_all_ones():
    assert checksum.replace_word(0xDD2F, 0x5555, 0x3285) == 0x0000


@given(st.lists(words, min_size=1, max_size=12), st.integers(0, 11), words)
def test_replace_word_equals_recomputation(under, index, new):
    index %= len(under)
    changed = [*under[:index], new, *under[index + 1 :]]
    before, after = (
        reference.internet_checksum(b"".join(word.to_bytes(2, "big") for word in each)) for each in (under, changed)
    )
    updated = checksum.replace_word(before, under[index], new)
    if any(changed):
        assert updated == after
    else:  # all zeros, which no header is: the sum is then the other zero
        assert (updated, after) == (0x0000, 0xFFFF)


@given(words, words, words)
def test_replace_word_can_be_undone(start, old, new):
    there_and_back = checksum.replace_word(checksum.replace_word(start, old, new), new, old)
    assert there_and_back % 0xFFFF == start % 0xFFFF


@pytest.mark.parametrize("ihl", range(5, 16))
@pytest.mark.parametrize("stale", [0, POISON << 8 | POISON, 0xFFFF])
def test_write_ipv4_header_checksum(ihl, stale):
    noops = bytes(IP(src="10.1.1.5", dst="10.1.2.5", options=b"\x01" * (4 * ihl - 20)) / Raw(b"payload"))
    for whole in (noops, ipv4(b"payload", options=random.Random(ihl).randbytes(4 * ihl - 20))):
        buf = poisoned(whole)
        buf[9 + 10 : 9 + 12] = stale.to_bytes(2, "big")
        checksum.write_ipv4_header_checksum(buf, 9, 4 * ihl)
        assert buf == poisoned(whole)


@given(st.binary(min_size=20, max_size=20))
def test_a_written_header_checksum_verifies(header):
    buf = bytearray(header)
    checksum.write_ipv4_header_checksum(buf, 0, 20)
    assert buf[:10] + buf[12:] == header[:10] + header[12:]
    assert reference.internet_checksum(bytes(buf)) in {0, 0xFFFF if not any(buf[:10] + buf[12:]) else 0}
