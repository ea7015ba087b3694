"""One suite for every host: the contract of dataplane/host/__init__.py."""

import asyncio
import contextlib
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import pytest

from dataplane.device.tun import open_tun
from dataplane.host import ALIAS, QUEUE_LENGTH, Host, HostError, Interface, mark_of
from dataplane.host.memory import MemoryHost, Route
from dataplane.host.netlink import NetlinkHost
from dataplane.lab import Lab, Namespace, inside

OVERLAY = ip_network("10.1.0.0/16")
OVERLAY6 = ip_network("fd00::/48")


MARK = "pyflannel-dp:/run/test"


class Scene:
    """A host with eth0 (192.0.2.1/24, 2001:db8::1/64, default routes) and the TUN flannel.1, fresh."""

    host: Host

    def another(self, mark: str) -> Host:
        """The same machine, as the node with `mark` sees it."""

    def foreign_route(self, network: str, device: str = "eth0", protocol: int = 3) -> None: ...

    def foreign_address(self, address: str) -> None:
        """An administrator gives it to flannel.1."""

    def add_tun(self, name: str) -> None:
        """Another TUN, without a process."""

    def take_down(self) -> None:
        """An administrator takes flannel.1 down."""

    def detach(self) -> None:
        """The node's process ends, and the device stays."""


class MemoryScene(Scene):
    def __init__(self) -> None:
        addresses = (ip_interface("192.0.2.1/24"), ip_interface("2001:db8::1/64"))
        self.host = MemoryHost(
            [Interface("eth0", 2, 1500, addresses), Interface("flannel.1", 9, 1500, is_up=False, kind="tun")],
            [Route(ip_network("0.0.0.0/0"), "eth0"), Route(ip_network("::/0"), "eth0")],
            MARK,
            {"flannel.1"},
        )

    def another(self, mark: str) -> MemoryHost:
        return MemoryHost(self.host.links, self.host.table, mark, self.host.attached)

    def foreign_route(self, network: str, device: str = "eth0", protocol: int = 3) -> None:
        self.host.table.append(Route(ip_network(network), device, protocol))
        self.host.notify()

    def foreign_address(self, address: str) -> None:
        own = interface(self, "flannel.1").addresses
        self.host.alter("flannel.1", addresses=(*own, ip_interface(address)))

    def add_tun(self, name: str) -> None:
        self.host.links.append(Interface(name, 20 + len(self.host.links), 1500, is_up=False, kind="tun"))
        self.host.notify()

    def take_down(self) -> None:
        self.host.alter("flannel.1", is_up=False)

    def detach(self) -> None:
        self.host.attached.clear()

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
        self.host = NetlinkHost(MARK)

    def another(self, mark: str) -> NetlinkHost:
        return NetlinkHost(mark)

    def foreign_route(self, network: str, device: str = "eth0", protocol: int = 3) -> None:
        self.namespace.ip(f"route add {network} dev {device} proto {protocol}")

    def foreign_address(self, address: str) -> None:
        self.namespace.ip(f"addr add {address} dev flannel.1")

    def add_tun(self, name: str) -> None:
        self.namespace.ip(f"tuntap add {name} mode tun")

    def take_down(self) -> None:
        self.namespace.ip("link set flannel.1 down")

    def detach(self) -> None:
        self.tun.keep()
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


@contextlib.contextmanager
def netlink_scene() -> Iterator[NetlinkScene]:
    made = NetlinkScene()
    try:
        yield made
    finally:
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
        assert (tun.mtu, tun.is_up, tun.alias) == (1450, True, MARK)
        assert (tun.queue_length, tun.superpacket_limit, tun.accepts_own_source) == (QUEUE_LENGTH, 61000, True)


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


def test_some_interfaces_are_had_by_name(scene):
    everything = {one.name: one for one in scene.host.interfaces()}
    assert scene.host.interfaces(["flannel.1", "eth0"]) == [everything["eth0"], everything["flannel.1"]]
    assert scene.host.interfaces(["flannel.9"]) == []


