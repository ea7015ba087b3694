"""flannel's network configuration: its rules, its defaults, and what the texts of errors name."""

import json
from ipaddress import IPv4Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.config import Backend, ConfigError, NetworkConfig, Pool, parse_config

V4 = {"Network": "10.0.0.0/8"}
V6 = {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": "fc00::/48"}


def parse(**keys) -> NetworkConfig:
    return parse_config(json.dumps(keys))


def pool(network: str, length: int, minimum: str, maximum: str) -> Pool:
    return Pool(ip_network(network), length, ip_address(minimum), ip_address(maximum))


def test_the_example_of_flannels_documentation():
    text = (
        '{"Network":"10.0.0.0/8","SubnetLen":20,"SubnetMin":"10.10.0.0","SubnetMax":"10.99.0.0",'
        '"Backend":{"Type":"udp","Port":7890}}'
    )
    config = parse_config(text)
    assert config == NetworkConfig(
        pool("10.0.0.0/8", 20, "10.10.0.0", "10.99.0.0"), None, Backend(type="udp", vni=1, port=7890, mtu=None)
    )
    assert config.warnings == ()
    assert config.pools == (config.ipv4,)


@pytest.mark.parametrize(
    ("network", "keys", "expected"),
    [
        ("10.0.0.0/8", {}, (24, "10.0.1.0", "10.255.255.0")),
        ("0.0.0.0/0", {}, (24, "0.0.1.0", "255.255.255.0")),
        ("10.1.0.0/22", {}, (24, "10.1.1.0", "10.1.3.0")),
        ("10.1.0.0/23", {}, (25, "10.1.0.128", "10.1.1.128")),
        ("10.1.0.0/24", {}, (26, "10.1.0.64", "10.1.0.192")),
        ("10.1.0.16/28", {}, (30, "10.1.0.20", "10.1.0.28")),
        ("10.1.0.0/16", {"SubnetLen": 0}, (24, "10.1.1.0", "10.1.255.0")),
        ("10.1.0.0/16", {"SubnetLen": 18}, (18, "10.1.64.0", "10.1.192.0")),
        ("10.1.0.0/16", {"SubnetLen": 30}, (30, "10.1.0.4", "10.1.255.252")),
        ("10.1.0.0/16", {"SubnetMin": "10.1.0.0"}, (24, "10.1.0.0", "10.1.255.0")),
        ("10.1.0.0/16", {"SubnetMax": "10.1.1.0"}, (24, "10.1.1.0", "10.1.1.0")),
        ("10.1.0.0/16", {"SubnetMin": None, "SubnetMax": None, "SubnetLen": None}, (24, "10.1.1.0", "10.1.255.0")),
    ],
)
def test_defaults_of_ipv4(network, keys, expected):
    config = parse(Network=network, **keys)
    assert config.ipv4 == pool(network, *expected)
    assert config.ipv6 is None
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("network", "keys", "expected"),
    [
        ("fc00::/48", {}, (64, "fc00:0:0:1::", "fc00:0:0:ffff::")),
        ("fc00::/62", {}, (64, "fc00:0:0:1::", "fc00:0:0:3::")),
        ("fc00::/63", {}, (65, "fc00:0:0:0:8000::", "fc00:0:0:1:8000::")),
        ("fc00::/64", {}, (66, "fc00:0:0:0:4000::", "fc00:0:0:0:c000::")),
        ("fc00::10/124", {}, (126, "fc00::14", "fc00::1c")),
        ("fc00::/48", {"IPv6SubnetLen": 50}, (50, "fc00:0:0:4000::", "fc00:0:0:c000::")),
        ("fc00::/48", {"IPv6SubnetLen": 126}, (126, "fc00::4", "fc00:0:0:ffff:ffff:ffff:ffff:fffc")),
        ("fc00::/48", {"IPv6SubnetMin": "fc00::", "IPv6SubnetMax": "fc00:0:0:2::"}, (64, "fc00::", "fc00:0:0:2::")),
    ],
)
def test_defaults_of_ipv6(network, keys, expected):
    config = parse(**V6 | {"IPv6Network": network} | keys)
    assert config.ipv6 == pool(network, *expected)
    assert config.ipv4 is None
    assert config.pools == (config.ipv6,)


def test_both_families_and_the_order_of_pools():
    config = parse(EnableIPv6=True, Network="10.1.0.0/16", IPv6Network="fc00::/48")
    assert config.pools == (config.ipv4, config.ipv6)
    assert [one.network.version for one in config.pools] == [4, 6]


def test_a_family_that_is_off_is_not_looked_at():
    config = parse(Network="10.1.0.0/16", IPv6Network="nonsense", IPv6SubnetLen=1)
    assert config.ipv6 is None
    config = parse(**V6 | {"Network": "nonsense"})
    assert config.ipv4 is None


