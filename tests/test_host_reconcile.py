"""What is wanted of the machine against what there is: the comparison, and that mending it makes it so."""

from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.device.tun import open_tun
from dataplane.host import HostError, Interface
from dataplane.host.memory import MemoryHost, Route
from dataplane.host.netlink import NetlinkHost
from dataplane.host.reconcile import Wanted, differences, reconcile, remove_stale_devices, set_up
from dataplane.lab import Lab, Namespace, inside

NET, NET6 = ip_network("10.244.0.0/16"), ip_network("fd00:10:244::/48")
OWN, OWN6 = ip_address("10.244.3.0"), ip_address("fd00:10:244:3::")
WANTED = Wanted("flannel.1", 1450, (OWN,), (NET,), 61000)
WANTED6 = Wanted("flannel.1", 1450, (OWN6,), (NET6,), 61000)
BOTH = replace(WANTED, addresses=(OWN, OWN6), networks=(NET, NET6))
MARK = "pyflannel-dp"

FINE = Interface(
    "flannel.1", 9, 1450, (ip_interface(f"{OWN}/32"), ip_interface(f"{OWN6}/128"), ip_interface("fe80::1/64")), alias=MARK
)
ROUTES = [(NET, "flannel.1"), (NET6, "flannel.1")]


def test_as_wanted_is_no_difference():
    for wanted in (WANTED, WANTED6, BOTH):
        assert differences(wanted, [FINE], ROUTES) == []


def altered(**changes) -> Interface:
    return replace(FINE, **changes)


