"""Which interface is chosen, over the addresses of flannel's issue 981 and their like."""

from ipaddress import ip_address, ip_interface, ip_network

import pytest

from dataplane.host import HostError, Interface
from dataplane.host.external import Choice, choose
from dataplane.host.memory import MemoryHost, Route


def interface(name: str, index: int, *addresses: str, **fields) -> Interface:
    return Interface(name, index, 1500, tuple(map(ip_interface, addresses)), **fields)


@pytest.fixture
def host() -> MemoryHost:
    return MemoryHost(
        [
            interface("lo", 1, "127.0.0.1/8", "::1/128"),
            interface("eth0", 2, "10.0.2.15/24", "fe80::1/64"),
            interface("eth1", 3, "169.254.74.205/16", "198.51.100.7/24", "fe80::2/64", "2001:db8::7/64"),
            interface("dummy0", 4, "1.10.100.1/24", "192.168.200.128/24", "172.16.30.18/24", "172.16.31.200/24"),
            interface("wan6", 5, "2001:db8:6::1/64"),
            interface("down0", 6, "203.0.113.1/24", is_up=False),
            interface("bare0", 7),
        ],
        [Route(ip_network("0.0.0.0/0"), "eth0"), Route(ip_network("192.0.2.0/24"), "eth1")],
    )


CASES = {
    "default route": (Choice(), "eth0", "10.0.2.15", None),
    "name": (Choice(iface=["eth1"]), "eth1", "198.51.100.7", "2001:db8::7"),
    "address": (Choice(iface=["172.16.30.18"]), "dummy0", "172.16.30.18", None),
    "link-local asked for by address": (Choice(iface=["169.254.74.205"]), "eth1", "169.254.74.205", "2001:db8::7"),
    "first that exists": (Choice(iface=["nope", "eth1", "eth0"]), "eth1", "198.51.100.7", "2001:db8::7"),
    "name before pattern": (Choice(iface=["eth0"], iface_regex=["dummy"]), "eth0", "10.0.2.15", None),
    "pattern over any address": (Choice(iface_regex=[r"192\.168\.200\.\d+"]), "dummy0", "192.168.200.128", None),
    "addresses before names": (Choice(iface_regex=["2001:db8:6"]), "wan6", None, "2001:db8:6::1"),
    "pattern over names": (Choice(iface_regex=["^dum"]), "dummy0", "1.10.100.1", None),
    "second pattern": (Choice(iface_regex=["^nope", "^eth1$"]), "eth1", "198.51.100.7", "2001:db8::7"),
    "can reach": (Choice(iface_can_reach=ip_address("192.0.2.9")), "eth1", "198.51.100.7", "2001:db8::7"),
}


@pytest.mark.parametrize(("choice", "name", "ipv4", "ipv6"), CASES.values(), ids=CASES)
def test_choice(host, choice, name, ipv4, ipv6):
    found = choose(host, choice)
    assert (found.name, found.mtu) == (name, 1500)
    assert (found.ipv4 and str(found.ipv4), found.ipv6 and str(found.ipv6)) == (ipv4, ipv6)
    assert (found.public_ip, found.public_ipv6) == (found.ipv4, found.ipv6)


def test_public_addresses_are_published_but_not_bound(host):
    published = Choice(public_ip=ip_address("203.0.113.99"), public_ipv6=ip_address("2001:db8:99::1"))
    found = choose(host, published)
    assert (str(found.ipv4), str(found.public_ip)) == ("10.0.2.15", "203.0.113.99")
    assert (found.ipv6, str(found.public_ipv6)) == (None, "2001:db8:99::1")


def test_an_ipv6_default_route_will_do(host):
    host.table = [Route(ip_network("::/0"), "wan6")]
    assert choose(host, Choice()).name == "wan6"


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (Choice(iface=["eth7"]), r"no interface matches eth7; there are: lo \(127\.0\.0\.1, ::1\); eth0"),
        (Choice(iface=["192.0.2.200"]), r"no interface matches 192\.0\.2\.200"),
        (Choice(iface_regex=["^wlan"]), "no interface matches /\\^wlan/"),
        (Choice(iface=["down0"]), "down0 is down"),
        (Choice(iface=["bare0"]), "bare0 has no address"),
    ],
)
def test_what_cannot_be_chosen_is_said(host, choice, text):
    with pytest.raises(HostError, match=text):
        choose(host, choice)


def test_without_routes_the_options_are_named(host):
    host.table = []
    with pytest.raises(HostError, match="name it with --iface"):
        choose(host, Choice())
    with pytest.raises(HostError, match=r"no route to 203\.0\.114\.1"):
        choose(host, Choice(iface_can_reach=ip_address("203.0.114.1")))
