"""Keys and values of leases, byte by byte as flannel has them."""

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.lease import (
    Lease,
    LeaseAttributes,
    LeaseError,
    VtepData,
    derive_vtep_mac,
    format_key,
    format_mac,
    parse_attributes,
    parse_key,
    parse_mac,
)

MAC = bytes.fromhex("02fdc0a80102")


@pytest.mark.parametrize(
    ("key", "subnet", "ipv6_subnet"),
    [
        ("10.5.34.0-24", "10.5.34.0/24", None),
        ("10.5.34.0-24&fc00:0:0:1::-64", "10.5.34.0/24", "fc00:0:0:1::/64"),
        ("0.0.0.0-0&fc00:0:0:1::-64", None, "fc00:0:0:1::/64"),
        ("10.5.34.4-30&fc00::4-126", "10.5.34.4/30", "fc00::4/126"),
        ("10.0.0.0-8", "10.0.0.0/8", None),
    ],
)
def test_keys(key, subnet, ipv6_subnet):
    pair = (IPv4Network(subnet) if subnet else None, IPv6Network(ipv6_subnet) if ipv6_subnet else None)
    assert parse_key(key) == pair
    assert format_key(*pair) == key
    assert Lease(*pair, LeaseAttributes(IPv4Address("192.0.2.1"), None, "udp")).key == key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "-",
        "&",
        "config",
        "10.5.34.0",
        "10.5.34.0-",
        "-24",
        "10.5.34.0/24",
        "10.5.34.0-33",
        "10.5.34.0--24",
        "10.5.34.0-+24",
        "10.5.34.0- 24",
        "10.5.34.0-024",
        "10.5.34.0-٢٤",
        "10.5.34.0-²",
        "10.5.34.1-24",
        "010.5.34.0-24",
        " 10.5.34.0-24",
        "10.5.34.0-24\n",
        "10.5.34.0-24&",
        "&fc00::-64",
        "10.5.34.0-24&10.5.35.0-24",
        "fc00::-64",
        "fc00::-64&fc00::-64",
        "10.5.34.0-24&fc00::1-64",
        "10.5.34.0-24&fc00::-129",
        "10.5.34.0-24&FC00::-64",
        "10.5.34.0-24&fc00:0::-64",
        "10.5.34.0-24&fc00::-64&fc01::-64",
        "10.5.34.0-24&fe80::%1-64",
        "0.0.0.0-0",  # the zero value: neither family
        "0.0.0.0-0&",
        "0.0.0.0-0&0.0.0.0-0",
        "10.5.34.0-255.255.255.0",
        ".10.5.34.0-24.x.tmp",
    ],
)
def test_what_is_not_a_key_is_named(key):
    with pytest.raises(LeaseError) as caught:
        parse_key(key)
    assert repr(key) in str(caught.value)


def test_a_key_needs_a_subnet():
    with pytest.raises(ValueError, match="a lease needs a subnet"):
        format_key(None, None)


PUBLIC = IPv4Address("192.168.1.2")
PUBLIC6 = IPv6Address("fd00::2")


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            LeaseAttributes(PUBLIC, None, "vxlan", VtepData(MAC, 1)),
            (
                '{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"vxlan",'
                '"BackendData":{"VNI":1,"VtepMAC":"02:fd:c0:a8:01:02"}}'
            ),
        ),
        (
            LeaseAttributes(PUBLIC, PUBLIC6, "vxlan", VtepData(MAC, 1), VtepData(b"\x06\0\0\0\0\x0f", 16777215)),
            (
                '{"PublicIP":"192.168.1.2","PublicIPv6":"fd00::2","BackendType":"vxlan",'
                '"BackendData":{"VNI":1,"VtepMAC":"02:fd:c0:a8:01:02"},'
                '"BackendV6Data":{"VNI":16777215,"VtepMAC":"06:00:00:00:00:0f"}}'
            ),
        ),
        (
            LeaseAttributes(None, PUBLIC6, "vxlan", None, VtepData(MAC, 0)),
            (
                '{"PublicIP":"0.0.0.0","PublicIPv6":"fd00::2","BackendType":"vxlan",'
                '"BackendV6Data":{"VNI":0,"VtepMAC":"02:fd:c0:a8:01:02"}}'
            ),
        ),
        (LeaseAttributes(PUBLIC, None, "udp"), '{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"udp"}'),
        (
            LeaseAttributes(PUBLIC, None, "vxlan", VtepData(MAC)),
            (
                '{"PublicIP":"192.168.1.2","PublicIPv6":null,"BackendType":"vxlan",'
                '"BackendData":{"VNI":null,"VtepMAC":"02:fd:c0:a8:01:02"}}'
            ),
        ),
    ],
)
def test_values_are_what_flannel_writes(attributes, text):
    assert attributes.to_json() == text
    assert parse_attributes(text) == attributes