@given(st.integers(0, 28), st.integers(0, 2**32 - 1), st.data())
def test_bounds_follow_from_network_and_length(prefix, address, data):
    network = IPv4Network((address & (0xFFFFFFFF << (32 - prefix)), prefix))
    length = data.draw(st.integers(prefix + 2, 30))
    found = parse(Network=str(network), SubnetLen=length).ipv4
    size = 2 ** (32 - length)
    assert found == Pool(network, length, network.network_address + size, network.broadcast_address - (size - 1))
    assert found.fits(IPv4Network((int(found.minimum), length)))
    assert found.fits(IPv4Network((int(found.maximum), length)))
    assert not found.fits(IPv4Network((int(network.network_address), length)))


@pytest.mark.parametrize(
    ("subnet", "fits"),
    [
        ("10.1.1.0/24", True),
        ("10.1.255.0/24", True),
        ("10.1.0.0/24", False),
        ("10.2.0.0/24", False),
        ("10.1.2.0/23", False),
        ("10.1.1.0/25", False),
        ("fc00::/24", False),
    ],
)
def test_what_fits_a_pool(subnet, fits):
    assert parse(Network="10.1.0.0/16").ipv4.fits(ip_network(subnet)) is fits


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (None, Backend("udp", 1, 8285, None)),
        ({}, Backend("udp", 1, 8285, None)),
        ({"Port": 0}, Backend("udp", 1, 8285, None)),
        ({"Type": "udp"}, Backend("udp", 1, 8285, None)),
        ({"Type": "vxlan"}, Backend("vxlan", 1, 8472, None)),
        ({"Type": "VXLAN"}, Backend("vxlan", 1, 8472, None)),
        ({"Type": "vxlan", "Port": 0}, Backend("vxlan", 1, 8472, None)),
        ({"Type": "vxlan", "Port": 4789, "VNI": 77, "MTU": 9000}, Backend("vxlan", 77, 4789, 9000)),
        ({"Type": "vxlan", "VNI": 0, "MTU": 0}, Backend("vxlan", 0, 8472, None)),
        ({"Type": "vxlan", "VNI": 2**24 - 1, "Port": 65535}, Backend("vxlan", 2**24 - 1, 65535, None)),
        ({"tYPE": "vxlan", "vni": 3, "PORT": 99, "mtu": 1400}, Backend("vxlan", 3, 99, 1400)),
        ({"Type": "vxlan", "GBP": False, "DirectRouting": False, "Learning": False}, Backend("vxlan", 1, 8472, None)),
    ],
)
def test_backends(backend, expected):
    config = parse(**V4, Backend=backend)
    assert config.backend == expected
    assert config.warnings == ()


def test_without_a_backend_it_is_udp():
    assert parse(**V4).backend == Backend("udp", 1, 8285, None)


@pytest.mark.parametrize("change", [str.lower, str.upper, str.swapcase])
def test_keys_match_without_regard_to_case(change):
    keys = {
        "EnableIPv4": True,
        "EnableIPv6": True,
        "EnableNFTables": True,
        "Network": "10.1.0.0/16",
        "SubnetLen": 26,
        "SubnetMin": "10.1.4.0",
        "SubnetMax": "10.1.5.0",
        "IPv6Network": "fc00::/48",
        "IPv6SubnetLen": 60,
        "IPv6SubnetMin": "fc00:0:0:10::",
        "IPv6SubnetMax": "fc00:0:0:20::",
        "Backend": {"Type": "vxlan"},
    }
    plain = parse(**keys)
    config = parse(**{change(key): value for key, value in keys.items()})
    assert config == plain
    assert plain.ipv4 == pool("10.1.0.0/16", 26, "10.1.4.0", "10.1.5.0")
    assert plain.ipv6 == pool("fc00::/48", 60, "fc00:0:0:10::", "fc00:0:0:20::")
    assert config.warnings == plain.warnings == ()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (V4 | {"Netwrok": "10.2.0.0/16"}, ["Netwrok", "ignored"]),
        (V4 | {"Backend": {"Type": "vxlan", "Prot": 1}}, ["Backend", "Prot", "ignored"]),
        (V4 | {"Backend": {"Type": "udp", "VNI": 5}}, ["Backend", "VNI", "ignored"]),
        (V4 | {"Backend": {"Type": "vxlan", "GBP": True}}, ["Backend.GBP", "not carried out"]),
        (V4 | {"Backend": {"Type": "vxlan", "directrouting": True}}, ["Backend.DirectRouting", "not carried out"]),
        (V4 | {"Backend": {"Type": "vxlan", "Learning": True}}, ["Backend.Learning", "not carried out"]),
        ({"Network": "10.1.2.3/16"}, ["Network", "10.1.2.3/16", "host bits", "10.1.0.0/16"]),
        (V6 | {"IPv6Network": "fc00::1/48"}, ["IPv6Network", "fc00::1/48", "host bits", "fc00::/48"]),
    ],
)
def test_warnings_name_key_and_value(keys, named):
    (warning,) = parse(**keys).warnings
    assert [part for part in named if part not in warning] == []


