"""Nodes whose leases are in a real etcd: what they write, what they understand, and what they do when it does badly."""

import json
import re
import signal
import time
from ipaddress import ip_network

import pytest
from cluster import KERNEL_SUBNET, NETWORK, NODE, interfaces_and_routes, pings, run_node, until
from etcd_cluster import CONFIG, PREFIX, EtcdCluster, etcd_cluster

from dataplane.control import ask
from dataplane.lab import Lab

pytestmark = pytest.mark.netns


def read_as_flannel(key: str, value: str) -> dict:
    """What flannel reads from a lease, by its documentation alone: the key's subnet, and the value's JSON."""
    subnet = re.fullmatch(r"(\d+\.\d+\.\d+\.\d+)-(\d+)", key)
    assert subnet is not None, key
    attributes = json.loads(value)
    assert set(attributes) >= {"PublicIP", "PublicIPv6", "BackendType"}
    data = attributes.get("BackendData") or {}
    if attributes["BackendType"] == "vxlan":
        assert isinstance(data["VNI"], int)
        assert re.fullmatch("([0-9a-f]{2}:){5}[0-9a-f]{2}", data["VtepMAC"])
    return {"subnet": f"{subnet[1]}/{subnet[2]}", "ip": attributes["PublicIP"], "mac": data.get("VtepMAC")}


def test_two_nodes_find_each_other_and_write_what_flannel_reads(tmp_path):
    with etcd_cluster(tmp_path) as made:
        a, b = made.nodes
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert pings(b.pods[0], a.pods[0].ipv4)
        stored = made.stored()
        assert len(stored) == 2
        for host in (a, b):
            key = made.key(host)
            status = made.status(host)
            read = read_as_flannel(key, stored[key]["value"])
            subnet, mac = str(made.subnets(host)[0]), status["lease"]["vtep_mac"]
            assert read == {"subnet": subnet, "ip": str(host.ipv4), "mac": mac}
            told = made.etcdctl("lease", "timetolive", f"{stored[key]['lease']:x}").stdout
            assert "granted with TTL(86400s)" in told
            assert status["store"]["kind"] == "etcd"
            assert status["store"]["away_since"] is None
            assert status["ready"] is True
        assert "FLANNEL_NETWORK=10.244.0.0/16\n" in made.subnet_file(a).read_text()


def test_a_kernel_host_of_flannel_is_a_peer_from_its_lease_alone(tmp_path):
    """Keys in flannel's exact form, and a neighbour that is the kernel, as flannel sets it up."""
    with etcd_cluster(tmp_path, nodes=1) as made:
        (a,) = made.nodes
        kernel = made.lab.add_host()
        mac = kernel.add_kernel_vxlan(KERNEL_SUBNET)
        template = '{{"PublicIP":"{}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"{}"}}}}'
        value = template.format(kernel.ipv4, mac)
        made.put(f"subnets/{str(KERNEL_SUBNET).replace('/', '-')}", value)
        own = read_as_flannel(made.key(a), made.stored()[made.key(a)]["value"])
        kernel.add_kernel_peer(ip_network(own["subnet"]), own["ip"], own["mac"])
        made.wait_for_peers(a, 1)
        pod = kernel.add_pod(KERNEL_SUBNET)
        assert pings(a.pods[0], pod.ipv4)
        assert pings(pod, a.pods[0].ipv4)


def test_a_node_that_sleeps_past_its_lease_gives_way(tmp_path):
    with etcd_cluster(tmp_path, "--subnet-lease-ttl", "5") as made:
        a, b = made.nodes
        key = made.key(a)
        made.processes[a.number].send_signal(signal.SIGSTOP)
        until("the lease to end", lambda: key not in made.stored())
        thief = {"PublicIP": "192.0.2.99", "PublicIPv6": None, "BackendType": "vxlan",
                 "BackendData": {"VNI": 1, "VtepMAC": "02:00:00:00:00:63"}}  # fmt: skip
        made.put(f"subnets/{key}", thief)
        before = made.stored()[key]
        made.processes[a.number].send_signal(signal.SIGCONT)
        until("another subnet", lambda: made.key(a) != key and made.status(a)["ready"])
        assert made.stored()[key] == before, "nobody else's lease is touched"
        assert read_as_flannel(made.key(a), made.stored()[made.key(a)]["value"])["ip"] == str(a.ipv4)
        assert "belongs to 192.0.2.99 now; taking a lease anew" in made.log(a)
        assert f"no longer {key}" in made.log(a)
        assert f"FLANNEL_SUBNET={made.subnets(a)[0].network_address + 1}/24" in made.subnet_file(a).read_text()
        (trouble,) = made.status(a)["failures"]
        assert "cni0 has the address" in trouble
        until(
            "b to know",
            lambda: {one["subnet"] for one in made.status(b)["peers"]} == {str(made.subnets(a)[0]), key.replace("-", "/")},
        )