def test_a_device_gets_just_its_addresses_of_the_families_given(scene):
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0"), ip_address("fd00:0:0:2::")], 1450, 61000)
    for foreign in ("10.1.3.0/32", "10.1.2.0/24", "10.1.2.9/24", "169.254.7.7/16", "fd00:0:0:3::/128", "fe80::7/64"):
        scene.foreign_address(foreign)
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    own = {str(one) for one in interface(scene, "flannel.1").addresses}
    assert own >= {"10.1.2.0/32", "169.254.7.7/16", "fd00:0:0:2::/128", "fd00:0:0:3::/128", "fe80::7/64"}
    assert not own & {"10.1.3.0/32", "10.1.2.0/24", "10.1.2.9/24"}
    scene.host.configure_device("flannel.1", [ip_address("fd00:0:0:4::")], 1450, 61000)
    own = {str(one) for one in interface(scene, "flannel.1").addresses if not one.ip.is_link_local}
    assert own == {"10.1.2.0/32", "fd00:0:0:4::/128"}
    assert "fe80::7/64" in {str(one) for one in interface(scene, "flannel.1").addresses}


def test_a_device_that_another_owns_is_not_configured(scene):
    scene.another("somebody").configure_device("flannel.1", [ip_address("10.1.2.0")], 1400, 61000)
    with pytest.raises(HostError, match=r"flannel\.1 is not ours"):
        scene.host.configure_device("flannel.1", [ip_address("10.1.3.0")], 1450, 61000)
    with pytest.raises(HostError, match="eth0 is not ours"):
        scene.host.configure_device("eth0", [ip_address("10.1.3.0")], 1450, 61000)
    found = interface(scene, "flannel.1")
    assert (found.mtu, found.alias) == (1400, "somebody")
    assert ip_interface("10.1.3.0/32") not in found.addresses


def test_a_route_is_ours_only_through_our_device_and_with_our_protocol(scene):
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    scene.foreign_route("10.7.0.0/16", "flannel.1")
    scene.foreign_route("10.8.0.0/16", "eth0", protocol=241)
    scene.foreign_route("10.9.0.0/16", "flannel.1", protocol=241)
    assert scene.host.routes() == [(ip_network("10.9.0.0/16"), "flannel.1")]
    for network in ("10.7.0.0/16", "10.8.0.0/16", "10.9.0.0/16", "10.66.0.0/16"):
        scene.host.remove_route(ip_network(network), "flannel.1")
        scene.host.remove_route(ip_network(network), "eth0")
        scene.host.remove_route(ip_network(network), "flannel.9")
    assert scene.host.routes() == []
    towards = {
        address: scene.host.interface_towards(ip_address(address)) for address in ("10.7.0.1", "10.8.0.1", "10.9.0.1")
    }
    assert towards == {"10.7.0.1": "flannel.1", "10.8.0.1": "eth0", "10.9.0.1": "eth0"}
    with pytest.raises(HostError, match=r"10\.8\.0\.0/16 exists that is not ours"):
        scene.host.add_route(ip_network("10.8.0.0/16"), "flannel.1")


@pytest.mark.parametrize("network", [OVERLAY, OVERLAY6])
def test_a_route_through_an_older_device_of_ours_gives_way(scene, network):
    scene.add_tun("flannel.7")
    for device in ("flannel.7", "flannel.1"):
        scene.host.configure_device(device, [ip_address("10.1.2.0"), ip_address("fd00:0:0:2::")], 1450, 61000)
        scene.host.add_route(network, device)
        assert scene.host.routes() == [(network, device)]


def test_another_node_s_things_are_left_alone(scene):
    """Two nodes on one host: each sees and removes its own."""
    other = scene.another(mark_of(Path("/run/other")))
    scene.add_tun("flannel.2")
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    scene.host.add_route(OVERLAY, "flannel.1")
    other.configure_device("flannel.2", [ip_address("10.2.2.0")], 1450, 61000)
    other.add_route(ip_network("10.2.0.0/16"), "flannel.2")
    assert other.routes() == [(ip_network("10.2.0.0/16"), "flannel.2")]
    with pytest.raises(HostError, match=r"10\.1\.0\.0/16 exists that is not ours"):
        other.add_route(OVERLAY, "flannel.2")
    other.remove_route(OVERLAY, "flannel.1")
    with pytest.raises(HostError, match=r"flannel\.1 is not ours"):
        other.remove_device("flannel.1")
    scene.detach()
    assert scene.host.remove_ours() == ["device flannel.1"]
    assert [one.name for one in scene.host.interfaces(["flannel.1", "flannel.2"])] == ["flannel.2"]
    assert scene.host.interface_towards(ip_address("10.2.0.1")) == "flannel.2"


