"""Topologies: what a file may say, what is said about nonsense, and the switch that carries frames over links."""

import errno
import os
import random
import signal
import subprocess
import tomllib
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest

from dataplane.cli import main
from dataplane.lab import topologyfile
from dataplane.lab.namespace import LabError
from dataplane.lab.relay import Relay, Switch
from dataplane.lab.topology import HostPlan, LinkPlan, Runs, Topology, TopologyError
from dataplane.lab.topologyfile import load, parse
from dataplane.lab.wires import _Relay
from dataplane.underlay.link import Link, LinkSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples" / "lab").glob("*.toml"))
TWO = """
[[host]]
[[host]]
"""


def test_little_is_enough():
    assert parse(TWO) == Topology(hosts=(HostPlan("h1"), HostPlan("h2")))


def test_everything_that_can_be_said():
    topology = parse("""
        network = "10.1.0.0/16"
        ipv6_network = "fd00:1::/48"
        framing = "vxlan"
        mtu = 9000
        seed = 7
        options = ["--no-udp-gro"]
        [[host]]
        name = "a"
        runs = "node"
        pods = 2
        options = ["--v", "1"]
        mtu = 1400
        [[host]]
        runs = "kernel"
        pods = 1
        subnet = "10.1.200.0/24"
        ipv6_subnet = "fd00:1:0:c8::/64"
        [[host]]
        name = "idle"
        runs = "nothing"
        [link]
        delay = "5ms"
        [[link_between]]
        from = "a"
        to = "h2"
        loss = "10%"
    """)
    assert topology == Topology(
        hosts=(
            HostPlan("a", Runs.NODE, 2, ("--v", "1"), 1400),
            HostPlan(
                "h2", Runs.KERNEL, 1, subnet=IPv4Network("10.1.200.0/24"), ipv6_subnet=IPv6Network("fd00:1:0:c8::/64")
            ),
            HostPlan("idle", Runs.NOTHING),
        ),
        network=IPv4Network("10.1.0.0/16"),
        ipv6_network=IPv6Network("fd00:1::/48"),
        mtu=9000,
        seed=7,
        options=("--no-udp-gro",),
        link=LinkSpec(delay=0.005),
        links=(LinkPlan("a", "h2", LinkSpec(delay=0.005, loss=0.1)),),
    )


def test_both_means_both_directions_and_what_is_said_twice_counts_the_second_time():
    topology = parse(TWO + '[link]\ndelay = "5ms"\n[[link_between]]\nfrom = "h1"\nto = "h2"\nboth = true\ndelay = "9ms"')
    spec = LinkSpec(delay=0.009)
    assert topology.links == (LinkPlan("h1", "h2", spec), LinkPlan("h2", "h1", spec))


