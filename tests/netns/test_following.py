"""A node follows what changes on its host, without a restart: interface, address, MTU, device, routes, rules."""

import json
import re
import signal
from ipaddress import ip_address

import pytest
from cluster import NETWORK, NODE, add_up, cluster, interfaces_and_routes, pings, until

pytestmark = pytest.mark.netns


def troubles(made, host) -> list[str]:
    return made.status(host)["failures"]


def pod_route(host, pod) -> str:
    return host.run(["ip", "route", "get", str(pod.ipv4)]).stdout


def test_a_new_address_reaches_the_peers_and_nothing_else_changes(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        before = made.status(a)["lease"]
        path = tmp_path / "store" / "subnets" / before["key"]
        said = json.loads(path.read_text())
        a.ip(f"addr del {a.ipv4}/24 dev eth0", "addr add 192.0.2.101/24 dev eth0", "route replace default dev eth0")
        until("the lease to say so", lambda: json.loads(path.read_text()) == said | {"PublicIP": "192.0.2.101"})
        until("the peer to know", lambda: [one["address"] for one in made.status(b)["peers"]] == ["192.0.2.101"])
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert pings(b.pods[0], a.pods[0].ipv4)
        after = made.status(a)
        assert (after["lease"]["key"], after["lease"]["vtep_mac"]) == (before["key"], before["vtep_mac"])
        assert after["external"]["ipv4"] == "192.0.2.101"
        assert add_up(after)


def test_an_interface_that_goes_down_and_comes_up(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip("link set eth0 down")
        until("the trouble to be told", lambda: any("no default route" in one for one in troubles(made, a)))
        assert len(made.status(a)["peers"]) == 1
        a.ip("link set eth0 up", "route replace default dev eth0")
        until("the end of it", lambda: troubles(made, a) == [])
        until("packets", lambda: pings(a.pods[0], b.pods[0].ipv4))
        assert pings(b.pods[0], a.pods[0].ipv4)


def test_an_interface_that_is_made_anew_as_a_vpn_does(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--iface", "eth0") as made:
        a, b = made.lab.hosts

        def index() -> int:
            return json.loads(a.run(["ip", "-j", "link", "show", "eth0"]).stdout)[0]["ifindex"]

        before = index()
        a.ip("link del eth0")
        until("the trouble to be told", lambda: any("no interface matches eth0" in one for one in troubles(made, a)))
        assert made.status(a)["state"] == "running"
        a.ip("link add filler type bridge")  # takes the number that was freed
        outer = f"h{a.number}"
        made.lab.underlay.ip(f"link add {outer} mtu 1420 type veth peer name eth0 mtu 1420 netns {a.name}")
        made.lab.underlay.ip(f"link set {outer} master br0 up")
        a.ip(f"addr add {a.ipv4}/24 dev eth0", "link set eth0 up")
        until("the end of it", lambda: troubles(made, a) == [])
        assert index() != before
        until("packets", lambda: pings(a.pods[0], b.pods[0].ipv4))
        assert pings(b.pods[0], a.pods[0].ipv4)
        assert "FLANNEL_MTU=1370" in made.subnet_file(a).read_text()


def test_an_mtu_that_changes(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip("link set eth0 mtu 1420")
        until("subnet.env", lambda: "FLANNEL_MTU=1370" in made.subnet_file(a).read_text())
        assert "mtu 1370" in a.run(["ip", "link", "show", "flannel.1"]).stdout
        assert pings(a.pods[0], b.pods[0].ipv4, "-s", "1342", "-M", "dont")
        a.ip("link set eth0 mtu 1500")
        until("subnet.env", lambda: "FLANNEL_MTU=1450" in made.subnet_file(a).read_text())
        assert pings(a.pods[0], b.pods[0].ipv4, "-s", "1400")


def test_routes_and_addresses_of_ours_come_back_and_those_of_others_stay(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip("route add 10.99.0.0/16 dev flannel.1 proto static", "route add 10.98.0.0/16 dev flannel.1 proto 241")
        until("the stale one to go", lambda: "10.98.0.0" not in a.run(["ip", "route"]).stdout)
        own = str(ip_address(made.status(a)["lease"]["subnet"].split("/")[0]))
        a.ip("addr add 10.97.0.1/32 dev flannel.1")
        until("the stale address to go", lambda: "10.97.0.1" not in a.run(["ip", "addr", "show", "flannel.1"]).stdout)
        a.ip(f"route del {NETWORK} dev flannel.1")
        until("the route", lambda: "flannel.1" in pod_route(a, b.pods[0]))
        assert "10.99.0.0/16 dev flannel.1 proto static" in a.run(["ip", "route"]).stdout
        assert pings(a.pods[0], b.pods[0].ipv4)
        a.ip(f"addr del {own}/32 dev flannel.1")  # its last one, with which the kernel takes all routes
        until("the address", lambda: own in a.run(["ip", "addr", "show", "flannel.1"]).stdout)
        until("the route", lambda: "flannel.1" in pod_route(a, b.pods[0]))
        assert made.status(a)["restored"] >= 4


def test_rules_come_back_while_links_come_and_go(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--ip-masq", "--iptables-resync", "1", nodes=1) as made:
        (a,) = made.lab.hosts
        table = made.status(a)["firewall"]["table"]
        a.run(["nft", "flush", "table", "inet", table])

        def is_back() -> bool:
            a.ip("link add busy type bridge", "link del busy")
            return "masquerade" in a.run(["nft", "list", "table", "inet", table]).stdout

        until("the rules", is_back)


def test_a_device_that_was_replaced_while_the_node_slept_is_not_taken(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        process = made.processes[a.number]
        process.send_signal(signal.SIGSTOP)
        a.ip("link del flannel.1", "tuntap add dev flannel.1 mode tun")
        process.send_signal(signal.SIGCONT)
        until("it to be told", lambda: any("flannel.1 exists already and is not ours" in one for one in troubles(made, a)))
        assert not made.status(a)["ready"]
        a.ip("link del flannel.1")
        until("it to be ready", lambda: made.status(a)["ready"])
        until("packets", lambda: pings(a.pods[0], b.pods[0].ipv4))


def test_rules_hide_pods_outside_come_back_when_flushed_and_go_with_cleanup(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--ip-masq", "--iptables-resync", "1", nodes=1, start=False) as made:
        (a,) = made.lab.hosts
        outside = made.lab.add_host()
        before = interfaces_and_routes(a), a.run(["nft", "-j", "list", "ruleset"]).stdout
        made.start(a)
        pod = made.add_pod(a)
        assert "FLANNEL_IPMASQ=true" in made.subnet_file(a).read_text()
        assert pings(pod, outside.ipv4), "the answer needs no route to the pod"
        table = made.status(a)["firewall"]["table"]
        shown = a.run(["nft", "list", "table", "inet", table]).stdout
        assert "masquerade" in shown
        assert a.run(["nft", "flush", "table", "inet", table]).returncode == 0
        until("the rules", lambda: a.run(["nft", "list", "table", "inet", table]).stdout == shown)
        until("it to be counted", lambda: made.status(a)["firewall"]["restored"] == 1)
        made.stop(a)
        assert a.run(["nft", "list", "table", "inet", table]).stdout == shown, "they wait for the next start"
        made.lab.hosts[0].run(["ip", "netns", "del", pod.name])
        a.ip("link del cni0")
        cleaned = a.run([*NODE, "cleanup", "--run-dir", str(made.run_dir(a))]).stdout
        assert f"removed nftables table {table}" in cleaned
        assert (interfaces_and_routes(a), a.run(["nft", "-j", "list", "ruleset"]).stdout) == before


def test_a_start_without_rules_takes_away_those_of_the_start_before(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1, start=False) as made:
        (a,) = made.lab.hosts
        made.start(a, "--ip-masq")
        table = made.status(a)["firewall"]["table"]
        assert table in a.run(["nft", "list", "tables"]).stdout
        made.stop(a)
        made.start(a)
        assert table not in a.run(["nft", "list", "tables"]).stdout
        assert f"removed the nftables table {table}" in made.log(a)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_takes_over_the_device_with_its_routes(tmp_path, how):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        before = interfaces_and_routes(a)
        with open(tmp_path / "events", "w") as events:
            watching = a.popen(["ip", "monitor", "address", "route", "link"], stdout=events)
        made.stop(a, how)
        assert "flannel.1" in pod_route(a, b.pods[0]), "no packet takes another way meanwhile"
        made.start(a)
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert pings(b.pods[0], a.pods[0].ipv4)
        watching.send_signal(signal.SIGINT)
        watching.wait(5)
        assert not re.search(r"^Deleted .*flannel", (tmp_path / "events").read_text(), re.MULTILINE)
        assert interfaces_and_routes(a) == before


def test_privileges_are_few_once_it_runs(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1) as made:
        (a,) = made.lab.hosts
        status = a.run(["cat", f"/proc/{made.status(a)['pid']}/status"]).stdout
        held = {name: int(value, 16) for name, value in re.findall(r"^Cap(\w+):\s+([0-9a-f]+)", status, re.MULTILINE)}
        net_admin, net_bind_service = 1 << 12, 1 << 10  # the latter since the configuration may ask for a low port
        assert held["Eff"] == held["Prm"] == held["Bnd"] == net_admin | net_bind_service
        assert re.search(r"NoNewPrivs:\s+1", status)