@pytest.mark.parametrize(
    ("text", "attributes"),
    [
        (
            '{"PublicIP":"192.168.1.2","BackendType":"vxlan","BackendData":{"VtepMAC":"2:fd:C0:a8:1:2"}}',
            LeaseAttributes(PUBLIC, None, "vxlan", VtepData(MAC, None)),
        ),
        (
            '{"PublicIP":"192.168.1.2","BackendType":"vxlan","BackendData":null,"BackendV6Data":{}}',
            LeaseAttributes(PUBLIC, None, "vxlan"),
        ),
        ('{"PublicIP":"192.168.1.2","BackendData":"x"}', LeaseAttributes(PUBLIC, None, "")),
        ('{"PublicIP":"192.168.1.2","BackendType":null,"New":1}', LeaseAttributes(PUBLIC, None, "")),
        ('{"PublicIP":null,"PublicIPv6":"fd00::2","BackendType":"udp"}', LeaseAttributes(None, PUBLIC6, "udp")),
        ('{"PublicIP":"192.168.1.2","PublicIPv6":"::","BackendType":"udp"}', LeaseAttributes(PUBLIC, None, "udp")),
        (
            ' {"BackendData":{"VtepMAC":"02:fd:c0:a8:01:02","VNI":"1"},\n"PublicIP":"192.168.1.2"}\n',
            LeaseAttributes(PUBLIC, None, "", VtepData(MAC, None)),
        ),
    ],
)
def test_values_that_others_write(text, attributes):
    assert parse_attributes(text) == attributes


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["not JSON"]),
        ('{"PublicIP":"192.168.1.2","Backe', ["not JSON"]),
        ("[]", ["not a JSON object"]),
        ("null", ["not a JSON object"]),
        ("{}", ["PublicIP", "PublicIPv6"]),
        ('{"PublicIP":"0.0.0.0","PublicIPv6":null}', ["PublicIP", "PublicIPv6"]),
        ('{"PublicIP":"fd00::2"}', ["PublicIP", "'fd00::2'"]),
        ('{"PublicIP":""}', ["PublicIP", "''"]),
        ('{"PublicIP":["192.168.1.2"]}', ["PublicIP", "['192.168.1.2']"]),
        ('{"PublicIP":3232235778}', ["PublicIP", "3232235778"]),
        ('{"PublicIP":true}', ["PublicIP", "True"]),
        ('{"PublicIP":"192.168.1.2","PublicIPv6":"192.168.1.2"}', ["PublicIPv6", "'192.168.1.2'"]),
        ('{"PublicIP":"192.168.1.2","BackendData":{"VtepMAC":"02:fd"}}', ["'02:fd'", "MAC"]),
        ('{"PublicIP":"192.168.1.2","BackendData":{"VtepMAC":null}}', ["None", "MAC"]),
        ('{"PublicIP":"192.168.1.2","BackendV6Data":{"VtepMAC":7}}', ["7", "MAC"]),
    ],
)
def test_what_is_not_a_value_is_named(text, named):
    with pytest.raises(LeaseError) as caught:
        parse_attributes(text)
    assert [part for part in named if part not in str(caught.value)] == []


def test_a_value_nested_too_deeply_to_be_read():
    with pytest.raises(LeaseError):
        parse_attributes("[" * 200_000)


@pytest.mark.parametrize(
    ("text", "mac"),
    [
        ("02:42:ac:11:00:02", "0242ac110002"),
        ("02:42:AC:11:00:02", "0242ac110002"),
        ("2:42:ac:11:0:2", "0242ac110002"),
        ("ff:ff:ff:ff:ff:ff", "ffffffffffff"),
    ],
)
def test_macs(text, mac):
    assert parse_mac(text) == bytes.fromhex(mac)
    assert parse_mac(format_mac(bytes.fromhex(mac))) == bytes.fromhex(mac)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "02:42:ac:11:00",
        "02:42:ac:11:00:02:03",
        "02:42:ac:11:00:",
        "02:42:ac:11:00:002",
        "02:42:ac:11:00:0g",
        "02-42-ac-11-00-02",
        "0242ac110002",
        "02:42:ac:11:00:-2",
        "02:42:ac:11:00:+2",
        "02:42:ac:11:00: 2",
        "02:42:ac:11:00:2\n",
        "02:42:ac:11:00:٠٢",
        None,
        2,
        b"02:42:ac:11:00:02",
        ["02", "42", "ac", "11", "00", "02"],
    ],
)
def test_what_is_not_a_mac_is_named(text):
    with pytest.raises(LeaseError) as caught:
        parse_mac(text)
    assert repr(text) in str(caught.value)


