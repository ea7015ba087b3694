"""The lab: impairments by the relay, proven with ping and TCP between hosts; topologies with nodes; the command."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from ipaddress import IPv6Network
from pathlib import Path

import pytest
from cluster import DEADLINE, Tap, add_up, ping, pings, transfer, until

from dataplane.lab import Host, Lab, LabError, inside
from dataplane.lab.topology import HostPlan, LinkPlan, Runs, Topology
from dataplane.underlay.link import LinkSpec

pytestmark = pytest.mark.netns
SHARES_A_LAB = True
ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples" / "lab").glob("*.toml"))


@pytest.fixture(scope="module")
def relayed():
    """Three hosts whose frames the relay carries, over links that the tests change."""
    with Lab("relay", seed=1) as lab:
        hosts = [lab.add_host() for _ in range(3)]
        lab.impair(hosts[0], hosts[1], LinkSpec())
        yield lab


@pytest.fixture
def trio(relayed):
    yield relayed, *relayed.hosts
    relayed.heal()
    for source in relayed.hosts:
        for target in relayed.hosts:
            if source is not target:
                relayed.impair(source, target, "perfect")
    assert relayed.wires.overruns() == 0


def received(source: Host, target: Host, *options: str, count: int = 3) -> int:
    """How many of `count` pings are answered."""
    done = ping(source, target.ipv4, "-W", "0.3", *options, count=count)
    return int(re.search(r"(\d+) received", done.stdout)[1])


def shortest_round_trip(source: Host, target: Host) -> float:
    """In milliseconds."""
    done = ping(source, target.ipv4)
    return float(re.search(r"= ([\d.]+)/", done.stdout)[1])


def send(source: Host, target: Host, byte_count: int) -> float:
    """Send so much by TCP; seconds until all has arrived."""
    with inside(target.name):
        listener = socket.create_server((str(target.ipv4), 0))
    with inside(source.name):
        sender = socket.socket()
    with listener, sender:
        sender.settimeout(DEADLINE)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        with receiver:
            receiver.settimeout(DEADLINE)
            started = time.monotonic()
            sender.setblocking(False)
            sent = got = 0
            while got < byte_count:
                with contextlib.suppress(BlockingIOError):
                    sent += sender.send(bytes(min(byte_count - sent, 1 << 16)))
                got += len(receiver.recv(1 << 16))
    return time.monotonic() - started


def test_a_command_is_a_list_or_a_line():
    with Lab("line") as lab:
        host = lab.add_host()
        assert host.run("echo a 'b  c' $HOME").stdout == "a b  c $HOME\n"
        assert host.run(["echo", "a b"]).stdout == "a b\n"
        assert host.popen("sleep 100").args[-2:] == ["sleep", "100"]


def test_a_lab_without_impairments_has_no_relay():
    with Lab("plain") as lab:
        a, b = lab.add_host(), lab.add_host()
        assert pings(a, b.ipv4)
        assert lab.link_counts() == {}
        assert lab.processes == []
        assert "tx-checksumming: on" in a.run("ethtool -k eth0").stdout
        assert lab.underlay.run("ls /sys/class/net/br0/brif").stdout.split() == ["h1", "h2"]


def test_what_others_left_running_in_it_is_ended():
    with Lab("shell") as lab:
        host = lab.add_host()
        shell = subprocess.Popen(["ip", "netns", "exec", host.name, "sleep", "100"])
        until("it to be in there", lambda: str(shell.pid) in host.run(f"ip netns pids {host.name}").stdout)
    assert shell.wait(DEADLINE) == -signal.SIGKILL


def test_an_impairment_in_mid_run_takes_the_hosts_off_the_bridge():
    with Lab("later") as lab:
        a, b = lab.add_host(), lab.add_host()
        assert pings(a, b.ipv4)
        lab.impair(a, b, "delay=20ms")
        assert 20 <= shortest_round_trip(a, b) < 40
        assert lab.underlay.run("ls /sys/class/net/br0/brif").stdout == ""
        c = lab.add_host()
        assert shortest_round_trip(a, c) < 20
        assert pings(c, b.ipv6)


def test_a_lab_with_a_default_link_has_it_everywhere():
    with Lab("dflt", link=LinkSpec(delay=0.01)) as lab:
        a, b = lab.add_host(), lab.add_host()
        assert 20 <= shortest_round_trip(a, b) < 40


def test_what_is_too_large_for_a_hosts_device_is_counted_as_that_and_not_as_an_overrun():
    with Lab("small", link=LinkSpec(delay=0.001)) as lab:
        a, b = lab.add_host(), lab.add_host(mtu=1300)
        assert received(a, b, "-s", "1272") == 3
        before = lab.link_counts()["h1", "h2"]
        assert received(a, b, "-M", "do", "-s", "1400") == 0
        counts = lab.link_counts()["h1", "h2"]
        assert counts.oversize - before.oversize == 3
        assert counts.sent + counts.duplicated == counts.delivered + counts.lost + counts.queue_full + counts.oversize
        assert lab.wires.overruns() == 0


def test_the_relay_ends_when_its_lab_is_gone():
    program = """if True:
        import os
        from dataplane.lab import Lab
        lab = Lab("gone").__enter__()
        lab.impair(lab.add_host(), lab.add_host(), "loss=1%")
        print(lab.underlay.name, lab.processes[0].pid, flush=True)
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE)
    underlay, relay = done.stdout.split()
    until("the relay to end", lambda: not Path(f"/proc/{relay}/exe").exists())
    for suffix in ("net", "h1", "h2"):
        subprocess.run(["ip", "netns", "del", underlay.replace("-net", f"-{suffix}")], check=True)


