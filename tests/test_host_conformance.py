"""One suite for every host: the contract of dataplane/host/__init__.py."""

from collections.abc import Iterator
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from dataplane.device.tun import open_tun
from dataplane.host import ALIAS, Host, HostError, Interface
from dataplane.host.memory import MemoryHost, Route
from dataplane.host.netlink import NetlinkHost
from dataplane.lab import Lab, Namespace, inside

OVERLAY = ip_network("10.1.0.0/16")
OVERLAY6 = ip_network("fd00::/48")


class Scene:
    """A host with eth0 (192.0.2.1/24, 2001:db8::1/64, default routes) and the TUN flannel.1, fresh."""

    host: Host

    def foreign_route(self, network: str) -> None: ...

    def detach(self) -> None:
        """The node's process ends, and the device stays."""

    def device_mtu(self) -> int:
        return next(i.mtu for i in self.host.interfaces() if i.name == "flannel.1")


class MemoryScene(Scene):
    def __init__(self) -> None:
        addresses = (ip_interface("192.0.2.1/24"), ip_interface("2001:db8::1/64"))
        self.host = MemoryHost(
            [Interface("eth0", 2, 1500, addresses), Interface("flannel.1", 9, 1500, is_up=False, kind="tun")],
            [Route(ip_network("0.0.0.0/0"), "eth0"), Route(ip_network("::/0"), "eth0")],
        )

    def foreign_route(self, network: str) -> None:
        self.host.table.append(Route(ip_network(network), "eth0"))

    def close(self) -> None:
        pass


class NetlinkScene(Scene):
    def __init__(self) -> None:
        self.lab = Lab("host").__enter__()
        self.namespace = Namespace(self.lab, self.lab.new_namespace("a"))
        self.namespace.sysctl({"net/ipv6/conf/default/accept_dad": "0"})
        self.namespace.ip(
            "link set lo up",
            "link add eth0 type veth peer name eth1",
            "link set eth0 up",
            "link set eth1 up",
            "addr add 192.0.2.1/24 dev eth0",
            "addr add 2001:db8::1/64 dev eth0 nodad",
            "route add default via 192.0.2.254 dev eth0",
            "route add default via 2001:db8::fe dev eth0",
        )
        self.inside = inside(self.namespace.name)
        self.inside.__enter__()
        self.tun = open_tun("flannel.1", 1450)
        self.host = NetlinkHost()

    def foreign_route(self, network: str) -> None:
        self.namespace.ip(f"route add {network} dev eth0")

    def detach(self) -> None:
        self.tun._tun.persist(True)
        self.tun.close()

    def close(self) -> None:
        self.tun.close()
        self.inside.__exit__(None, None, None)
        self.lab.close()


@pytest.fixture(params=["memory", pytest.param("netlink", marks=pytest.mark.netns)])
def scene(request) -> Iterator[Scene]:
    made = MemoryScene() if request.param == "memory" else NetlinkScene()
    yield made
    made.close()


def interface(scene: Scene, name: str) -> Interface:
    return next(one for one in scene.host.interfaces() if one.name == name)


def test_interfaces_come_with_addresses_by_index(scene):
    found = scene.host.interfaces()
    assert [one.index for one in found] == sorted(one.index for one in found)
    eth0 = interface(scene, "eth0")
    assert (eth0.mtu, eth0.is_up) == (1500, True)
    addresses = [own for own in eth0.addresses if not own.ip.is_link_local]
    assert addresses == [ip_interface("192.0.2.1/24"), ip_interface("2001:db8::1/64")]
    tun = interface(scene, "flannel.1")
    assert (tun.kind, tun.is_up, tun.alias) == ("tun", False, "")


def test_the_default_route_names_its_interface(scene):
    assert [scene.host.default_interface(family) for family in (4, 6)] == ["eth0", "eth0"]


def test_the_interface_towards_an_address(scene):
    assert scene.host.interface_towards(ip_address("192.0.2.77")) == "eth0"
    assert scene.host.interface_towards(ip_address("198.51.100.1")) == "eth0"
    assert scene.host.interface_towards(ip_address("2001:db8:5::1")) == "eth0"