def test_with_the_policy_to_stop_it_ends_instead(tmp_path):
    with etcd_cluster(tmp_path, "--subnet-lease-ttl", "5", "--on-lost-lease", "stop", nodes=1) as made:
        (a,) = made.nodes
        key = made.key(a)
        made.processes[a.number].send_signal(signal.SIGSTOP)
        until("the lease to end", lambda: key not in made.stored())
        made.processes[a.number].send_signal(signal.SIGCONT)
        assert made.processes[a.number].wait(10) == 1
        assert f"{key}" in made.log(a).splitlines()[-1]
        assert made.stored() == {}


def test_data_that_is_wiped_is_written_again_by_the_nodes_while_packets_flow(tmp_path):
    with etcd_cluster(tmp_path) as made:
        a, b = made.nodes
        keys = {host.number: made.key(host) for host in (a, b)}
        with open(tmp_path / "ping", "w") as output:
            pinging = a.pods[0].popen(["ping", "-n", "-i", "0.02", str(b.pods[0].ipv4)], stdout=output)
        (member,) = made.members
        member.kill()
        until("both to notice", lambda: all(made.status(host)["store"]["away_since"] for host in (a, b)))
        member.wipe()
        member.start(made.members)
        made.wait_for_etcd()
        until("both leases", lambda: set(made.stored()) == set(keys.values()))
        until("both to be ready", lambda: all(made.status(host)["ready"] for host in (a, b)))
        until("the peers", lambda: all(len(made.status(host)["peers"]) == 1 for host in (a, b)))
        assert {host.number: made.key(host) for host in (a, b)} == keys
        assert pings(a.pods[0], b.pods[0].ipv4)
        pinging.send_signal(signal.SIGINT)
        pinging.wait(5)
        sent, received = map(
            int, re.search(r"(\d+) packets transmitted, (\d+) received", (tmp_path / "ping").read_text()).groups()
        )
        assert sent - received <= 1, "the last one may be on its way"
        for host in (a, b):
            assert made.status(host)["store"]["away_since"] is None


def test_three_members_of_which_one_dies_and_then_two(tmp_path):
    with etcd_cluster(tmp_path, "--subnet-lease-ttl", "30", members=3) as made:
        a, b = made.nodes
        first, second, _ = made.members
        first.kill()
        made.put(
            "subnets/10.244.250.0-24",
            {"PublicIP": "192.0.2.77", "BackendType": "vxlan", "BackendData": {"VtepMAC": "02:00:00:00:00:4d"}},
        )
        for host in (a, b):
            until("the change", lambda host=host: len(made.status(host)["peers"]) == 2)
            assert made.status(host)["store"]["away_since"] is None
        second.kill()
        for host in (a, b):
            until("the trouble to be noticed", lambda host=host: made.status(host)["store"]["away_since"] is not None)
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert len(made.status(a)["peers"]) == 2
        second.start(made.members)
        first.start(made.members)
        for host in (a, b):
            until("the store to be back", lambda host=host: made.status(host)["store"]["away_since"] is None)
        made.delete("subnets/10.244.250.0-24")
        for host in (a, b):
            until("the change", lambda host=host: len(made.status(host)["peers"]) == 1)
        assert pings(b.pods[0], a.pods[0].ipv4)


def test_an_etcd_that_hangs_is_told_from_one_that_is_quiet(tmp_path):
    with etcd_cluster(tmp_path) as made:
        a, b = made.nodes
        (member,) = made.members
        member.process.send_signal(signal.SIGSTOP)
        until("the trouble to be noticed", lambda: made.status(a)["store"]["away_since"] is not None)
        assert pings(a.pods[0], b.pods[0].ipv4)
        member.process.send_signal(signal.SIGCONT)
        until("the store to be back", lambda: made.status(a)["store"]["away_since"] is None)