def networks(kind, bits, shortest):
    return st.builds(
        lambda length, address: kind(((address >> (bits - length)) << (bits - length), length)),
        st.integers(shortest, bits),
        st.integers(0, 2**bits - 1),
    )


SUBNETS = st.tuples(
    st.none() | networks(IPv4Network, 32, 1),
    st.none() | networks(IPv6Network, 128, 0),
).filter(any)
DATA = st.none() | st.builds(VtepData, st.binary(min_size=6, max_size=6), st.none() | st.integers(0, 2**24 - 1))
ATTRIBUTES = st.builds(
    LeaseAttributes,
    st.none() | st.integers(1, 2**32 - 1).map(IPv4Address),
    st.none() | st.integers(1, 2**128 - 1).map(IPv6Address),
    st.sampled_from(["vxlan", "udp", "", "host-gw"]),
    DATA,
    DATA,
).filter(lambda attributes: attributes.public_ip or attributes.public_ipv6)


@given(SUBNETS)
def test_keys_survive_a_round_trip(pair):
    assert parse_key(format_key(*pair)) == pair


@given(ATTRIBUTES)
def test_values_survive_a_round_trip(attributes):
    assert parse_attributes(attributes.to_json()) == attributes


@given(st.text(max_size=40) | st.from_regex(r"[0-9.]{7,12}-[0-9]{1,2}(&[0-9a-f:]{2,12}-[0-9]{1,3})?", fullmatch=True))
def test_a_text_is_a_key_or_a_lease_error(text):
    try:
        pair = parse_key(text)
    except LeaseError:
        return
    assert format_key(*pair) == text


@pytest.mark.parametrize(
    ("address", "mac"),
    [
        ("192.0.2.1", "02:fd:c0:00:02:01"),
        ("255.255.255.255", "02:fd:ff:ff:ff:ff"),
        ("10.0.0.1", "02:fd:0a:00:00:01"),
        # printf '20010db8000000000000000000000001' | xxd -r -p | sha256sum
        ("2001:db8::1", "06:1e:03:d7:e1:ca"),
    ],
)
def test_derived_macs(address, mac):
    assert format_mac(derive_vtep_mac(ip_address(address))) == mac


@given(st.integers(0, 2**32 - 1).map(IPv4Address) | st.integers(0, 2**128 - 1).map(IPv6Address))
def test_derived_macs_are_stable_locally_administered_and_unicast(address):
    mac = derive_vtep_mac(address)
    assert mac == derive_vtep_mac(ip_address(str(address)))
    assert len(mac) == 6
    assert mac[0] & 0b11 == 0b10


def at(ipv4, ipv6=None) -> LeaseAttributes:
    return LeaseAttributes(IPv4Address(ipv4) if ipv4 else None, IPv6Address(ipv6) if ipv6 else None, "vxlan")


@pytest.mark.parametrize(
    ("holder", "node", "held"),
    [
        (at("192.0.2.1"), at("192.0.2.1"), True),
        (at("192.0.2.1"), replace(at("192.0.2.1"), backend_type="udp", backend_data=VtepData(MAC)), True),
        (at("192.0.2.1"), at("192.0.2.1", "fd00::1"), True),
        (at("192.0.2.1", "fd00::2"), at("192.0.2.1", "fd00::1"), True),
        (at("192.0.2.1"), at("192.0.2.2"), False),
        (at("192.0.2.1", "fd00::1"), at("192.0.2.2", "fd00::1"), False),
        (at("192.0.2.1", "fd00::1"), at(None, "fd00::1"), False),
        (at(None, "fd00::1"), at("192.0.2.1", "fd00::1"), False),
        (at(None, "fd00::1"), at(None, "fd00::1"), True),
        (at(None, "fd00::1"), at(None, "fd00::2"), False),
    ],
)
def test_who_holds_a_lease(holder, node, held):
    assert Lease(IPv4Network("10.5.34.0/24"), None, holder).held_by(node) is held