def between(text: str) -> str:
    return f'{TWO}[[link_between]]\nfrom = "h1"\nto = "h2"\n{text}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[host]", ["f.toml is not TOML", "line 1"]),
        ("", ["there must be 1 to 100 hosts, not 0"]),
        ('hosts = 3', ["unknown key 'hosts'", "network, ipv6_network, framing"]),
        ('host = 3', ["host is 3, but must be an array of tables, written [[host]]"]),
        ('host = [3]', ["[[host]] number 1: must be a table, not 3"]),
        ('[[host]]\n[[host]]\npod = 1', ["[[host]] number 2: unknown key 'pod'", "name, runs, pods"]),
        ('[[host]]\npods = "x"', ["[[host]] number 1: pods is 'x', but must be a whole number from 0 to 50"]),
        ('[[host]]\npods = true', ["pods is True, but must be a whole number"]),
        ('[[host]]\npods = 51', ["pods is 51", "from 0 to 50"]),
        ('[[host]]\nruns = "nod"', ["runs is 'nod', but must be one of node, kernel, nothing"]),
        ('[[host]]\nruns = ["node"]', ["but must be one of node, kernel, nothing"]),
        ('[[host]]\noptions = "--v 1"', ["options is '--v 1', but must be a list of strings"]),
        ('[[host]]\nmtu = 100', ["mtu is 100", "from 576 to 65535"]),
        ('[[host]]\nname = "A b"', ["host 'A b': a name is 1 to 15 small letters"]),
        ('[[host]]\nname = 3', ["name is 3, but must be a string"]),
        ('[[host]]\nname = "net"', ["the namespace net would be that of the underlay, too"]),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"', ["the namespace a would be that of the host a, too"]),
        ('[[host]]\nname = "a"\npods = 1\n[[host]]\nname = "ap0"', ["ap0 would be that of a pod of the host a, too"]),
        ('[[host]]\nruns = "nothing"\npods = 1', ["host 'h1' runs nothing, so it has no subnet"]),
        ('framing = "ip"\n[[host]]\nruns = "kernel"', ["host 'h1'", "needs the framing vxlan"]),
        ('framing = "gre"', ["framing is 'gre', but must be one of vxlan, ip"]),
        ('[[host]]\nsubnet = "10.244.1.0/24"', ["a subnet is given to kernel hosts only"]),
        ('[[host]]\nruns = "kernel"\noptions = ["--v"]', ["runs no node that could have options"]),
        ('[[host]]\nruns = "kernel"\nsubnet = "10.244.1.1/24"', ["subnet is '10.244.1.1/24', but must be a network like"]),
        ('[[host]]\nruns = "kernel"\nsubnet = 3', ["subnet is 3, but must be a network like 10.244.0.0/16"]),
        ('[[host]]\nruns = "kernel"\nsubnet = "10.1.1.0/24"', ["none of the network's subnets", "/24 from 10.244.1.0"]),
        (2 * '[[host]]\nruns = "kernel"\nsubnet = "10.244.9.0/24"\n', ["host 'h2': 10.244.9.0/24 is another host's"]),
        ('[[host]]\nruns = "kernel"\nsubnet = "10.244.9.0/24"\nipv6_subnet = "fd00::/64"', ["there is no ipv6_network"]),
        ('ipv6_network = "fd00::/48"\n[[host]]\nruns = "kernel"\nipv6_subnet = "fd00::/64"', ["needs a subnet with it"]),
        ('network = "10.0.0.0/28"\n' + 4 * '[[host]]\nruns = "kernel"\n', ["host 'h4': the network has no subnet left"]),
        ('network = "10.0.0.0/26"\n[[host]]\npods = 6', ["has 6 pods, but the subnets of 10.0.0.0/26 have room for 5"]),
        ('network = "fd00::/48"', ["network is 'fd00::/48', but must be a network like 10.244.0.0/16"]),
        ('ipv6_network = "10.0.0.0/16"', ["must be a network like fd00:10:244::/48"]),
        ('network = "10.0.0.0/30"\n[[host]]', ["may be a /28 at the smallest"]),
        ('seed = -1', ["seed is -1"]),
        ('link = 3', ["link is 3, but must be a table, written [link]"]),
        ('[link]\nloss = "x"', ["f.toml: [link]: loss", "'x'"]),
        ('[link]\nlos = 0.1', ["[link]: 'los' is unknown", "loss, burst, delay"]),
        (between('loss = 2.0'), ["[[link_between]] number 1: ", "a probability from 0 to 1"]),
        (between('lose = 2.0'), ["[[link_between]] number 1: 'lose' is unknown"]),
        (between('both = "yes"'), ["[[link_between]] number 1: both is 'yes', but must be true or false"]),
        (TWO + '[[link_between]]\nfrom = "h1"', ["[[link_between]] number 1: to is missing"]),
        (TWO + '[[link_between]]\nfrom = "h1"\nto = "h3"', ["the link from h1 to h3: there is no host 'h3'"]),
        (TWO + '[[link_between]]\nfrom = "h1"\nto = "h1"', ["joins a host with itself"]),
        (between("both = true\n") + '[[link_between]]\nfrom = "h2"\nto = "h1"', ["from h2 to h1 is described twice"]),
    ],
)  # fmt: skip
def test_nonsense_is_told_with_its_place_and_what_would_do(text, parts):
    with pytest.raises(TopologyError) as raised:
        parse(text, "f.toml")
    for part in ["f.toml", *parts]:
        assert part in str(raised.value)