STALE_ADDRESS = ip_interface("10.244.7.0/32")
DIFFERENCES = {
    "gone": ([], ROUTES, ["flannel.1 is gone"]),
    "down": ([altered(is_up=False)], ROUTES, ["flannel.1 is down"]),
    "MTU": ([altered(mtu=1400)], ROUTES, ["the MTU of flannel.1 is 1400, not 1450"]),
    "no address": ([altered(addresses=FINE.addresses[1:])], ROUTES, ["flannel.1 lacks the address 10.244.3.0"]),
    "stale address": (
        [altered(addresses=(*FINE.addresses, STALE_ADDRESS))], ROUTES, ["flannel.1 has the stale address 10.244.7.0"]
    ),
    "address as a network": (
        [altered(addresses=(*FINE.addresses, ip_interface(f"{OWN}/24")))],
        ROUTES,
        ["flannel.1 has the stale address 10.244.3.0/24"],
    ),
    "no route": ([FINE], ROUTES[1:], ["the route to 10.244.0.0/16 is gone"]),
    "stale route": (
        [FINE],
        [*ROUTES, (ip_network("10.99.0.0/16"), "flannel.1")],
        ["the route to 10.99.0.0/16 through flannel.1 is stale"],
    ),
    "route through another device": ([FINE], [*ROUTES, (ip_network("10.99.0.0/16"), "flannel.7")], []),
    "the other family": (
        [altered(addresses=(FINE.addresses[0], ip_interface("fd00::99/128")))],
        [ROUTES[0], (ip_network("fd99::/48"), "flannel.1")],
        [],
    ),
    "all at once": (
        [altered(is_up=False, mtu=1500, addresses=(STALE_ADDRESS,))],
        [],
        [
            "flannel.1 is down",
            "the MTU of flannel.1 is 1500, not 1450",
            "flannel.1 lacks the address 10.244.3.0",
            "flannel.1 has the stale address 10.244.7.0",
            "the route to 10.244.0.0/16 is gone",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("interfaces", "routes", "said"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_in_words(interfaces, routes, said):
    assert differences(WANTED, interfaces, routes) == said


NETWORKS = st.sampled_from([NET, NET6, *map(ip_network, ("10.99.0.0/16", "10.244.0.0/20", "fd99::/48", "0.0.0.0/0"))])
ADDRESSES = st.sampled_from(
    [*FINE.addresses, *map(ip_interface, ("10.244.3.0/24", "10.244.7.0/32", "fd00::9/128", "169.254.1.1/16"))]
)
DEVICES = st.sampled_from(["flannel.1", "flannel.7", "tun9", "eth0"])


@st.composite
def hosts(draw) -> MemoryHost:
    """A machine that something happened to: our device, an older one of ours, another node's, and the wire."""
    links = [
        Interface("eth0", 2, 1500, (ip_interface("192.0.2.1/24"), ip_interface("10.244.7.0/32"))),
        Interface("tun9", 3, 1400, (ip_interface("10.244.7.0/32"),), kind="tun", alias="pyflannel-dp:/run/other"),
        Interface("flannel.7", 4, 1400, (ip_interface("10.244.7.0/32"),), kind="tun", alias=MARK),
        Interface(
            "flannel.1",
            9,
            draw(st.sampled_from([1400, 1450])),
            tuple(draw(st.lists(ADDRESSES, unique=True))),
            is_up=draw(st.booleans()),
            kind="tun",
            alias=draw(st.sampled_from(["", MARK])),
        ),
    ]
    routes = draw(
        st.lists(st.builds(Route, NETWORKS, DEVICES, st.sampled_from([3, 241])), unique_by=lambda one: one.network)
    )
    return MemoryHost(links, routes, MARK)


def is_through_us(route: Route) -> bool:
    """Ours, once the device has our mark."""
    return (route.protocol, route.device) == (241, "flannel.1")


def foreign(host: MemoryHost, families: frozenset[int]) -> tuple[object, ...]:
    """What must not change: other links, what our device has of other families or link-local, and routes that are not ours,
    or of other families."""
    others = [link for link in host.links if link.name != "flannel.1"]
    own = next(link for link in host.links if link.name == "flannel.1")
    kept = [one for one in own.addresses if one.version not in families or one.ip.is_link_local]
    routes = [one for one in host.table if not is_through_us(one) or one.network.version not in families]
    return others, kept, sorted(map(str, routes))


@given(hosts(), st.sampled_from([WANTED, WANTED6, BOTH]))
def test_reconcile_makes_it_so_and_touches_nothing_else(host, wanted):
    older = [Route(network, "flannel.7", 241) for network in wanted.networks]  # these give way
    host.table[:] = [route for route in host.table if route not in older]
    taken = [route for route in host.table if route.network in wanted.networks and not is_through_us(route)]
    before = foreign(host, wanted.families)
    found = differences(wanted, host.interfaces(), host.routes())
    if taken:
        with pytest.raises(HostError, match="exists that is not ours"):
            reconcile(host, wanted)
    else:
        assert reconcile(host, wanted) == found
        assert differences(wanted, host.interfaces(), host.routes()) == []
        assert reconcile(host, wanted) == []
    assert foreign(host, wanted.families) == before


def test_a_missing_device_cannot_be_mended():
    host = MemoryHost([Interface("eth0", 2, 1500)])
    with pytest.raises(HostError, match=r"no device flannel\.1"):
        reconcile(host, WANTED)


TUNED = replace(FINE, kind="tun", queue_length=1000, superpacket_limit=61000, accepts_own_source=True)
UNTUNED = {
    "queue": ({"queue_length": 500}, "the queue of flannel.1 holds 500 packets, not 1000"),
    "superpackets": ({"superpacket_limit": 65536}, "superpackets of flannel.1 have up to 65536 bytes, not 61000"),
    "own source": (
        {"accepts_own_source": False}, "flannel.1 does not accept its own address as a source (accept_local)"
    ),
}  # fmt: skip


class Recording:
    """A host, and which of its methods that change something were called."""

    CHANGING = frozenset({"configure_device", "add_route", "remove_route", "remove_device", "remove_ours"})

    def __init__(self, host) -> None:
        self._host = host
        self.changes: list[str] = []

    def __getattr__(self, name: str):
        if name in self.CHANGING:
            self.changes.append(name)
        return getattr(self._host, name)


def test_set_up_changes_nothing_where_all_is_well():
    host = Recording(MemoryHost([TUNED], [Route(NET, "flannel.1", 241), Route(NET6, "flannel.1", 241)]))
    assert [set_up(host, wanted) for wanted in (WANTED, WANTED6, BOTH)] == [[], [], []]
    assert host.changes == []
    host.table.append(Route(ip_network("10.99.0.0/16"), "flannel.1", 241))
    assert set_up(host, WANTED) == ["the route to 10.99.0.0/16 through flannel.1 is stale"]
    assert host.routes() == [(NET, "flannel.1"), (NET6, "flannel.1")]
    assert host.changes == ["configure_device", "remove_route"]


@pytest.mark.parametrize(("changes", "said"), UNTUNED.values(), ids=UNTUNED)
def test_the_tuning_is_set_at_start_and_left_alone_later(changes, said):
    host = MemoryHost([replace(TUNED, **changes)], [Route(NET, "flannel.1", 241), Route(NET6, "flannel.1", 241)])
    assert reconcile(host, WANTED) == []
    assert host.links == [replace(TUNED, **changes)]
    assert set_up(host, WANTED) == [said]
    assert host.links == [TUNED]


def test_stale_devices_are_removed_unless_a_process_has_them():
    host = MemoryHost(
        [
            Interface("eth0", 2, 1500, alias=MARK),
            Interface("tun9", 3, 1400, kind="tun", alias="somebody"),
            Interface("flannel.7", 4, 1400, kind="tun", alias=MARK),
            replace(FINE, kind="tun"),
        ],
        [Route(NET, "flannel.7", 241), Route(NET6, "flannel.1", 241)],
    )
    host.attached.add("flannel.7")
    with pytest.raises(HostError, match=r"attached to flannel\.7"):
        remove_stale_devices(host, "flannel.1")
    host.attached.clear()
    assert remove_stale_devices(host, "flannel.1") == ["flannel.7"]
    assert [link.name for link in host.links] == ["eth0", "tun9", "flannel.1"]
    assert host.routes() == [(NET6, "flannel.1")]
    assert remove_stale_devices(host, "flannel.1") == []


@pytest.fixture
def kernel():
    """A namespace with eth0, a foreign route, and flannel.1 as an earlier start left it: stale address, stale routes."""
    with Lab("rec") as lab:
        namespace = Namespace(lab, lab.new_namespace("a"))
        with inside(namespace.name):
            host = NetlinkHost(MARK)
            device = open_tun("flannel.1", 1450)
            namespace.ip(
                "link add eth0 type veth peer name eth1",
                "link set eth0 up",
                "link set eth1 up",
                "addr add 192.0.2.1/24 dev eth0",
                "route add 10.99.0.0/16 via 192.0.2.9",
                "link set flannel.1 up",
                "addr add 10.244.7.0/32 dev flannel.1",
                "addr add fd00:10:244:7::/128 dev flannel.1",
                "route add 10.5.9.0/24 dev flannel.1 proto 241",
                "route add fd05::/48 dev flannel.1 proto 241",
                "route add 10.6.0.0/16 dev flannel.1",
                "route add fd06::/48 dev flannel.1",
            )
            yield namespace, host
            device.close()


def shown(namespace: Namespace, *what: str) -> list[str]:
    """Lines of ``ip``, without what the kernel keeps for itself."""
    lines = namespace.run(["ip", *what]).stdout.splitlines()
    return sorted(line.strip() for line in lines if "fe80::" not in line and "ff00::" not in line)


@pytest.mark.netns
def test_the_kernel_s_state_is_made_as_wanted_and_nothing_else(kernel):
    namespace, host = kernel
    said = set_up(host, WANTED)
    assert said == [
        "the MTU of flannel.1 is 1500, not 1450",
        "flannel.1 lacks the address 10.244.3.0",
        "flannel.1 has the stale address 10.244.7.0",
        "the route to 10.244.0.0/16 is gone",
        "the queue of flannel.1 holds 500 packets, not 1000",
        "superpackets of flannel.1 have up to 65536 bytes, not 61000",
        "flannel.1 does not accept its own address as a source (accept_local)",
    ]
    routes, routes6 = shown(namespace, "route"), shown(namespace, "-6", "route")
    assert routes == [
        "10.244.0.0/16 dev flannel.1 proto 241 scope link",
        "10.6.0.0/16 dev flannel.1 scope link",
        "10.99.0.0/16 via 192.0.2.9 dev eth0",
        "192.0.2.0/24 dev eth0 proto kernel scope link src 192.0.2.1",
    ]
    assert routes6 == [
        "fd00:10:244:7:: dev flannel.1 proto kernel metric 256 pref medium",
        "fd05::/48 dev flannel.1 proto 241 metric 1024 pref medium",
        "fd06::/48 dev flannel.1 metric 1024 pref medium",
    ]
    assert reconcile(host, WANTED6) == [
        "flannel.1 lacks the address fd00:10:244:3::",
        "flannel.1 has the stale address fd00:10:244:7::",
        "the route to fd00:10:244::/48 is gone",
        "the route to fd05::/48 through flannel.1 is stale",
    ]
    assert shown(namespace, "route") == routes
    assert shown(namespace, "-6", "route") == [
        "fd00:10:244:3:: dev flannel.1 proto kernel metric 256 pref medium",
        "fd00:10:244::/48 dev flannel.1 proto 241 metric 1024 pref medium",
        "fd06::/48 dev flannel.1 metric 1024 pref medium",
    ]
    assert [reconcile(host, wanted) for wanted in (WANTED, WANTED6)] == [[], []]


@pytest.mark.netns
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("link set flannel.1 down", ["flannel.1 is down", "the route to 10.244.0.0/16 is gone"]),
        ("route flush dev flannel.1", ["the route to 10.244.0.0/16 is gone"]),
        ("addr flush dev flannel.1", ["flannel.1 lacks the address 10.244.3.0", "the route to 10.244.0.0/16 is gone"]),
        ("link set flannel.1 mtu 1300", ["the MTU of flannel.1 is 1300, not 1450"]),
        ("route add 10.5.9.0/24 dev flannel.1 proto 241", ["the route to 10.5.9.0/24 through flannel.1 is stale"]),
        ("link set flannel.1 alias none", ["the route to 10.244.0.0/16 is gone"]),
    ],
)
def test_the_kernel_s_state_is_mended(kernel, damage, said):
    namespace, host = kernel
    set_up(host, BOTH)
    before = shown(namespace, "route"), shown(namespace, "-6", "route"), shown(namespace, "addr", "show", "flannel.1")
    if damage.endswith("none"):
        namespace.run(["ip", "link", "set", "flannel.1", "alias", ""])
    else:
        namespace.ip(damage)
    assert reconcile(host, WANTED) == said
    reconcile(host, WANTED6)
    after = shown(namespace, "route"), shown(namespace, "-6", "route"), shown(namespace, "addr", "show", "flannel.1")
    foreign_on_ours = {"10.6.0.0/16 dev flannel.1 scope link", "fd06::/48 dev flannel.1 metric 1024 pref medium"}
    for old, new in zip(before, after, strict=True):  # foreign routes through our device went with the link
        assert set(new) <= set(old)
        assert set(old) - set(new) <= foreign_on_ours


@pytest.mark.netns
def test_a_route_of_another_to_our_network_stays(kernel):
    namespace, host = kernel
    namespace.ip("route add 10.244.0.0/16 via 192.0.2.9")
    with pytest.raises(HostError, match=r"10\.244\.0\.0/16 exists that is not ours"):
        set_up(host, WANTED)
    assert "10.244.0.0/16 via 192.0.2.9 dev eth0" in shown(namespace, "route")
    namespace.ip("route del 10.244.0.0/16 via 192.0.2.9")
    assert "the route to 10.244.0.0/16 is gone" in reconcile(host, WANTED)
    assert (NET, "flannel.1") in host.routes()


@pytest.mark.netns
def test_a_kept_device_is_taken_over_without_a_change(kernel):
    namespace, netlink = kernel
    host = Recording(netlink)
    wants = (replace(WANTED, device="tun3"), replace(WANTED6, device="tun3"))
    first = open_tun("tun3", 1450)
    for wanted in wants:
        assert set_up(host, wanted) != []
    first.keep()
    first.close()
    before = shown(namespace, "-d", "addr", "show", "tun3")
    assert any("NO-CARRIER" in line for line in before)
    host.changes.clear()
    second = open_tun("tun3", 1450)
    assert [set_up(host, wanted) for wanted in wants] == [[], []]
    assert host.changes == []
    namespace.ip("link set tun3 txqueuelen 600")
    assert reconcile(host, wants[0]) == []
    assert set_up(host, wants[0]) == ["the queue of tun3 holds 600 packets, not 1000"]
    assert host.changes == ["configure_device"]
    second.close()
