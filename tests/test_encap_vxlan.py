"""encap/vxlan.py: the 22 bytes, byte for byte, and every reason to refuse them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_encap import check_vxlan, ipv4, ipv6, poisoned
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN

from encap import vxlan
from encap.faults import Fault

OURS, OTHER, SENDER = (bytes.fromhex(digits) for digits in ("0242c0000201", "fe80c0000202", "0242c0000203"))
MAC_A, MAC_B = int.from_bytes(OURS, "big"), int.from_bytes(OTHER, "big")


def judge(datagram: bytes, vni: int = 1) -> int:
    """The verdict on `datagram` alone in its buffer, after comparing the one amid poison."""
    alone = vxlan.check(datagram, 0, len(datagram), vni, MAC_A, MAC_B)
    buf = poisoned(datagram)
    assert vxlan.check(buf, 9, len(datagram), vni, MAC_A, MAC_B) == alone
    assert buf == poisoned(datagram)
    return alone


@pytest.mark.parametrize(
    ("vni", "ethertype", "expected"),
    [
        (1, 0x0800, "0800000000000100" + OURS.hex() + SENDER.hex() + "0800"),
        (1, 0x86DD, "0800000000000100" + OURS.hex() + SENDER.hex() + "86dd"),
        (0, 0x0800, "0800000000000000" + OURS.hex() + SENDER.hex() + "0800"),
        (0x123456, 0x0800, "0800000012345600" + OURS.hex() + SENDER.hex() + "0800"),
        (0xFFFFFF, 0x86DD, "08000000ffffff00" + OURS.hex() + SENDER.hex() + "86dd"),
    ],
)
def test_header(vni, ethertype, expected):
    made = vxlan.header(vni, OURS, SENDER, ethertype)
    assert type(made) is bytes
    assert made == bytes.fromhex(expected)


@pytest.mark.parametrize("vni", [-1, 1 << 24, 1 << 32])
def test_header_refuses_a_vni_of_more_than_24_bits(vni):
    with pytest.raises(ValueError, match=f"VNI {vni} is not in"):
        vxlan.header(vni, OURS, SENDER, 0x0800)


@pytest.mark.parametrize("mac", [b"", b"\x02" * 5, b"\x02" * 7, b"02:42:c0:00:02:01"])
def test_header_refuses_an_address_of_another_length(mac):
    with pytest.raises(ValueError, match="6 bytes"):
        vxlan.header(1, mac, SENDER, 0x0800)
    with pytest.raises(ValueError, match="6 bytes"):
        vxlan.header(1, OURS, mac, 0x0800)


macs = st.binary(min_size=6, max_size=6)


@given(st.integers(0, vxlan.MAX_VNI), macs, macs, st.sampled_from([4, 6]))
def test_scapy_reads_what_header_wrote(vni, destination, source, version):
    inner, layer = (ipv4(b"data", 253), IP) if version == 4 else (ipv6(b"data", 253), IPv6)
    frame = VXLAN(vxlan.header(vni, destination, source, {4: 0x0800, 6: 0x86DD}[version]) + inner)
    assert (int(frame.flags), frame.reserved1, frame.vni, frame.reserved2) == (8, 0, vni, 0)
    assert (frame[Ether].dst, frame[Ether].src) == (destination.hex(":"), source.hex(":"))
    assert bytes(frame[Ether].payload) == inner
    assert frame[Ether].haslayer(layer)


@given(st.integers(0, vxlan.MAX_VNI), macs, macs, st.sampled_from([4, 6]))
def test_header_is_what_scapy_writes_and_check_accepts_it(vni, destination, source, version):
    ethertype = {4: 0x0800, 6: 0x86DD}[version]
    made = vxlan.header(vni, destination, source, ethertype)
    assert made == bytes(VXLAN(vni=vni, flags=8) / Ether(dst=destination.hex(":"), src=source.hex(":"), type=ethertype))
    datagram = made + bytes([version << 4])
    number = int.from_bytes(destination, "big")
    assert vxlan.check(datagram, 0, 23, vni, number, number) == 0


INNER4, INNER6 = ipv4(b"payload"), ipv6(b"payload")
V4 = vxlan.header(1, OURS, SENDER, 0x0800) + INNER4
V6 = vxlan.header(1, OTHER, SENDER, 0x86DD) + INNER6


def changed(at: int, octets: str, datagram: bytes = V4) -> bytes:
    new = bytes.fromhex(octets)
    return datagram[:at] + new + datagram[at + len(new) :]


@pytest.mark.parametrize(
    ("name", "datagram", "expected"),
    [
        ("IPv4 to the first address", V4, 0),
        ("IPv6 to the second address", V6, 0),
        ("IPv4 to the second address", changed(8, OTHER.hex()), 0),
        ("any source address", changed(14, "ffffffffffff"), 0),
        ("empty", b"", Fault.TRUNCATED),
        ("the VXLAN header alone", V4[:8], Fault.TRUNCATED),
        ("no inner packet", V4[:22], Fault.TRUNCATED),
        ("one byte of an inner packet", V4[:23], 0),
        ("all flags but I", changed(0, "f7"), Fault.BAD_FLAGS),
        ("no flags", changed(0, "00"), Fault.BAD_FLAGS),
        ("every flag", changed(0, "ff"), 0),
        ("GBP: G bit and a group", changed(0, "88000abc"), 0),
        ("GBP: G, D and A bits and a group", changed(0, "8848ffff"), 0),
        ("every bit reserved in front", changed(1, "ffffff"), 0),
        ("every bit reserved behind the VNI", changed(7, "ff"), 0),
        ("VNI 0", changed(4, "000000"), Fault.WRONG_VNI),
        ("VNI 2", changed(4, "000002"), Fault.WRONG_VNI),
        ("VNI 1 one byte off", changed(4, "00000001"), Fault.WRONG_VNI),
        ("VNI with a high bit", changed(4, "800001"), Fault.WRONG_VNI),
        ("the sender's own address", changed(8, SENDER.hex()), Fault.WRONG_MAC),
        ("broadcast", changed(8, "ffffffffffff"), Fault.WRONG_MAC),
        ("ours but the first byte", changed(8, "03"), Fault.WRONG_MAC),
        ("ours but the last byte", changed(13, "02"), Fault.WRONG_MAC),
        ("half of one and half of the other", changed(8, "0242c0000202"), Fault.WRONG_MAC),
        ("ARP", changed(20, "0806"), Fault.NOT_IP),
        ("802.1Q", changed(20, "8100"), Fault.NOT_IP),
        ("IPv6 said, IPv4 sent", changed(20, "86dd"), Fault.NOT_IP),
        ("IPv4 said, IPv6 sent", changed(20, "0800", V6), Fault.NOT_IP),
        ("version 0", changed(22, "05"), Fault.NOT_IP),
        ("version 5", changed(22, "55"), Fault.NOT_IP),
        ("version 15", changed(22, "f5"), Fault.NOT_IP),
        ("flags before VNI", changed(0, "0000000000000200"), Fault.BAD_FLAGS),
        ("VNI before MAC", changed(4, "00000200ffffffffffff"), Fault.WRONG_VNI),
        ("MAC before ethertype", changed(8, "ffffffffffff" + SENDER.hex() + "0806"), Fault.WRONG_MAC),
        ("MAC before the missing packet", changed(8, "ffffffffffff")[:22], Fault.WRONG_MAC),
    ],
)
def test_check(name, datagram, expected):
    assert judge(datagram) == expected
    assert check_vxlan(datagram, 1, {OURS, OTHER}) == expected


@pytest.mark.parametrize("datagram", [V4, V6])
def test_check_at_every_length(datagram):
    for length in range(len(datagram) + 1):
        assert judge(datagram[:length]) == (Fault.TRUNCATED if length <= 22 else 0), length


@pytest.mark.parametrize("vni", [0, 1, 0x7FFFFF, 0x800000, 0xFFFFFF])
def test_check_wants_the_vni_and_no_other(vni):
    for bit in range(24):
        datagram = vxlan.header(vni, OURS, SENDER, 0x0800) + INNER4
        assert judge(datagram, vni) == 0
        assert judge(datagram, vni ^ 1 << bit) == Fault.WRONG_VNI


def test_check_with_every_bit_of_the_header_flipped():
    for bit in range(22 * 8):
        datagram = bytearray(V4)
        datagram[bit // 8] ^= 0x80 >> bit % 8
        if bit == 4:
            expected = Fault.BAD_FLAGS
        elif 32 <= bit < 56:
            expected = Fault.WRONG_VNI
        elif 64 <= bit < 112:
            expected = Fault.WRONG_MAC
        elif bit >= 160:
            expected = Fault.NOT_IP
        else:
            expected = 0
        assert judge(bytes(datagram)) == expected, bit


def test_check_with_an_address_of_all_ones():
    everyone = (1 << 48) - 1
    datagram = changed(8, "ff" * 6)
    assert vxlan.check(datagram, 0, len(datagram), 1, MAC_A, everyone) == 0
    assert vxlan.check(datagram, 0, len(datagram), 1, everyone, MAC_A) == 0


plausible = st.builds(
    lambda flags, reserved, vni, last, to, ethertype, inner, length: (
        bytes([flags]) + reserved + vni + bytes([last]) + to + SENDER + ethertype + inner
    )[:length],
    st.sampled_from([0, 0x08, 0x88, 0xFF]),
    st.binary(min_size=3, max_size=3),
    st.sampled_from([b"\0\0\1", b"\0\0\2", b"\1\0\1"]),
    st.integers(0, 255),
    st.sampled_from([OURS, OTHER, SENDER]),
    st.sampled_from([b"\x08\0", b"\x86\xdd", b"\x08\x06"]),
    st.sampled_from([INNER4, INNER6, b"", b"\x40", b"\x60", b"\x50"]),
    st.sampled_from([100] * 4 + list(range(30))),
)


@given(st.one_of(plausible, st.binary(max_size=60)))
def test_check_agrees_with_its_twin_on_anything(datagram):
    assert judge(datagram) == check_vxlan(datagram, 1, {OURS, OTHER})


def test_constants():
    assert (vxlan.VXLAN_HEADER_LENGTH, vxlan.HEADER_LENGTH, vxlan.FLAG_VNI_VALID) == (8, 22, 0x08)
    assert (vxlan.DEFAULT_VNI, vxlan.MAX_VNI) == (1, 0xFFFFFF)
