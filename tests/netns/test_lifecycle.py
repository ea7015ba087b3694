"""Start, stop, kill, start again, clean up; and every way in which a start can fail, with its message and exit code."""

import fcntl
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from cluster import NETWORK, NODE, add_up, cluster, interfaces_and_routes, ping, pings, run_node, until

from dataplane.lab import Lab

pytestmark = pytest.mark.netns
STATIC = ["--store", "static", "--network", NETWORK, "--subnet", "10.244.1.0/24"]


@pytest.fixture
def lab():
    with Lab("life") as lab:
        yield lab


@pytest.fixture
def places(tmp_path) -> list[str]:
    return [
        "--run-dir",
        str(tmp_path / "run"),
        "--subnet-file",
        str(tmp_path / "subnet.env"),
    ]


def assert_fails(done: subprocess.CompletedProcess[str], *parts: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_sigterm_stops_it_cleanly_and_cleanup_leaves_the_host_as_it_was(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        before = interfaces_and_routes(host)
        made.start(host)
        assert "flannel.1" in interfaces_and_routes(host)
        assert made.stop(host) == 0
        assert "INFO stopped" in made.log(host)
        assert "flannel.1" in interfaces_and_routes(host), "the device waits for the next start"
        assert made.subnet_file(host).exists()
        cleanup = [*NODE, "cleanup", "--run-dir", str(made.run_dir(host))]
        assert f"removed {made.subnet_file(host)}" in host.run(cleanup).stdout
        assert interfaces_and_routes(host) == before
        assert not made.run_dir(host).exists()
        assert host.run(cleanup).stdout == "nothing of ours is here\n"


def test_ctrl_c_stops_it_too(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1) as made:
        assert made.stop(made.lab.hosts[0], signal.SIGINT) == 0


def test_cleanup_refuses_while_the_node_runs(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1) as made:
        host = made.lab.hosts[0]
        done = host.run([*NODE, "cleanup", "--run-dir", str(made.run_dir(host))])
        assert_fails(done, "a node is running here", "stop it first")
        assert made.status(host)["state"] == "running"


def test_kill_and_restart_under_ping(tmp_path):
    """The packets of the gap are lost, nothing else: same subnet, same MAC, and the peer needs no telling."""
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        before = made.status(a)["lease"]
        with open(tmp_path / "ping", "w") as output:
            pinging = b.pods[0].popen(["ping", "-n", "-i", "0.02", str(a.pods[0].ipv4)], stdout=output)

        def answers() -> int:
            return (tmp_path / "ping").read_text().count("bytes from")

        until("answers before the kill", lambda: answers() >= 5)
        assert made.stop(a, signal.SIGKILL) == -signal.SIGKILL
        assert (made.run_dir(a) / "control.sock").exists()
        made.start(a)
        at_restart = answers()
        until("answers after the restart", lambda: answers() >= at_restart + 5)
        pinging.send_signal(signal.SIGINT)
        pinging.wait(5)
        summary = re.search(r"(\d+) packets transmitted, (\d+) received", (tmp_path / "ping").read_text())
        assert summary is not None
        after = made.status(a)["lease"]
        assert (after["subnet"], after["vtep_mac"]) == (before["subnet"], before["vtep_mac"])
        assert add_up(made.status(a))
        assert pings(a.pods[0], b.pods[0].ipv4)


def test_cleanup_after_a_kill_leaves_the_host_as_it_was(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        host.ip("route add 10.99.0.0/16 via 192.0.2.77 dev eth0")
        before = interfaces_and_routes(host)
        made.start(host)
        made.stop(host, signal.SIGKILL)
        host.run([*NODE, "cleanup", "--run-dir", str(made.run_dir(host))])
        assert interfaces_and_routes(host) == before
        assert not made.run_dir(host).exists()


def cleanup(made, host, *prefix: str) -> subprocess.CompletedProcess[str]:
    return host.run([*prefix, *NODE, "cleanup", "--run-dir", str(made.run_dir(host))])


def test_cleanup_with_an_unreadable_note_says_so_and_takes_the_rules(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--ip-masq", nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        before = interfaces_and_routes(host)
        made.start(host)
        made.stop(host)
        (made.run_dir(host) / "state.json").write_text("{")
        done = cleanup(made, host)
        assert_fails(done, "state.json was unreadable", "subnet.env")
        assert "removed nftables table pyflannel-dp-flannel.1\nremoved device flannel.1\n" in done.stdout
        assert interfaces_and_routes(host) == before
        assert host.run(["nft", "list", "tables"]).stdout == ""
        assert not made.run_dir(host).exists()


def test_cleanup_without_nft_removes_the_rest_and_the_rules_the_next_time(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--ip-masq", nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        before = interfaces_and_routes(host)
        made.start(host)
        made.stop(host)
        done = cleanup(made, host, "env", "PATH=/nowhere")
        assert_fails(done, "not everything was removed: the program nft is missing")
        assert "removed device flannel.1" in done.stdout
        assert interfaces_and_routes(host) == before
        assert not made.subnet_file(host).exists()
        assert "pyflannel-dp-flannel.1" in host.run(["nft", "list", "tables"]).stdout
        done = cleanup(made, host)
        assert (done.returncode, done.stderr) == (0, "")
        assert host.run(["nft", "list", "tables"]).stdout == ""
        assert not made.run_dir(host).exists()


def test_cleanup_on_a_full_disk_makes_room(tmp_path):
    full = f"""
        mount -t tmpfs -o size=64k tmpfs {tmp_path}
        mkdir {tmp_path}/run
        : > {tmp_path}/run/lock
        printf '%s' '{{"subnet_file": "{tmp_path}/subnet.env", "content": "A=1\\n"}}' > {tmp_path}/run/state.json
        echo A=1 > {tmp_path}/subnet.env
        cat /dev/zero > {tmp_path}/filler 2> /dev/null && exit 9
        exec {" ".join(NODE)} cleanup --run-dir {tmp_path}/run
    """
    done = subprocess.run(["unshare", "-mn", "sh", "-c", full], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"removed {tmp_path}/subnet.env\nremoved {tmp_path}/run/state.json\n" in done.stdout


def test_a_restart_whose_lease_is_gone_takes_the_subnet_that_subnet_env_names(tmp_path):
    """There are 65 000 others to choose from, for one that does not look there."""
    with cluster(tmp_path, nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "config").write_text('{"Network":"10.0.0.0/8","Backend":{"Type":"vxlan"}}')
        made.start(host)
        key = made.status(host)["lease"]["key"]
        content = made.subnet_file(host).read_text()
        made.stop(host)
        (tmp_path / "store" / "subnets" / key).unlink()
        made.start(host)
        assert made.status(host)["lease"]["key"] == key
        assert made.subnet_file(host).read_text() == content


def test_a_restart_with_other_options_leaves_nothing_that_cleanup_does_not_find(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        before = interfaces_and_routes(host)
        made.start(host, "--ip-masq")
        made.stop(host, signal.SIGKILL)
        made.start(host, "--ip-masq", "--device", "other0", "--subnet-file", str(tmp_path / "other.env"))
        assert "flannel.1" not in interfaces_and_routes(host)
        assert re.findall(r"pyflannel-dp\S+", host.run(["nft", "list", "tables"]).stdout) == ["pyflannel-dp-other0"]
        made.stop(host, signal.SIGKILL)
        done = cleanup(made, host)
        assert (done.returncode, done.stderr) == (0, "")
        for one in ("nftables table pyflannel-dp-other0", "device other0", tmp_path / "other.env", made.subnet_file(host)):
            assert f"removed {one}\n" in done.stdout
        assert interfaces_and_routes(host) == before
        assert host.run(["nft", "list", "tables"]).stdout == ""
        assert not made.subnet_file(host).exists()


def start_static_pair(made, version: int, underlay: int, *options: str):
    """Two static nodes with pods: subnets of `version`, peers by their address of the `underlay` family."""
    a, b = made.lab.hosts
    network, subnet = {4: (NETWORK, "10.244.{}.0/24"), 6: ("fd00:1::/48", "fd00:1:0:{}::/64")}[version]
    prefix = {4: "--", 6: "--ipv6-"}[version]
    for host, own, peer in ((a, 1, b), (b, 2, a)):
        made.start(
            host, "--store", "static", f"{prefix}network", network, f"{prefix}subnet", subnet.format(own),
            "--peer", f"{subnet.format(3 - own)}={peer.ipv4 if underlay == 4 else peer.ipv6}", *options,
        )  # fmt: skip
        made.add_pod(host)
    return a, b


def test_a_static_pair_needs_no_store(tmp_path):
    with cluster(tmp_path, nodes=2, start=False) as made:
        a, b = start_static_pair(made, version=4, underlay=4)
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert pings(b.pods[0], a.pods[0].ipv4)
        assert not (tmp_path / "store").exists()


def test_a_static_pair_over_ipv6_alone(tmp_path):
    with cluster(tmp_path, nodes=2, start=False) as made:
        a, b = start_static_pair(made, 6, 6, "--framing", "ip")
        assert pings(a.pods[0], b.pods[0].ipv6)
        assert made.status(a)["lease"]["subnet"] is None


def test_ipv4_packets_over_an_ipv6_underlay(tmp_path):
    with cluster(tmp_path, nodes=2, start=False) as made:
        a, b = start_static_pair(made, version=4, underlay=6)
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert made.status(a)["peers"][0]["address"] == "2001:db8::2"


def test_another_vni_and_port(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--vni", "77", "--port", "4789") as made:
        a, b = made.lab.hosts
        status = made.status(a)
        assert (status["device"]["name"], status["vni"], status["port"]) == ("flannel.77", 77, 4789)
        assert pings(a.pods[0], b.pods[0].ipv4)


def test_a_path_smaller_than_the_device_is_told_to_the_sender(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip(f"route add {b.ipv4}/32 dev eth0 mtu 1400")
        done = ping(a.pods[0], b.pods[0].ipv4, "-M", "do", "-s", "1422", count=2)
        assert re.search(r"Frag needed and DF set \(mtu = 1350\)|message too long, mtu=1350", done.stdout + done.stderr), (
            done.stdout
        )
        assert made.status(a)["outbound"]["verdicts"]["too_big"] >= 1
        assert pings(a.pods[0], b.pods[0].ipv4, "-M", "do", "-s", "1322")
        assert pings(a.pods[0], b.pods[0].ipv4, "-M", "dont", "-s", "1422")


def test_a_new_lease_is_live_within_a_second_and_a_torn_one_is_skipped(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a = made.lab.hosts[0]
        (tmp_path / "store" / "subnets" / "10.244.240.0-24").write_text('{"PublicIP":"192.0.2.')
        (tmp_path / "store" / "subnets" / "README").write_text("not a lease")
        made.announce_static = (tmp_path / "store" / "subnets" / "10.244.241.0-24").write_text(
            '{"PublicIP":"192.0.2.99","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:63"}}'
        )
        made.wait_for_peers(a, 2)
        assert {peer["subnet"] for peer in made.status(a)["peers"]} >= {"10.244.241.0/24"}
        until("both to be reported", lambda: made.log(a).count("skipped") == 2)


def test_a_lease_that_is_deleted_ends_the_node_with_exit_code_1_if_it_is_to_stop(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, "--on-lost-lease", "stop", nodes=1) as made:
        host = made.lab.hosts[0]
        key = made.status(host)["lease"]["key"]
        (tmp_path / "store" / "subnets" / key).unlink()
        process = made.processes[host.number]
        assert process.wait(10) == 1
        assert f"{key} is gone" in made.log(host)
        assert "Traceback" not in made.log(host)


def test_a_link_taken_down_and_up_again_gets_its_route_back(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip("link set flannel.1 down", "link set flannel.1 up")
        until("the route to come back", lambda: "the route to 10.244.0.0/16 is gone; put right" in made.log(a))
        assert "flannel.1" in a.run(["ip", "route", "get", str(b.pods[0].ipv4)]).stdout
        assert pings(a.pods[0], b.pods[0].ipv4)


def test_sigterm_ends_a_start_that_waits_for_the_store(tmp_path):
    with cluster(tmp_path, "--network", NETWORK, nodes=1, start=False) as made:
        host = made.lab.hosts[0]
        (tmp_path / "store" / "subnets").mkdir(parents=True)
        with open(tmp_path / "store" / "lock", "w") as lock, open(tmp_path / "log", "w") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = host.popen([*NODE, *made.arguments(host)], stdout=log, stderr=log)
            until("it to wait", lambda: "waiting for" in (tmp_path / "log").read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) in {0, 1}
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_deleted_device_is_made_again(tmp_path):
    with cluster(tmp_path, "--network", NETWORK) as made:
        a, b = made.lab.hosts
        a.ip("link del flannel.1")
        until("the route to come back", lambda: "flannel.1" in a.run(["ip", "route", "get", str(b.pods[0].ipv4)]).stdout)
        assert pings(a.pods[0], b.pods[0].ipv4)
        assert pings(b.pods[0], a.pods[0].ipv4)
        assert "the device flannel.1 is gone; opening it anew" in made.log(a)
        assert add_up(made.status(a))


class TestFailures:
    def test_an_interface_that_is_missing(self, lab, places):
        done = run_node(lab.add_host(), *STATIC, *places, "--iface", "eth9")
        assert_fails(done, "no interface matches eth9", "eth0 (192.0.2.1")

    def test_no_default_route(self, lab, places):
        host = lab.add_host()
        host.ip("route del default")
        assert_fails(run_node(host, *STATIC, *places), "no default route", "--iface")

    def test_the_port_held_by_a_kernel_vxlan_device(self, lab, places):
        host = lab.add_host()
        host.ip("link add vx0 type vxlan id 7 dev eth0 dstport 8472", "link set vx0 up")
        done = run_node(host, *STATIC, *places)
        assert_fails(done, "UDP port 8472", "kernel VXLAN device vx0 holds it", "ip link del vx0")
        assert "flannel.1" not in interfaces_and_routes(host)

    def test_a_flannel_device_of_the_kernel_in_the_way(self, lab, places):
        host = lab.add_host()
        host.ip("link add flannel.1 type vxlan id 1 dev eth0 dstport 8473")
        assert_fails(run_node(host, *STATIC, *places), "an interface flannel.1 exists already and is not ours", "--device")

    def test_no_tun_device_node(self, lab, places):
        hide = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/net && exec "$@"', "sh")
        done = run_node(lab.add_host(), *STATIC, *places, prefix=hide)
        assert_fails(done, "/dev/net/tun does not exist", "modprobe tun")

    def test_no_privileges(self, lab, places):
        without = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
        done = run_node(lab.add_host(), *STATIC, *places, prefix=without)
        assert_fails(done, "not permitted: run as root or with CAP_NET_ADMIN")

    def test_somebody_elses_route_to_the_network(self, lab, places):
        host = lab.add_host()
        host.ip(f"route add {NETWORK} via 192.0.2.77 dev eth0")
        assert_fails(run_node(host, *STATIC, *places), f"a route to {NETWORK} exists that is not ours")

    def test_an_underlay_too_small(self, lab, places):
        assert_fails(
            run_node(lab.add_host(mtu=620, ipv6=False), *STATIC, *places), "MTU of 620 less the overhead of 50", "576"
        )

    def test_a_run_folder_that_cannot_be_made(self, lab, places, tmp_path):
        (tmp_path / "file").touch()
        done = run_node(lab.add_host(), *STATIC, *places, "--run-dir", str(tmp_path / "file" / "run"))
        assert_fails(done, "cannot use the run folder")

    def test_a_network_without_a_free_subnet(self, lab, places, tmp_path):
        subnets = tmp_path / "store" / "subnets"
        subnets.mkdir(parents=True)
        (tmp_path / "store" / "config").write_text('{"Network":"10.5.0.0/28","Backend":{"Type":"vxlan"}}')
        for last in (4, 8, 12):
            value = {"PublicIP": f"192.0.2.{last + 100}", "BackendType": "vxlan"}
            (subnets / f"10.5.0.{last}-30").write_text(json.dumps(value))
        store = ["--store-dir", str(tmp_path / "store")]
        done = run_node(lab.add_host(), *places, *store)
        assert_fails(done, "all subnets of /30 between 10.5.0.4 and 10.5.0.12 are taken")

    def test_a_second_node_in_one_namespace(self, tmp_path):
        with cluster(tmp_path, "--network", NETWORK, nodes=1) as made:
            host = made.lab.hosts[0]
            assert_fails(run_node(host, *made.arguments(host)), "a node is running here")
            other = ["--run-dir", str(tmp_path / "other"), "--subnet-file", str(tmp_path / "other.env")]
            folder = made.run_dir(host)
            assert_fails(run_node(host, *made.arguments(host), *other), "flannel.1 belongs to another node", f"{folder}")
            assert_fails(run_node(host, *made.arguments(host), *other, "--device", "flannel.2"), "another process holds it")
            elsewhere = host.run([*NODE, "cleanup", "--run-dir", str(tmp_path / "nowhere")])
            assert elsewhere.stdout == "nothing of ours is here\n"
            assert made.status(host)["state"] == "running"


def test_it_runs_in_a_user_namespace(tmp_path):
    """Nested and rootless: CAP_NET_ADMIN in a user namespace of one's own and access to /dev/net/tun are enough."""
    node = f"{' '.join(NODE + STATIC)} --peer 10.244.2.0/24=192.0.2.2 --run-dir {tmp_path}/run --subnet-file {tmp_path}/s"
    script = f"""
        set -e
        ip link set lo up
        ip link add eth0 type veth peer name eth1
        ip link set eth0 up; ip link set eth1 up
        ip addr add 192.0.2.1/24 dev eth0
        ip route add default via 192.0.2.254
        {node} &
        node=$!
        while [ ! -s {tmp_path}/s ]; do kill -0 $node; sleep 0.02; done
        ip route get 10.244.2.9
        {" ".join(NODE)} status --run-dir {tmp_path}/run
        kill $node; wait $node
    """
    done = subprocess.run(["unshare", "-Urn", "sh", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "dev flannel.1" in done.stdout
    assert "10.244.2.0/24 at 192.0.2.2 02:fd:c0:00:02:02" in done.stdout


class TestDemo:
    def demo(self, *options: str) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*NODE, "demo", *options], env=os.environ | {"COLUMNS": "120"}, **pipes)

    def leftovers(self) -> list[str]:
        shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if line.startswith("pfdemo")] + [
            str(path) for path in Path("/tmp").glob("pyflannel-dp-demo-*")
        ]

    def test_it_proves_what_it_says_and_leaves_nothing(self):
        with self.demo("--megabytes", "20") as process:
            output = process.communicate(timeout=60)[0]
        assert process.returncode == 0, output
        for part in (
            "VXLAN     flags 0x08, VNI 1",
            "12. ",
            "8 pairs of pods reach each other",
            "host 1 → host 2, 20 MB: equal SHA-256",
            "host 2 → host 3, 20 MB: equal SHA-256",
            "host 3 → host 1, 20 MB: equal SHA-256",
        ):
            assert part in output
        assert self.leftovers() == []

    @pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGINT, 3)])
    def test_interrupted_it_leaves_nothing_either(self, number, times):
        with self.demo() as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "2. one ping" in line:
                    for _ in range(times):
                        process.send_signal(number)
            assert process.wait(20) == 130
        assert self.leftovers() == []

    def test_it_runs_in_a_user_namespace_as_it_does_without_root(self):
        inner = f"mount -t tmpfs tmpfs /run && exec {' '.join(NODE)} demo --megabytes 5"
        command = ["unshare", "-Urnm", "sh", "-c", inner]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8 pairs of pods reach each other" in done.stdout

    def test_without_ip_it_says_what_to_do(self, monkeypatch, capsys):
        from dataplane import demo

        monkeypatch.setattr("dataplane.demo.shutil.which", lambda name: None)
        assert demo.run(1) == 1
        assert "the command ping is missing (Debian package iputils-ping)" in capsys.readouterr().out