def test_host_bits_are_masked():
    assert parse(Network="10.1.2.3/16").ipv4 == pool("10.1.0.0/16", 24, "10.1.1.0", "10.1.255.0")
    assert parse(**V6 | {"IPv6Network": "FC00:0:0::/48"}).warnings == (), "another spelling is not host bits"


def test_an_ignored_key_changes_nothing():
    assert parse(**V4, Extra=[1, {}]) == parse(**V4)


@pytest.mark.parametrize(
    "text", ["", "{", "{'Network':'10.0.0.0/8'}", "nul", '{"Network":"10.0.0.0/8"}}', "\x00", "10.0.0.0/8"]
)
def test_what_is_not_json(text):
    with pytest.raises(ConfigError, match="the network configuration is not JSON: "):
        parse_config(text)


def test_json_nested_too_deeply_to_be_read():
    with pytest.raises(ConfigError):
        parse_config("[" * 200_000)


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "list"), ("1", "int"), ('"x"', "str"), ("null", "NoneType"), ("true", "bool")]
)
def test_json_that_is_no_object(text, kind):
    with pytest.raises(ConfigError, match=f"^the network configuration must be a JSON object, not {kind}$"):
        parse_config(text)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, ["IPv4", "Network", "missing"]),
        ({"Network": None}, ["IPv4", "Network", "missing"]),
        (V4 | {"EnableIPv6": True}, ["IPv6", "IPv6Network", "missing"]),
        ({"EnableIPv4": False}, ["EnableIPv4", "EnableIPv6"]),
        ({"EnableIPv4": "true"}, ["EnableIPv4", "'true'"]),
        ({"EnableIPv4": 1}, ["EnableIPv4", "1"]),
        (V4 | {"EnableIPv6": 0}, ["EnableIPv6", "0"]),
        # networks
        ({"Network": "10.0.0.0/29"}, ["Network", "10.0.0.0/29", "/28"]),
        ({"Network": "10.0.0.0"}, ["Network", "10.0.0.0", "/28"]),
        ({"Network": "10.0.0.0/33"}, ["Network", "'10.0.0.0/33'"]),
        ({"Network": "10.0.0/8"}, ["Network", "'10.0.0/8'"]),
        ({"Network": ""}, ["Network", "''"]),
        ({"Network": 167772160}, ["Network", "167772160"]),
        ({"Network": True}, ["Network", "True"]),
        ({"Network": ["10.0.0.0/8"]}, ["Network", "['10.0.0.0/8']"]),
        ({"Network": {"a": 1}}, ["Network", "{'a': 1}"]),
        ({"Network": "fc00::/48"}, ["Network", "fc00::/48", "IPv4"]),
        (V6 | {"IPv6Network": "10.0.0.0/8"}, ["IPv6Network", "10.0.0.0/8", "IPv6 network"]),
        (V6 | {"IPv6Network": "fc00::/125"}, ["IPv6Network", "fc00::/125", "/124"]),
        (V6 | {"IPv6Network": "fc00::%eth0/48"}, ["IPv6Network", "fc00::%eth0/48"]),
        (V6 | {"IPv6SubnetMin": "fc00:0:0:1::%eth0"}, ["IPv6SubnetMin", "fc00:0:0:1::%eth0"]),
        (V6 | {"IPv6Network": "fc00::/129"}, ["IPv6Network", "'fc00::/129'"]),
        # lengths
        (V4 | {"SubnetLen": 9}, ["SubnetLen is 9", "10.0.0.0/8", "10..30"]),
        (V4 | {"SubnetLen": 31}, ["SubnetLen is 31", "10..30"]),
        (V4 | {"SubnetLen": 33}, ["SubnetLen is 33"]),
        (V4 | {"SubnetLen": -1}, ["SubnetLen is -1"]),
        (V4 | {"SubnetLen": "24"}, ["SubnetLen", "'24'"]),
        (V4 | {"SubnetLen": 24.0}, ["SubnetLen", "24.0"]),
        (V4 | {"SubnetLen": True}, ["SubnetLen", "True"]),
        (V4 | {"SubnetLen": [24]}, ["SubnetLen", "[24]"]),
        ({"Network": "10.1.0.0/28", "SubnetLen": 29}, ["SubnetLen is 29", "30..30"]),
        (V6 | {"IPv6SubnetLen": 49}, ["IPv6SubnetLen is 49", "fc00::/48", "50..126"]),
        (V6 | {"IPv6SubnetLen": 127}, ["IPv6SubnetLen is 127", "50..126"]),
        (V6 | {"IPv6SubnetLen": 129}, ["IPv6SubnetLen is 129"]),
        # bounds
        (V4 | {"SubnetMin": "x"}, ["SubnetMin", "'x'"]),
        (V4 | {"SubnetMin": ""}, ["SubnetMin", "''"]),
        (V4 | {"SubnetMin": "10.0.1.0/24"}, ["SubnetMin", "'10.0.1.0/24'"]),
        (V4 | {"SubnetMin": 168427520}, ["SubnetMin", "168427520"]),
        (V4 | {"SubnetMin": ["10.10.0.0"]}, ["SubnetMin", "['10.10.0.0']"]),
        (V4 | {"SubnetMin": "11.0.0.0"}, ["SubnetMin is 11.0.0.0", "10.0.0.0/8"]),
        (V4 | {"SubnetMin": "fc00::"}, ["SubnetMin is fc00::", "10.0.0.0/8"]),
        (V4 | {"SubnetMin": "10.10.0.1"}, ["SubnetMin is 10.10.0.1", "10.10.0.0 "]),
        (V4 | {"SubnetLen": 20, "SubnetMin": "10.10.8.0"}, ["SubnetMin is 10.10.8.0", "10.10.0.0 "]),
        (V4 | {"SubnetMax": "9.255.255.0"}, ["SubnetMax is 9.255.255.0", "10.0.0.0/8"]),
        (V4 | {"SubnetMax": "10.10.0.255"}, ["SubnetMax is 10.10.0.255", "10.10.0.0 "]),
        (V4 | {"SubnetMin": "10.2.0.0", "SubnetMax": "10.1.0.0"}, ["SubnetMin 10.2.0.0", "SubnetMax 10.1.0.0"]),
        (V4 | {"SubnetMax": "10.0.0.0"}, ["SubnetMin 10.0.1.0", "SubnetMax 10.0.0.0"]),
        (V6 | {"IPv6SubnetMin": "fc01::"}, ["IPv6SubnetMin is fc01::", "fc00::/48"]),
        (V6 | {"IPv6SubnetMin": "10.0.0.0"}, ["IPv6SubnetMin is 10.0.0.0", "fc00::/48"]),
        (V6 | {"IPv6SubnetMax": "fc00::1"}, ["IPv6SubnetMax is fc00::1", "fc00:: "]),
        (
            V6 | {"IPv6SubnetMin": "fc00:0:0:2::", "IPv6SubnetMax": "fc00:0:0:1::"},
            ["IPv6SubnetMin fc00:0:0:2::", "IPv6SubnetMax fc00:0:0:1::"],
        ),
        # backends
        (V4 | {"Backend": "udp"}, ["Backend", "str"]),
        (V4 | {"Backend": []}, ["Backend", "list"]),
        (V4 | {"Backend": {"Type": "host-gw"}}, ["Backend.Type", "'host-gw'", "vxlan", "udp"]),
        (V4 | {"Backend": {"type": 7}}, ["Backend.Type", "'7'"]),
        (V4 | {"Backend": {"Type": "vxlan", "VNI": 2**24}}, ["VNI is 16777216", "0..16777215"]),
        (V4 | {"Backend": {"Type": "vxlan", "VNI": -1}}, ["VNI is -1"]),
        (V4 | {"Backend": {"Type": "vxlan", "VNI": "1"}}, ["VNI", "'1'"]),
        (V4 | {"Backend": {"Type": "vxlan", "Port": 65536}}, ["Port is 65536", "0..65535"]),
        (V4 | {"Backend": {"Port": "8285"}}, ["Port", "'8285'"]),
        (V4 | {"Backend": {"Port": -1}}, ["Port is -1"]),
        (V4 | {"Backend": {"Type": "vxlan", "MTU": 70000}}, ["MTU is 70000"]),
        (V4 | {"Backend": {"Type": "vxlan", "MTU": 1500.5}}, ["MTU", "1500.5"]),
    ],
)
def test_errors_name_key_and_value(keys, named):
    with pytest.raises(ConfigError) as caught:
        parse(**keys)
    assert [part for part in named if part not in str(caught.value)] == []


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["10.0.0.0/8", "fc00::/48"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["EnableIPv4", "enableipv6", "Network", "IPv6Network", "SubnetLen", "SubnetMin", "IPv6SubnetMax", "Backend", "Type"]
)


@given(st.dictionaries(KEYS, JSON, max_size=6))
def test_whatever_is_in_the_json_it_is_a_configuration_or_a_config_error(keys):
    try:
        config = parse_config(json.dumps(keys))
    except ConfigError:
        return
    assert config.pools