def test_a_device_is_configured_and_again_without_harm(scene):
    addresses = [ip_address("10.1.2.0"), ip_address("fd00:0:0:2::")]
    for _ in range(2):
        scene.host.configure_device("flannel.1", addresses, 1450, 61000)
        tun = interface(scene, "flannel.1")
        own = [one for one in tun.addresses if not one.ip.is_link_local]
        assert own == [ip_interface("10.1.2.0/32"), ip_interface("fd00:0:0:2::/128")]
        assert (tun.mtu, tun.is_up, tun.alias) == (1450, True, ALIAS)


def test_a_device_that_is_not_there_is_named(scene):
    with pytest.raises(HostError, match=r"no device flannel\.9"):
        scene.host.configure_device("flannel.9", [ip_address("10.1.2.0")], 1450, 61000)


def test_routes_are_ours_by_protocol_and_adding_again_does_no_harm(scene):
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    for network in (OVERLAY, OVERLAY6, OVERLAY):
        scene.host.add_route(network, "flannel.1")
    assert sorted(scene.host.routes(), key=str) == [(OVERLAY, "flannel.1"), (OVERLAY6, "flannel.1")]
    assert scene.host.interface_towards(ip_address("10.1.77.1")) == "flannel.1"


def test_somebody_elses_route_to_the_network_is_respected(scene):
    scene.foreign_route("10.1.0.0/16")
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    with pytest.raises(HostError, match=r"10\.1\.0\.0/16 exists that is not ours"):
        scene.host.add_route(OVERLAY, "flannel.1")
    assert scene.host.interface_towards(ip_address("10.1.77.1")) == "eth0"


def test_remove_ours_removes_ours_and_nothing_else(scene):
    scene.foreign_route("10.99.0.0/16")
    assert scene.host.remove_ours() == []
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    scene.host.add_route(OVERLAY, "flannel.1")
    scene.detach()
    assert scene.host.remove_ours() == ["device flannel.1"]
    assert [one.name for one in scene.host.interfaces() if one.alias == ALIAS] == []
    assert scene.host.routes() == []
    assert scene.host.interface_towards(ip_address("10.99.1.1")) == "eth0"
    assert scene.host.remove_ours() == []


@pytest.mark.netns
def test_netlink_sets_the_queue_length_and_lets_our_icmp_errors_in():
    scene = NetlinkScene()
    try:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        shown = scene.namespace.run(["ip", "-o", "link", "show", "flannel.1"]).stdout
        assert "qlen 1000" in shown
        assert "gso_max_size 61000" in scene.namespace.run(["ip", "-d", "link", "show", "flannel.1"]).stdout
        sysctl = scene.namespace.run(["cat", "/proc/sys/net/ipv4/conf/flannel.1/accept_local"])
        assert sysctl.stdout.strip() == "1"
    finally:
        scene.close()


@pytest.mark.netns
def test_netlink_tells_the_port_of_a_vxlan_device():
    scene = NetlinkScene()
    try:
        scene.namespace.ip("link add vx type vxlan id 1 dstport 8472 local 192.0.2.1")
        found = next(one for one in scene.host.interfaces() if one.name == "vx")
        assert (found.kind, found.udp_port) == ("vxlan", 8472)
    finally:
        scene.close()


@pytest.mark.netns
def test_netlink_does_not_remove_a_device_that_a_process_is_attached_to():
    scene = NetlinkScene()
    try:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        scene.host.add_route(OVERLAY, "flannel.1")
        with pytest.raises(HostError, match=r"a process is attached to flannel\.1"):
            scene.host.remove_ours()
        assert scene.host.routes() == [(OVERLAY, "flannel.1")]
    finally:
        scene.close()


@pytest.mark.netns
def test_netlink_knows_routes_of_several_hops_and_of_none():
    scene = NetlinkScene()
    try:
        scene.namespace.ip(
            "route del default",
            "route add default nexthop via 192.0.2.253 dev eth0 nexthop via 192.0.2.254 dev eth0",
            "route add blackhole 10.9.0.0/16 proto 241",
        )
        assert scene.host.default_interface(4) == "eth0"
        assert scene.host.routes() == []
        assert scene.host.remove_ours() == []
    finally:
        scene.close()