def test_kernel_hosts_get_the_last_free_subnets():
    topology = parse("""
        ipv6_network = "fd00:10:244::/48"
        [[host]]
        runs = "kernel"
        [[host]]
        runs = "kernel"
        subnet = "10.244.255.0/24"
        [[host]]
        runs = "kernel"
    """)
    shown = {name: [str(one) for one in subnets.networks] for name, subnets in topology.kernel_subnets().items()}
    assert shown == {
        "h1": ["10.244.254.0/24", "fd00:10:244:ffff::/64"],
        "h2": ["10.244.255.0/24"],
        "h3": ["10.244.253.0/24", "fd00:10:244:fffe::/64"],
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_can_be_read(path):
    assert load(path).hosts


def test_the_file_in_the_documentation_can_be_read():
    text = (ROOT / "docs" / "lab.md").read_text()
    assert len(parse(text.split("```toml")[1].split("```")[0]).hosts) == 2


def test_what_is_commented_out_in_the_example_can_be_put_in():
    assert len(parse(topologyfile.EXAMPLE).hosts) == 3
    text = "".join(line.removeprefix("# ") if " = " in line else line for line in topologyfile.EXAMPLE.splitlines(True))
    assert parse(text).hosts[2].subnet == IPv4Network("10.244.200.0/24")
    assert set(tomllib.loads(text)) == set(topologyfile._TOP_KEYS)
    assert {key for host in tomllib.loads(text)["host"] for key in host} == set(topologyfile._HOST_KEYS)


def run(*arguments: str, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == code


class TestCommand:
    def test_the_example_is_printed(self, capsys):
        run("lab", "--print-example", code=0)
        assert capsys.readouterr().out == topologyfile.EXAMPLE

    def test_a_bad_file_is_exit_code_2(self, capsys, tmp_path):
        (tmp_path / "bad.toml").write_text("hosts = 3")
        run("lab", str(tmp_path / "bad.toml"), code=2)
        assert f"Error: {tmp_path / 'bad.toml'}: unknown key 'hosts'" in capsys.readouterr().err

    def test_a_missing_file_is_exit_code_2(self, capsys, tmp_path):
        run("lab", str(tmp_path / "nothing.toml"), code=2)
        assert "nothing.toml cannot be read" in capsys.readouterr().err

    def test_no_file_is_exit_code_2(self, capsys):
        run("lab", code=2)
        assert "give a topology file" in capsys.readouterr().err

    def test_without_root_it_says_so(self, capsys, monkeypatch):
        monkeypatch.setattr("dataplane.lab.namespace.os.geteuid", lambda: 1000)
        run("lab", str(EXAMPLES[0]), code=1)
        assert "there can be no lab here: network namespaces need root" in capsys.readouterr().err


A, B, C = b"\x02\0\0\0\0\x0a", b"\x02\0\0\0\0\x0b", b"\x02\0\0\0\0\x0c"
EVERYBODY = b"\xff" * 6
IPV4, ARP = b"\x08\x00", b"\x08\x06"


def frame(target: bytes, source: bytes, kind: bytes = IPV4, length: int = 100) -> bytes:
    return target + source + kind + bytes(length)


def switch(default: LinkSpec | None = None, seed: int = 0) -> Switch:
    made = Switch(default or LinkSpec(), seed)
    for name in "abc":
        made.add_port(name)
    return made


class TestSwitch:
    def targets(self, made: Switch, source: str, sent: bytes) -> list[str]:
        return [target for _, target, _ in made.forward(0.0, source, sent)]

    def test_it_learns_where_hosts_are(self):
        made = switch()
        assert self.targets(made, "a", frame(B, A)) == ["b", "c"]
        assert self.targets(made, "b", frame(A, B)) == ["a"]
        assert self.targets(made, "a", frame(B, A)) == ["b"]
        assert self.targets(made, "c", frame(B, A)) == ["b"]
        assert self.targets(made, "b", frame(A, B)) == ["c"], "the address has moved"

    def test_what_is_for_everybody_goes_to_everybody(self):
        made = switch()
        assert self.targets(made, "b", frame(EVERYBODY, B)) == ["a", "c"]
        assert self.targets(made, "b", frame(b"\x33\x33\0\0\0\1", B)) == ["a", "c"]

    def test_a_host_gets_nothing_of_its_own_back(self):
        made = switch()
        made.forward(0.0, "a", frame(EVERYBODY, A))
        assert self.targets(made, "a", frame(A, C)) == []

    def test_a_multicast_source_and_addresses_without_end_are_not_learned(self):
        made = switch()
        self.targets(made, "a", frame(B, EVERYBODY))
        assert self.targets(made, "b", frame(EVERYBODY, B)) == ["a", "c"]
        for number in range(5000):
            made.forward(0.0, "a", frame(B, b"\x02\0" + number.to_bytes(4, "big")))
        assert len(made._port_of_mac) == 4096

    def test_each_direction_has_its_link(self):
        made = switch()
        made.impair("a", "b", LinkSpec(delay=0.5))
        sent = frame(B, A)
        assert made.forward(10.0, "a", sent) == [(10.5, "b", sent), (10.0, "c", sent)]
        assert made.forward(10.0, "b", frame(A, B)) == [(10.0, "a", frame(A, B))]
        counts = made.counts()
        assert (counts["a", "b"].delivered, counts["a", "c"].delivered, counts["b", "a"].delivered) == (1, 1, 1)

    def test_the_mtu_is_that_of_the_ip_packet(self):
        made = switch(LinkSpec(mtu=1000))
        made.forward(0.0, "b", frame(A, B))
        assert self.targets(made, "a", frame(B, A, length=1000)) == ["b"]
        assert self.targets(made, "a", frame(B, A, length=1001)) == []
        assert made.counts()["a", "b"].oversize == 1

    def test_damage_spares_the_header_and_drops_arp(self):
        made = switch(LinkSpec(corrupt=1.0))
        sent = frame(B, A)
        for _, _, arrived in made.forward(0.0, "a", sent):
            assert arrived[:14] == sent[:14]
            assert sum((one ^ other).bit_count() for one, other in zip(arrived, sent, strict=True)) == 1
        assert self.targets(made, "a", frame(EVERYBODY, A, ARP)) == []

    def test_chance_follows_from_the_seed_and_the_pair(self):
        spec = LinkSpec(loss=0.5)

        def fates(seed: int, source: str, target: bytes) -> list[bool]:
            made = switch(spec, seed)
            made._port_of_mac = {A: "a", B: "b"}
            return [bool(made.forward(0.0, source, frame(target, C))) for _ in range(64)]

        assert fates(1, "a", B) == fates(1, "a", B)
        assert fates(1, "a", B) != fates(2, "a", B)
        assert fates(1, "a", B) != fates(1, "b", A)
        link = Link(spec, random.Random("1 a b"))
        assert fates(1, "a", B) == [bool(link.cross(0.0, bytes(100))) for _ in range(64)]


class Outer:
    """What the relay has of a host's outer end: takes frames of up to 1000 bytes, if `error` is none."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.taken: list[bytes] = []

    def send(self, sent: bytes) -> None:
        error = self.error or (errno.EMSGSIZE if len(sent) > 1000 else 0)
        if error:
            raise OSError(error, os.strerror(error))
        self.taken.append(sent)

    def recv_into(self, buffer: bytearray) -> int:
        raise BlockingIOError

    def getsockopt(self, *_: int) -> bytes:
        return bytes(8)


@pytest.mark.parametrize("spec", [LinkSpec(), LinkSpec(delay=0.5)], ids=["at once", "later"])
class TestUndelivered:
    """Of a frame that crossed and is not taken at its end."""

    def relay(self, spec: LinkSpec, error: int, sent: bytes) -> tuple[Relay, Switch, Outer]:
        """One that has carried `sent` from a to b, and that to c."""
        made, ends = switch(spec), {"a": Arriving(sent), "b": Outer(error), "c": Outer()}
        now = [10.0]
        relay = Relay(made, lambda: now[0])
        relay._sockets = ends
        relay._pump("a", ends["a"])
        now[0] = 11.0
        relay._deliver(now[0])
        assert len(ends["c"].taken) == (len(sent) <= 1000)
        return relay, made, ends["b"]

    def test_one_too_large_for_the_hosts_device_is_the_links_oversize(self, spec):
        relay, made, end = self.relay(spec, 0, frame(EVERYBODY, A, length=1000))
        assert (end.taken, relay.overruns()) == ([], 0)
        for pair in (("a", "b"), ("a", "c")):
            counts = made.counts()[pair]
            assert (counts.sent, counts.delivered, counts.lost, counts.oversize) == (1, 0, 0, 1)

    def test_one_for_a_device_that_is_down_is_lost(self, spec):
        relay, made, _ = self.relay(spec, errno.ENETDOWN, frame(EVERYBODY, A))
        assert relay.overruns() == 0
        counts = made.counts()["a", "b"]
        assert (counts.sent, counts.delivered, counts.lost, counts.oversize) == (1, 0, 1, 0)
        assert made.counts()["a", "c"].delivered == 1

    @pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOBUFS])
    def test_one_that_there_is_no_room_for_is_an_overrun(self, spec, error):
        relay, made, _ = self.relay(spec, error, frame(EVERYBODY, A))
        assert relay.overruns() == 1
        assert (made.counts()["a", "b"].lost, made.counts()["a", "b"].oversize) == (0, 0)


class Arriving(Outer):
    """An outer end with one frame to read."""

    def __init__(self, sent: bytes) -> None:
        super().__init__()
        self.sent = [sent]

    def recv_into(self, buffer: bytearray) -> int:
        if not self.sent:
            raise BlockingIOError
        sent = self.sent.pop()
        buffer[: len(sent)] = sent
        return len(sent)


class Here:
    """Where a relay's process is started; it needs a namespace only when it is given an interface."""

    def popen(self, command: list[str], stdin: int) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(command, stdin=stdin, cwd=ROOT)
        return self.process


@pytest.fixture
def relay():
    place = Here()
    relay = _Relay(place, LinkSpec(), 1)
    yield relay, place.process
    relay.close()
    assert place.process.wait(10) == 0


class TestRelayProcess:
    def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(self, relay, monkeypatch):
        asked, process = relay
        assert asked.ask("counts") == {}
        process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as short:
            short.setattr("dataplane.lab.wires._ANSWER_SECONDS", 0.05)
            for _ in range(2):
                with pytest.raises(LabError, match="does not answer"):
                    asked.ask("counts")
        process.send_signal(signal.SIGCONT)
        assert asked.ask("overruns") == 0
        assert asked.ask("counts") == {}

    def test_nor_is_one_that_was_not_waited_for(self, relay, monkeypatch):
        asked, _ = relay
        with monkeypatch.context() as pressed:
            pressed.setattr(asked, "_connection", Interrupted(asked._connection))
            with pytest.raises(KeyboardInterrupt):
                asked.ask("counts")
        assert asked.ask("overruns") == 0

    def test_a_refusal_and_an_end_are_told(self, relay):
        asked, process = relay
        with pytest.raises(LabError, match="the relay of the underlay: "):
            asked.ask("add_port", "a", "no-such-device")
        asked._connection.close()
        process.wait(10)
        with pytest.raises(LabError, match="has ended"):
            asked.ask("overruns")


class Interrupted:
    """A connection over which one can ask; waiting for the answer is interrupted."""

    def __init__(self, inner) -> None:
        self.send = inner.send

    def poll(self, _: float) -> bool:
        raise KeyboardInterrupt