def test_a_start_waits_for_etcd_and_for_the_configuration_and_is_ready_only_then(tmp_path):
    with Lab("etc") as lab:
        made = EtcdCluster(lab, tmp_path, 1)
        (member,) = made.members
        member.kill()
        host = lab.add_host()
        log = tmp_path / "log"
        arguments = [*made.arguments(host), "--healthz-port", "8080"]

        def answer(path: str) -> str:
            script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080{path}').status)"
            return host.run(["python3", "-c", script]).stdout.strip() or "no"

        with open(log, "w") as output:
            process = host.popen([*NODE, *arguments], stdout=output, stderr=output)
        until("it to wait", lambda: "waiting for the store" in log.read_text())
        assert made.status(host)["state"] == "starting"
        assert (answer("/healthz"), answer("/readyz")) == ("200", "no")
        member.start(made.members)
        made.wait_for_etcd()
        until("it to miss the configuration", lambda: f"{PREFIX}/config" in log.read_text())
        assert answer("/readyz") == "no"
        made.put("config", CONFIG)
        until("it to be ready", lambda: answer("/readyz") == "200")
        assert made.subnet_file(host).exists()
        metrics = host.run(
            [
                "python3",
                "-c",
                "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/metrics').read().decode())",
            ]
        ).stdout
        assert "pyflannel_dp_ready 1.0" in metrics
        assert 'pyflannel_dp_store_up{kind="etcd"} 1.0' in metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "Traceback" not in log.read_text()


def test_two_daemons_on_one_host_do_not_touch_each_other(tmp_path):
    with Lab("etc") as lab:
        made = EtcdCluster(lab, tmp_path, 1)
        here, there = lab.add_host(), lab.add_host()
        before = interfaces_and_routes(here)
        second = {"Network": "10.99.0.0/16", "Backend": {"Type": "vxlan", "VNI": 2, "Port": 4789}}
        made.put("config", CONFIG)
        made.etcdctl("put", "/second/config", json.dumps(second))

        def arguments(host, name: str) -> list[str]:
            prefix = ["--etcd-prefix", "/second"] if name == "second" else []
            run_dir = tmp_path / f"{name}{host.number}"
            return ["--etcd-endpoints", made.endpoints, "--run-dir", str(run_dir), "--ip-masq", *prefix]

        processes = {}
        for host in (here, there):
            for name in ("first", "second"):
                with open(tmp_path / f"log-{name}{host.number}", "w") as log:
                    processes[host.number, name] = host.popen([*NODE, *arguments(host, name)], stdout=log, stderr=log)
        for host in (here, there):
            for name in ("first", "second"):
                until("subnet.env", (tmp_path / f"{name}{host.number}" / "subnet.env").exists)
        tables = here.run(["nft", "list", "tables"]).stdout
        assert tables.count("pyflannel-dp") == 2

        def status(host, name: str) -> dict:
            return ask(tmp_path / f"{name}{host.number}", "status")

        assert status(here, "first")["device"]["name"] == "flannel.1"
        assert status(here, "second")["device"]["name"] == "flannel.2"

        def reaches(name: str) -> bool:
            target = ip_network(status(there, name)["lease"]["subnet"]).network_address
            return here.run(["ping", "-n", "-c", "1", "-W", "1", str(target)]).returncode == 0

        until("both overlays", lambda: reaches("first") and reaches("second"))
        processes[here.number, "first"].send_signal(signal.SIGTERM)
        assert processes[here.number, "first"].wait(10) == 0
        assert reaches("second")
        cleaned = here.run([*NODE, "cleanup", "--run-dir", str(tmp_path / f"first{here.number}")])
        assert "removed device flannel.1" in cleaned.stdout
        assert here.run(["nft", "list", "tables"]).stdout.count("pyflannel-dp") == 1
        assert reaches("second")
        processes[here.number, "second"].send_signal(signal.SIGTERM)
        assert processes[here.number, "second"].wait(10) == 0
        here.run([*NODE, "cleanup", "--run-dir", str(tmp_path / f"second{here.number}")])
        assert not (tmp_path / f"first{here.number}").exists()
        assert not (tmp_path / f"second{here.number}").exists()
        assert interfaces_and_routes(here) == before
        assert here.run(["nft", "-j", "list", "ruleset"]).stdout.count('"table"') == 0