class TestRelay:
    def test_perfect_links_carry_both_families(self, trio):
        _, a, b, c = trio
        for source, target in ((a, b), (b, c), (c, a)):
            assert pings(source, target.ipv4)
            assert pings(source, target.ipv6)

    def test_delay(self, trio):
        lab, a, b, c = trio
        lab.impair(a, b, "delay=20ms", both=True)
        assert 40 <= shortest_round_trip(a, b) < 80
        assert shortest_round_trip(a, c) < 20

    def test_a_partition_lets_nothing_pass_until_it_heals(self, trio):
        lab, a, b, c = trio
        lab.partition([a], [b, c])
        assert (received(a, b), received(a, c), received(c, a)) == (0, 0, 0)
        assert pings(b, c.ipv4)
        lab.heal()
        assert (received(a, b), received(a, c), received(c, a)) == (3, 3, 3)

    def test_a_healed_link_is_as_bad_as_it_was(self, trio):
        lab, a, b, _ = trio
        lab.partition([a], [b])
        lab.impair(a, b, "delay=15ms")
        assert received(a, b) == 0
        lab.heal()
        assert 15 <= shortest_round_trip(a, b) < 30

    def test_loss_of_everything_in_one_direction(self, trio):
        lab, a, b, _ = trio
        lab.impair(a, b, "loss=100%")
        with Tap(a.name, "eth0") as at_a, Tap(b.name, "eth0") as at_b:
            macs = [(bytes.fromhex(host.run("cat /sys/class/net/eth0/address").stdout.replace(":", ""))) for host in (a, b)]
            assert received(a, b) == received(b, a) == 0
            sources_at_a = {frame[6:12] for frame in at_a.caught()}
            sources_at_b = {frame[6:12] for frame in at_b.caught()}
        assert sources_at_a >= set(macs)
        assert macs[0] not in sources_at_b
        assert lab.link_counts()["h1", "h2"].lost > 0

    def test_loss_is_counted_and_as_large_as_asked_for(self, trio):
        lab, a, b, _ = trio
        assert pings(a, b.ipv4)  # the neighbours are known
        before = lab.link_counts()["h1", "h2"].lost
        lab.impair(a, b, "loss=50%")
        answered = received(a, b, "-i", "0.002", count=200)
        assert 60 <= answered <= 140
        assert lab.link_counts()["h1", "h2"].lost - before >= 200 - answered

    def test_duplicates(self, trio):
        lab, a, b, _ = trio
        lab.impair(a, b, "duplicate=100%")
        assert "DUP!" in ping(a, b.ipv4).stdout

    def test_damage_is_found_by_checksums_and_spares_the_neighbours(self, trio):
        lab, a, b, _ = trio
        assert pings(a, b.ipv4)
        lab.impair(a, b, "corrupt=100%")
        assert received(a, b) == 0
        lab.impair(a, b, "perfect")
        assert pings(a, b.ipv4)

    def test_a_small_mtu_is_a_black_hole(self, trio):
        lab, a, b, _ = trio
        lab.impair(a, b, "mtu=1000")
        assert received(a, b, "-s", "972") == 3
        assert received(a, b, "-s", "973") == 0

    def test_a_rate_is_kept(self, trio):
        lab, a, b, _ = trio
        lab.impair(a, b, "rate=20mbit")
        assert send(a, b, 1 << 20) >= 8 * (1 << 20) / 20e6
        assert send(b, a, 1 << 20) < 8 * (1 << 20) / 20e6

    def test_frames_are_single_packets_with_whole_checksums(self, trio):
        _, a, b, _ = trio
        with Tap(b.name, "eth0") as tap:
            send(a, b, 1 << 20)
            frames = tap.caught()
        assert max(len(frame) for frame in frames if frame[23] == 6 and frame[26:30] == a.ipv4.packed) == 1514
        assert "tx-checksumming: off" in a.run("ethtool -k eth0").stdout

    def test_it_is_not_the_bottleneck_of_a_lab(self, trio):
        _, a, b, _ = trio
        assert 8 * (32 << 20) / send(a, b, 32 << 20) > 100e6

    def test_a_device_that_goes_down_and_up_again_works_again(self, trio):
        _, a, b, _ = trio
        a.ip("link set eth0 down")
        a.ip("link set eth0 up", "route replace default via 192.0.2.254 dev eth0")
        until("a answer", lambda: received(b, a, count=1) == 1)

    def test_nonsense_is_refused(self, trio):
        lab, a, b, _ = trio
        with pytest.raises(LabError, match="there is no link from h1 to h1"):
            lab.impair(a, a, "loss=1%")
        with pytest.raises(LabError, match="h1 is on two sides"):
            lab.partition([a], [a, b])
        with pytest.raises(ValueError, match="unknown"):
            lab.impair(a, b, "los=1%")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Two nodes and a kernel VXLAN device, dual stack, on bad links."""
    topology = Topology(
        hosts=(HostPlan("a", pods=2), HostPlan("b", pods=1, mtu=1400), HostPlan("k", Runs.KERNEL, pods=1)),
        ipv6_network=IPv6Network("fd00:10:244::/48"),
        seed=3,
        link=LinkSpec(delay=0.001),
        links=(LinkPlan("a", "b", LinkSpec(delay=0.001, loss=0.005, reorder=0.01, duplicate=0.01)),),
    )
    with topology.bring_up(tmp_path_factory.mktemp("lab")) as running:
        yield running
        for name in running.nodes:
            assert add_up(running.status(name))


class TestTopology:
    def test_it_has_what_was_asked_for(self, running):
        assert list(running.hosts) == ["a", "b", "k"]
        assert len(running.pods) == 4
        assert running.status("a")["lease"]["subnet"] == str(running.subnets["a"].ipv4)
        assert running.status(running.hosts["b"])["device"]["mtu"] == 1400 - 70
        assert "ready: flannel.1" in running.log("a").read_text()

    @pytest.mark.parametrize("version", [4, 6])
    def test_pods_reach_each_other(self, running, version):
        a, b, k = (running.hosts[name].pods[0] for name in "abk")
        for source, target in ((k, a), (k, b), (b, k), (a, k), (b, a)):
            address = target.ipv4 if version == 4 else target.ipv6
            if source is b or target is b:  # some are lost on the way from a
                until(f"{source.name} to {address}", lambda s=source, t=address: ping(s, t, count=1).returncode == 0)
            else:
                assert pings(source, address)

    def test_data_gets_through_whole(self, running):
        a, b, k = (running.hosts[name].pods[0] for name in "abk")
        for source, target in ((a, b), (b, k), (k, a)):
            assert transfer(source, target, 4, 2)
        assert running.lab.link_counts()["a", "b"].lost > 0


def test_a_folder_may_be_used_again_and_an_underlay_may_be_too_small_for_ipv6(tmp_path):
    topology = Topology(hosts=(HostPlan("a", pods=1), HostPlan("b", pods=1), HostPlan("n", Runs.NOTHING)), mtu=1000)
    for _ in range(2):
        with topology.bring_up(tmp_path) as running:
            assert pings(running.pods[0], running.pods[1].ipv4, "-M", "do", "-s", "922")
            assert running.lab.link_counts() == {}


def test_a_node_that_cannot_start_is_told_with_its_log():
    topology = Topology(hosts=(HostPlan("a", options=("--iface", "eth9")),))
    with pytest.raises(LabError, match=r"the node on host a ended:\n.*no interface matches eth9"), topology.bring_up():
        pass


def test_the_program_in_the_documentation_runs():
    program = (ROOT / "docs" / "lab.md").read_text().split("```python")[1].split("```")[0]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "packets transmitted" in done.stdout


class TestCommand:
    def start(self, path: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dataplane.cli", "lab", str(path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def leftovers(self, process: "subprocess.Popen[str]") -> list[str]:
        shown = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        return [line for line in shown.splitlines() if f"lab{process.pid:x}-" in line]

    @pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
    def test_the_examples_come_up_and_ctrl_c_removes_them(self, path):
        with self.start(path) as process:
            shown = ""
            for line in process.stdout:
                shown += line
                if "Ctrl-C ends" in line:
                    namespaces = self.leftovers(process)
                    commands = re.findall(r"ip netns exec (\S+) sh", shown)
                    assert {name.split()[0] for name in namespaces} == {*commands, f"lab{process.pid:x}-net"}
                    folder = Path(re.search(r"status --run-dir (\S+)", shown)[1]).parent
                    assert (folder / "a.log").exists()
                    ask = f"{sys.executable} -m dataplane.cli status --run-dir {folder}/run-a"
                    assert "peers" in subprocess.run(ask.split(), capture_output=True, text=True, check=True).stdout
                    process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0, shown
        assert self.leftovers(process) == []
        assert not folder.exists()

    def test_a_node_that_ends_meanwhile_is_told_of(self, tmp_path):
        (tmp_path / "one.toml").write_text('[[host]]\nname = "a"\n')
        with self.start(tmp_path / "one.toml") as process:
            for line in process.stdout:
                if "Ctrl-C ends" in line:
                    name = self.leftovers(process)[0].split()[0].rpartition("-")[0] + "-a"
                    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
                    os.kill(int(pids.split()[0]), signal.SIGTERM)
                if "ended" in line:
                    assert "the node on host a ended with exit code 0" in line
                    process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0
        assert self.leftovers(process) == []