def test_remove_ours_removes_ours_and_nothing_else(scene):
    scene.foreign_route("10.99.0.0/16")
    assert scene.host.remove_ours() == []
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    scene.host.add_route(OVERLAY, "flannel.1")
    scene.detach()
    assert scene.host.remove_ours() == ["device flannel.1"]
    assert [one.name for one in scene.host.interfaces() if one.alias == MARK] == []
    assert scene.host.routes() == []
    assert scene.host.interface_towards(ip_address("10.99.1.1")) == "eth0"
    assert scene.host.remove_ours() == []


def test_a_device_is_removed_unless_a_process_has_it(scene):
    scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
    for remove in (lambda: scene.host.remove_device("flannel.1"), scene.host.remove_ours):
        with pytest.raises(HostError, match=r"a process is attached to flannel\.1"):
            remove()
    scene.detach()
    scene.host.remove_device("flannel.1")
    assert scene.host.interfaces(["flannel.1"]) == []
    scene.host.remove_device("flannel.1")
    with pytest.raises(HostError, match="eth0 is not ours"):
        scene.host.remove_device("eth0")


CHANGES = {
    "a device is configured": lambda scene: scene.host.configure_device("flannel.1", [ip_address("10.1.9.0")], 1450, 61000),
    "a route is added": lambda scene: scene.host.add_route(OVERLAY, "flannel.1"),
    "an IPv6 route is added": lambda scene: scene.host.add_route(OVERLAY6, "flannel.1"),
    "a route is removed": lambda scene: scene.host.remove_route(ip_network("10.66.0.0/16"), "flannel.1"),
    "an address is added": lambda scene: scene.foreign_address("10.1.3.0/32"),
    "an IPv6 address is added": lambda scene: scene.foreign_address("fd00:0:0:3::/128"),
    "a link is taken down": lambda scene: scene.take_down(),
    "a link is added": lambda scene: scene.add_tun("flannel.7"),
    "a link is removed": lambda scene: (scene.detach(), scene.host.remove_ours()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_watch_tells_of_changes(scene, change):
    def prepare() -> None:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0"), ip_address("fd00:0:0:2::")], 1450, 61000)
        scene.host.add_route(ip_network("10.66.0.0/16"), "flannel.1")

    await asyncio.to_thread(prepare)  # a thread is in the namespace of the one that makes it
    told = asyncio.Event()
    watch = scene.host.watch(told.set)
    await asyncio.to_thread(change, scene)
    async with asyncio.timeout(5):
        await told.wait()
    watch.close()


async def test_a_closed_watch_is_silent(scene):
    told, other = asyncio.Event(), asyncio.Event()
    watch, another = scene.host.watch(told.set), scene.host.watch(other.set)
    scene.add_tun("flannel.7")
    watch.close()
    watch.close()
    scene.add_tun("flannel.8")
    async with asyncio.timeout(5):
        await other.wait()
    another.close()
    assert not told.is_set()


def test_marks_differ_by_run_folder():
    assert mark_of(Path("/run/pyflannel-dp")) == ALIAS == mark_of(Path("/run/other/../pyflannel-dp"))
    assert mark_of(Path("/run/two")) == "pyflannel-dp:/run/two"
    long = [Path("/run", "x" * 200, "y" * 100, name) for name in "ab"]
    marks = {mark_of(path) for path in (*long, Path("/run/\udcff"), Path("/run/\n"), Path("/run/" + "ü" * 130))}
    assert len(marks) == 5
    assert all(len(mark.encode()) == 13 + 32 and mark.startswith("pyflannel-dp:") for mark in marks)


def test_a_relative_run_folder_has_an_absolute_mark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert mark_of(Path("run")) == f"pyflannel-dp:{tmp_path.resolve()}/run"


@pytest.mark.parametrize("kind", [MemoryHost, NetlinkHost])
def test_a_host_needs_a_mark(kind):
    with pytest.raises(ValueError, match="needs a mark"):
        kind(mark="")


@pytest.mark.netns
def test_netlink_takes_the_longest_mark():
    with netlink_scene() as scene:
        mark = mark_of(Path("/run", "x" * 200, "y" * 35))
        assert len(mark) == 254
        assert len(mark_of(Path("/run", "x" * 200, "y" * 36))) == 45
        NetlinkHost(mark).configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        assert interface(scene, "flannel.1").alias == mark


@pytest.mark.netns
def test_netlink_sees_the_carrier_come_and_go():
    with netlink_scene() as scene:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        assert [interface(scene, name).has_carrier for name in ("eth0", "flannel.1")] == [True, True]
        scene.namespace.ip("link set eth1 down")
        scene.detach()
        found = [interface(scene, name) for name in ("eth0", "flannel.1")]
        assert [(one.is_up, one.has_carrier) for one in found] == [(True, False), (True, False)]
        scene.take_down()
        assert (interface(scene, "flannel.1").is_up, interface(scene, "flannel.1").has_carrier) == (False, False)


@pytest.mark.netns
def test_netlink_removes_an_address_with_a_peer():
    with netlink_scene() as scene:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0"), ip_address("fd00::2")], 1450, 61000)
        scene.foreign_address("10.1.5.0 peer 10.77.0.1/32")
        scene.foreign_address("fd00::7 peer fd00::8/128")
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0"), ip_address("fd00::2")], 1450, 61000)
        own = {str(one.ip) for one in interface(scene, "flannel.1").addresses if not one.ip.is_link_local}
        assert own == {"10.1.2.0", "fd00::2"}


@pytest.mark.netns
def test_netlink_sets_the_queue_length_and_lets_our_icmp_errors_in():
    with netlink_scene() as scene:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        shown = scene.namespace.run(["ip", "-o", "link", "show", "flannel.1"]).stdout
        assert "qlen 1000" in shown
        assert "gso_max_size 61000" in scene.namespace.run(["ip", "-d", "link", "show", "flannel.1"]).stdout
        sysctl = scene.namespace.run(["cat", "/proc/sys/net/ipv4/conf/flannel.1/accept_local"])
        assert sysctl.stdout.strip() == "1"


@pytest.mark.netns
def test_netlink_tells_the_port_of_a_vxlan_device():
    with netlink_scene() as scene:
        scene.namespace.ip("link add vx type vxlan id 1 dstport 8472 local 192.0.2.1")
        found = next(one for one in scene.host.interfaces() if one.name == "vx")
        assert (found.kind, found.udp_port) == ("vxlan", 8472)


@pytest.mark.netns
def test_netlink_does_not_remove_a_device_that_a_process_is_attached_to():
    with netlink_scene() as scene:
        scene.host.configure_device("flannel.1", [ip_address("10.1.2.0")], 1450, 61000)
        scene.host.add_route(OVERLAY, "flannel.1")
        with pytest.raises(HostError, match=r"a process is attached to flannel\.1"):
            scene.host.remove_ours()
        assert scene.host.routes() == [(OVERLAY, "flannel.1")]


@pytest.mark.netns
def test_netlink_looks_for_the_default_route_in_the_main_table_and_by_metric():
    with netlink_scene() as scene:
        scene.namespace.ip(
            "link add veth0 type veth peer name veth1",
            "link set veth0 up",
            "link set veth1 up",
            "route del default",
            "route del default via 2001:db8::fe",
            "route add default dev veth0 table 7",
            "route add ::/0 dev veth0 table 7",
        )
        assert [scene.host.default_interface(family) for family in (4, 6)] == [None, None]
        for default in ("0.0.0.0/0", "::/0"):
            scene.namespace.ip(
                f"route add {default} dev veth0 metric 50",
                f"route add {default} dev eth0 metric 20",
            )
        assert [scene.host.default_interface(family) for family in (4, 6)] == ["eth0", "eth0"]


@pytest.mark.netns
def test_netlink_knows_routes_of_several_hops_and_of_none():
    with netlink_scene() as scene:
        scene.namespace.ip(
            "route del default",
            "route add default nexthop via 192.0.2.253 dev eth0 nexthop via 192.0.2.254 dev eth0",
            "route add blackhole 10.9.0.0/16 proto 241",
        )
        assert scene.host.default_interface(4) == "eth0"
        assert scene.host.routes() == []
        assert scene.host.remove_ours() == []
