"""VXLAN framing (RFC 7348): what stands between the outer UDP header and the inner IP packet.

Layout of the 22 bytes, as a kernel VXLAN device with a permanent neighbour entry emits them:

    0   u8   flags        0x08: the I bit, the VNI is valid
    1   u24  reserved     zero; the kernel drops frames with stray bits (drivers/net/vxlan/vxlan_core.c, vxlan_rcv)
    4   u24  VNI
    7   u8   reserved     zero
    8   mac  destination  the receiving VTEP's address; a kernel peer drops frames for any other
    14  mac  source       the sending VTEP's address
    20  u16  ethertype    0x0800 or 0x86DD

All of it but the ethertype's family depends on the peer alone, so it is made once for each route (`header`) and copied
in front of each packet.
"""

from encap import fields
from encap.faults import Fault
from encap.fields import ETHERTYPE_IPV4, ETHERTYPE_IPV6, Octets

DEFAULT_PORT = 8472
DEFAULT_VNI = 1
MAX_VNI = (1 << 24) - 1
VXLAN_HEADER_LENGTH = 8
HEADER_LENGTH = 22
FLAG_VNI_VALID = 0x08

_BAD_FLAGS = int(Fault.BAD_FLAGS)
_WRONG_VNI = int(Fault.WRONG_VNI)
_WRONG_MAC = int(Fault.WRONG_MAC)
_NOT_IP = int(Fault.NOT_IP)
_TRUNCATED = int(Fault.TRUNCATED)
_HEADER_LENGTH = HEADER_LENGTH
_IPV4 = ETHERTYPE_IPV4
_IPV6 = ETHERTYPE_IPV6
_FLAG_VNI_VALID = FLAG_VNI_VALID


def header(vni: int, destination: bytes, source: bytes, ethertype: int) -> bytes:
    """The 22 bytes for one route. `destination` and `source` are MAC addresses of 6 bytes.

    Raises ValueError if the VNI is not in 0..2**24 - 1 or an address has another length.
    """
    if not 0 <= vni <= MAX_VNI:
        raise ValueError(f"VNI {vni} is not in 0..{MAX_VNI}")
    if len(destination) != 6 or len(source) != 6:
        raise ValueError("a MAC address has 6 bytes")
    flags_and_reserved = FLAG_VNI_VALID << 24
    return (
        flags_and_reserved.to_bytes(4, "big")
        + (vni << 8).to_bytes(4, "big")
        + destination
        + source
        + ethertype.to_bytes(2, "big")
    )


def check(buf: Octets, at: int, length: int, vni: int, mac_a: int, mac_b: int) -> int:
    """Judge the 22 bytes at the start of the datagram buf[at:at + length]: 0, or a Fault.

    The I flag must be set and the VNI be `vni`; other flag and reserved bits are ignored, as RFC 7348 section 5 says.
    The inner destination must be one of the two addresses `mac_a`, `mac_b`, given as 48-bit numbers. The ethertype
    must be IP and agree with the version in the inner packet's first byte.
    """
    if length < _HEADER_LENGTH:
        return _TRUNCATED
    if not buf[at] & _FLAG_VNI_VALID:
        return _BAD_FLAGS
    if fields.load32(buf, at + 4) >> 8 != vni:
        return _WRONG_VNI
    destination = fields.load64(buf, at + 8) >> 16
    if destination != mac_a and destination != mac_b:
        return _WRONG_MAC
    if length == _HEADER_LENGTH:
        return _TRUNCATED
    ethertype = fields.load16(buf, at + 20)
    version = buf[at + _HEADER_LENGTH] >> 4
    if not ((ethertype == _IPV4 and version == 4) or (ethertype == _IPV6 and version == 6)):
        return _NOT_IP
    return 0