def test_the_operator_lists_reserves_releases_and_configures(tmp_path):
    with etcd_cluster(tmp_path, nodes=1, pods=False) as made:
        (a,) = made.nodes
        key = made.key(a)
        listed = json.loads(made.leases("list", "--json").stdout)
        assert [(one["key"], one["reservation"]) for one in listed] == [(key, False)]
        assert 23 * 3600 < listed[0]["expiration"] - time.time() <= 24 * 3600
        assert str(a.ipv4) in made.leases("list").stdout

        reserved = made.leases("reserve", "10.244.77.0/24", "--public-ip", "192.0.2.7")
        assert reserved.returncode == 0, reserved.stderr
        assert made.stored()["10.244.77.0-24"].get("lease", 0) == 0
        until("the node to hear of it", lambda: [one["subnet"] for one in made.status(a)["peers"]] == ["10.244.77.0/24"])
        clash = made.leases("reserve", "10.244.77.0/24", "--public-ip", "192.0.2.8")
        assert (clash.returncode, "held by 192.0.2.7" in clash.stderr) == (1, True)
        outside = made.leases("reserve", "10.99.0.0/24", "--public-ip", "192.0.2.8")
        assert (outside.returncode, "does not fit" in outside.stderr) == (1, True)

        kept = made.leases("release", key.replace("-", "/"))
        assert (kept.returncode, "--force" in kept.stderr) == (1, True)
        assert made.leases("release", "10.244.77.0/24").returncode == 0
        assert set(made.stored()) == {key}

        assert made.leases("reserve", key.replace("-", "/")).returncode == 0
        assert made.stored()[key].get("lease", 0) == 0
        made.stop(a)
        made.start(a)
        assert made.status(a)["lease"]["expiration"] is None
        assert made.stored()[key].get("lease", 0) == 0, "a reservation stays one"

        assert json.loads(made.leases("config", "--json").stdout)["SubnetLen"] == 24
        (tmp_path / "new.json").write_text(json.dumps(CONFIG | {"SubnetLen": 99}))
        refused = made.leases("config", "--set", str(tmp_path / "new.json"))
        assert refused.returncode == 1
        assert "SubnetLen" in refused.stderr
        assert json.loads(made.stored("config", PREFIX)[""]["value"]) == CONFIG
        (tmp_path / "new.json").write_text(json.dumps(CONFIG | {"SubnetLen": 26}))
        assert made.leases("config", "--set", str(tmp_path / "new.json")).returncode == 0
        assert json.loads(made.stored("config", PREFIX)[""]["value"])["SubnetLen"] == 26


def test_wrong_words_about_etcd(tmp_path):
    with Lab("etc") as lab:
        host = lab.add_host()
        places = ["--run-dir", str(tmp_path / "run"), "--subnet-file", str(tmp_path / "s.env")]
        for options, code, part in (
            (
                ["--store", "local", "--etcd-endpoints", "http://192.0.2.9:2379"],
                2,
                "goes with --store etcd",
            ),
            (["--etcd-endpoints", "ftp://x"], 2, "--etcd-endpoints"),
            (["--etcd-endpoints", "http://192.0.2.9:2379", "--network", NETWORK], 2, "leases config --set"),
            (["--etcd-endpoints", "http://192.0.2.9:2379", "--etcd-username", "x"], 2, "--etcd-password"),
            (["--etcd-endpoints", "https://192.0.2.9:2379", "--etcd-cafile", "/nowhere.pem"], 1, "/nowhere.pem"),
        ):
            done = run_node(host, *places, *options)
            assert (done.returncode, part in done.stderr) == (code, True), done.stderr
            assert "Traceback" not in done.stderr


def test_fifty_nodes_started_at_once_get_the_fifty_subnets_and_one_more_fails_cleanly(tmp_path):
    config = CONFIG | {"SubnetMin": "10.244.1.0", "SubnetMax": "10.244.50.0"}
    with Lab("etc") as lab:
        made = EtcdCluster(lab, tmp_path, 1)
        made.put("config", config)
        hosts = [lab.add_host(ipv6=False) for _ in range(50)]
        for host in hosts:
            with open(tmp_path / f"log{host.number}", "w") as log:
                made.processes[host.number] = host.popen([*NODE, *made.arguments(host)], stdout=log, stderr=log)
        for host in hosts:
            until(f"host {host.number}", lambda host=host: made.subnet_file(host).exists(), seconds=60)
        stored = made.stored()
        assert sorted(stored, key=lambda key: int(key.split(".")[2])) == [f"10.244.{n}.0-24" for n in range(1, 51)]
        assert {json.loads(one["value"])["PublicIP"] for one in stored.values()} == {str(host.ipv4) for host in hosts}
        assert all(made.processes[host.number].poll() is None for host in hosts)
        done = run_node(lab.add_host(ipv6=False), *made.arguments(made.members[0].host))
        assert done.returncode == 1
        assert "all subnets of /24 between 10.244.1.0 and 10.244.50.0 are taken" in done.stderr
        assert made.stored() == stored
