"""The command line: spellings, the environment, and what is said about nonsense (exit code 2) and failure (1)."""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataplane.cli import cli, commands, main, service, stores
from dataplane.cli.spelling import normalize
from dataplane.cli.stores import identity_of

STATIC = ["--store", "static", "--network", "10.244.0.0/16", "--subnet", "10.244.1.0/24"]


@pytest.fixture
def started(monkeypatch):
    """Catches the settings and the store of the node that would run."""
    caught = {}

    class CaughtNode:
        def __init__(self, settings, store, host, **others):
            caught["settings"], caught["store"], caught["host"] = settings, store, host

        async def run(self, stop, ready):
            pass

    monkeypatch.setattr(service, "Node", CaughtNode)
    monkeypatch.setattr(service, "choose", lambda host, choice: None)
    monkeypatch.setattr(service.logs, "configure", lambda *_: None)
    return caught


@pytest.fixture(autouse=True)
def kept_privileges(monkeypatch):
    """This process goes on with other tests, which need them."""
    monkeypatch.setattr(service.privileges, "drop", lambda keep: [])


def run(*arguments: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == code


OPTIONS = {"iface", "public-ip", "v", "check-sources", "no-check-sources", "json"}
BOOLEANS = {"check-sources": "no-check-sources", "json": None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-iface=eth0"], ["--iface=eth0"]),
        (["-iface", "eth0"], ["--iface", "eth0"]),
        (["--iface=eth0"], ["--iface=eth0"]),
        (["-public-ip", "192.0.2.1"], ["--public-ip", "192.0.2.1"]),
        (["--check-sources=false"], ["--no-check-sources"]),
        (["-check-sources=true"], ["--check-sources"]),
        (["-json=false"], []),
        (["-v", "4"], ["--v", "4"]),
        (["-v=4"], ["--v=4"]),
        (["--v=4"], ["--v=4"]),
        (["-unknown"], ["-unknown"]),
        (["--", "-iface"], ["--", "-iface"]),
        (["status", "-json"], ["status", "--json"]),
    ],
)
def test_go_spellings(given, expected):
    assert normalize(given, OPTIONS, BOOLEANS) == expected


def test_go_style_flags_reach_the_node(started):
    run(*STATIC, "-iface=eth7", "-public-ip", "203.0.113.9", "-subnet-lease-renew-margin=30", "--check-sources=false")
    settings = started["settings"]
    assert settings.choice.iface == ("eth7",)
    assert str(settings.choice.public_ip) == "203.0.113.9"
    assert settings.renew_margin == 1800
    assert settings.check_sources is False


def test_every_option_comes_from_the_environment_too(started, monkeypatch, tmp_path):
    environment = {
        "STORE": "static",
        "NETWORK": "10.244.0.0/16",
        "SUBNET": "10.244.1.0/24",
        "PEER": "10.244.2.0/24=192.0.2.2 10.244.3.0/24=192.0.2.3,02:00:00:00:00:03",
        "IFACE": "eth7",
        "RUN_DIR": str(tmp_path),
        "CHECK_SOURCES": "false",
        "V": "0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(f"FLANNELD_{name}", value)
    run()
    settings = started["settings"]
    assert (settings.choice.iface, settings.run_dir, settings.check_sources) == (("eth7",), tmp_path, False)
    assert [peer.mac.hex(":") for peer in started["store"]._peers] == ["02:fd:c0:00:02:02", "02:00:00:00:00:03"]


def test_an_environment_variable_of_flanneld_that_means_nothing_here_is_warned_about(started, monkeypatch, caplog):
    monkeypatch.setenv("FLANNELD_KUBE_SUBNET_MGR", "true")
    monkeypatch.setenv("FLANNELD_IFACE", "eth0")
    run(*STATIC)
    assert "FLANNELD_KUBE_SUBNET_MGR is set, but is not an option here" in caplog.text
    assert "FLANNELD_IFACE" not in caplog.text


def test_warnings_of_the_command_line_come_when_the_log_is_set_up(started, monkeypatch, caplog):
    """Before, they would not be in the form that --log-json and the journal want."""
    said_before = []
    monkeypatch.setattr(service.logs, "configure", lambda *_: said_before.extend(caplog.records))
    monkeypatch.setenv("FLANNELD_KUBE_SUBNET_MGR", "true")
    monkeypatch.setenv("FLANNELD_ETCD_CAFILE", "/ca.pem")
    run(*STATIC)
    assert said_before == []
    assert [record.message.split()[0] for record in caplog.records] == ["FLANNELD_KUBE_SUBNET_MGR", "FLANNELD_ETCD_CAFILE"]


ETCD_OPTIONS = ("endpoints", "prefix", "cafile", "certfile", "keyfile", "username", "password")
STORE_DIR = ["--store-dir", "/x"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            ([*STATIC, f"--etcd-{name}", "http://x:1"], [f"--etcd-{name} goes with --store etcd; this is --store static"])
            for name in ETCD_OPTIONS
        ),
        (["--etcd-cafile", "X", "--etcd-prefix", "/x"], ["--etcd-prefix goes with --store etcd", "neither --store nor"]),
        (["--store", "local", "--etcd-password", "secret"], ["--etcd-password goes with --store etcd", "--store local"]),
        ([*STATIC, *STORE_DIR], ["--store-dir goes with --store local; this is --store static"]),
        (["--store", "etcd", *STORE_DIR], ["--store-dir goes with --store local; this is --store etcd"]),
        (["--etcd-endpoints", "x:1", *STORE_DIR], ["--store-dir goes with --store local", "there are --etcd-endpoints"]),
        (["leases", "list", "--etcd-cafile", "X"], ["--etcd-cafile goes with --store etcd"]),
        (["leases", "config", "--etcd-endpoints", "x:1", *STORE_DIR], ["--store-dir goes with --store local"]),
    ],
)
def test_options_of_another_store_are_refused(started, arguments, parts, capsys):
    run(*arguments, code=2)
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert "secret" not in said
    assert started == {}


def test_variables_of_another_store_are_warned_about_and_ignored(started, monkeypatch, caplog):
    monkeypatch.setenv("FLANNELD_STORE_DIR", "/x")
    monkeypatch.setenv("FLANNELD_ETCD_ENDPOINTS", "http://x:1")
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    run(*STATIC)
    assert type(started["store"]).__name__ == "StaticStore"
    assert [record.message for record in caplog.records] == [
        f"{name} is set, but {option} goes with --store {store}; this is --store static: it is ignored"
        for name, option, store in (
            ("FLANNELD_STORE_DIR", "--store-dir", "local"),
            ("FLANNELD_ETCD_ENDPOINTS", "--etcd-endpoints", "etcd"),
            ("FLANNELD_ETCD_PASSWORD", "--etcd-password", "etcd"),
        )
    ]


def test_variables_of_the_store_that_is_used_are_not_warned_about(started, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("FLANNELD_STORE_DIR", str(tmp_path))
    run("--network", "10.244.0.0/16")
    assert caplog.text == ""
    assert (tmp_path / "config").exists()


def test_the_operators_commands_warn_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FLANNELD_ETCD_CAFILE", "/ca.pem")
    run("leases", "list", "--store-dir", str(tmp_path))
    assert "warning: FLANNELD_ETCD_CAFILE is set, but --etcd-cafile goes with --store etcd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--backend", "vxlan"], ["'vxlan' is not", "udp"]),
        (["leases", "list", "--store", "etcd", "--etcd-prefix", ""], ["--etcd-prefix: '' is no prefix of keys"]),
        (["leases", "list", "--store", "etcd", "--etcd-prefix", "/"], ["--etcd-prefix: '/' is no prefix of keys"]),
        (["leases", "list", "--etcd-endpoints", ""], ["--etcd-endpoints: '' names no endpoint"]),
        (["--nonsense"], ["No such option", "--nonsense"]),
        (["--network", "10.244.0.1/16"], ["--network", "has host bits set"]),
        (["--network", "fd00::/48"], ["--network"]),
        (["--vni", "16777216"], ["--vni", "16777216"]),
        (["--port", "0"], ["--port"]),
        (["--vtep-mac", "02:00"], ["--vtep-mac", "'02:00' is not a MAC address"]),
        (["--peer", "10.244.2.0/24"], ["SUBNET=ADDRESS[,MAC], like 10.244.2.0/24=192.0.2.2"]),
        (["--peer", "10.244.2.0/24=192.0.2.999"], ["192.0.2.999"]),
        (["--subnet", "10.244.1.0/24"], ["--subnet goes with --store static"]),
        (["--peer", "10.244.2.0/24=192.0.2.2"], ["--peer goes with --store static"]),
        (["--store", "static"], ["--store static needs --network"]),
        (["--store", "static", "--network", "10.244.0.0/16"], ["needs --subnet exactly if there is an IPv4 network"]),
        ([*STATIC, "--ipv6-subnet", "fd00::/64"], ["needs --ipv6-subnet exactly if"]),
        ([*STATIC, "--net-config-path", "/x.json"], ["--net-config-path or --network"]),
        (["status", "--what"], ["No such option"]),
        (["dance"], ["No such command 'dance'"]),
        (["--run-dir", "/x", "status"], ["--run-dir stands before the command status"]),
        (["--iface", "eth0", "cleanup"], ["--iface stands before the command cleanup"]),
        (["--iface-regex", "("], ["'(' is not a regular expression"]),
        (["--device", "a/b"], ["'a/b' cannot name an interface"]),
        (["--device", "sixteen-bytes-xx"], ["at most 15 bytes"]),
        (["--device", ".."], ["cannot name an interface"]),
        (["--public-ip", "0.0.0.0"], ["0.0.0.0 is not the address of a host"]),
        (["--public-ip", "224.0.0.1"], ["224.0.0.1 is not the address of a host"]),
        (["--peer", "10.244.2.0/24=224.0.0.1"], ["224.0.0.1 is not the address of a host"]),
        (["--peer", "10.244.2.0/24=fe80::1%eth0"], ["fe80::1%eth0"]),
        (["--vtep-mac", "ff:ff:ff:ff:ff:ff"], ["not the MAC address of one device"]),
    ],
)
def test_usage_errors_name_the_option_and_exit_with_2(arguments, parts, capsys):
    run(*arguments, code=2)
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            [*STATIC, "--peer", "10.99.2.0/24=192.0.2.2"],
            ["--peer 10.99.2.0/24 does not lie inside the network 10.244.0.0/16"],
        ),
        ([*STATIC, "--peer", "10.244.1.0/25=192.0.2.2"], ["overlaps this node's own subnet"]),
        (
            ["--store", "static", "--network", "10.244.0.0/30", "--subnet", "10.244.0.0/30"],
            ["may be a /28 at the smallest"],
        ),
        (["--store", "static", "--net-config-path", "/nowhere.json"], ["/nowhere.json cannot be read"]),
        (["status", "--run-dir", "/nowhere"], ["no node is running here", "/nowhere/control.sock"]),
    ],
)
def test_failures_are_one_line_and_exit_with_1(arguments, parts, capsys):
    run(*arguments, code=1)
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert said.startswith("pyflannel-dp: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "endpoint", ["http://user:secret@host:2379", "user:sec,secret@host:2379", "ftp://user:secret@host", "user:secret@host"]
)
def test_a_password_in_an_endpoint_is_refused_and_not_told(endpoint, capsys):
    run("leases", "list", "--etcd-endpoints", endpoint, code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert "a user and password do not go into an endpoint, but into --etcd-username and --etcd-password" in said
    assert "secret" not in said
    assert "sec," not in said


def store_with(tmp_path: Path, config: dict) -> list[str]:
    (tmp_path / "config").write_text(json.dumps(config))
    return ["--store-dir", str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--network", "10.99.0.0/16"], "says something else than the options"),
        (["--framing", "ip"], "--framing asks for udp, but .*config says vxlan"),
        (["--vni", "5"], "--vni asks for 5, but .*config says 1"),
        (["--port", "4789"], "--port asks for 4789, but .*config says 8472"),
    ],
)
def test_options_that_contradict_the_stored_configuration_are_refused(tmp_path, capsys, options, part):
    place = store_with(tmp_path, {"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}})
    run(*place, *options, code=1)
    assert re.search(part, capsys.readouterr().err)
    assert json.loads((tmp_path / "config").read_text())["Network"] == "10.244.0.0/16"


def test_options_that_agree_with_the_stored_configuration_are_fine(started, tmp_path):
    place = store_with(tmp_path, {"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}})
    run(*place, "--network", "10.244.0.0/16", "--framing", "vxlan", "--vni", "1")


def test_the_first_node_writes_the_configuration(started, tmp_path):
    run("--store-dir", str(tmp_path), "--network", "10.244.0.0/16", "--framing", "ip", "--port", "7890")
    assert json.loads((tmp_path / "config").read_text()) == {
        "EnableIPv4": True,
        "Network": "10.244.0.0/16",
        "Backend": {"Type": "udp", "Port": 7890},
    }


def test_a_configuration_file_is_taken_over_as_it_is(started, tmp_path):
    text = '{"Network":"10.0.0.0/8","SubnetLen":20,"Backend":{"Type":"udp","Port":7890}}'
    (tmp_path / "net-conf.json").write_text(text)
    run("--store-dir", str(tmp_path / "store"), "--net-config-path", str(tmp_path / "net-conf.json"))
    assert (tmp_path / "store" / "config").read_text() == text


def test_no_configuration_says_how_to_give_one(tmp_path, capsys):
    run("--store-dir", str(tmp_path), code=1)
    assert "config does not exist" in capsys.readouterr().err


def test_a_node_with_a_run_folder_of_its_own_has_its_subnet_file_there(started, tmp_path):
    run(*STATIC)
    assert str(started["settings"].subnet_file) == "/run/flannel/subnet.env"
    run(*STATIC, "--run-dir", str(tmp_path))
    assert started["settings"].subnet_file == tmp_path / "subnet.env"
    run(*STATIC, "--run-dir", str(tmp_path), "--subnet-file", "/x/y.env")
    assert str(started["settings"].subnet_file) == "/x/y.env"


@pytest.mark.parametrize("name", ["tun-tso", "tun-uso", "udp-segment", "udp-gro", "tun-gro"])
def test_each_offload_has_a_switch(started, name, monkeypatch):
    run(*STATIC)
    assert started["settings"].offloads_off == frozenset()
    run(*STATIC, f"--no-{name}")
    assert started["settings"].offloads_off == {name}
    monkeypatch.setenv(f"FLANNELD_{name.upper().replace('-', '_')}", "false")
    run(*STATIC)
    assert started["settings"].offloads_off == {name}


def test_an_unwritable_standard_output_is_a_failure_and_no_traceback(monkeypatch, capsys):
    answer = {"state": "starting", "pid": 1}
    monkeypatch.setattr(commands, "ask", lambda *_: answer)
    monkeypatch.setattr(commands.click, "echo", _full_disk(commands.click.echo))
    run("status", code=1)
    assert "No space left" in capsys.readouterr().err


def test_an_error_of_a_file_names_it(monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/x/config")

    monkeypatch.setattr(commands, "ask", fail)
    run("status", code=1)
    assert capsys.readouterr().err == "pyflannel-dp: /x/config: No space left on device\n"


def _full_disk(echo):
    def refuse(text, err=False):
        if err:
            return echo(text, err=True)
        raise OSError(28, "No space left on device")

    return refuse


def test_ipv6_peers_ask_for_the_ipv6_underlay(started):
    run(*STATIC, "--peer", "10.244.2.0/24=2001:db8::2")
    assert started["settings"].ipv6_underlay


def test_help_explains_every_option(capsys):
    run("--help")
    said = capsys.readouterr().out
    for option in cli.params:
        assert option.opts[0] in said
        assert getattr(option, "help", "x") != ""
    for command in ("status", "cleanup", "leases", "demo"):
        assert command in said


class TestIdentity:
    def test_it_stays(self, tmp_path):
        made = identity_of(tmp_path / "run")
        assert re.fullmatch(r"\S+-[0-9a-f]{16}", made)
        assert identity_of(tmp_path / "run") == made
        assert (tmp_path / "run" / "identity").read_text() == f"{made}\n"
        assert identity_of(tmp_path / "other") != made

    @pytest.mark.parametrize("content", [b"\xff\xfe", "knöten-1".encode(), b"", b"\n", b"a\x00b"])
    def test_a_broken_one_is_made_anew(self, tmp_path, content, caplog):
        (tmp_path / "identity").write_bytes(content)
        made = identity_of(tmp_path)
        assert re.fullmatch(r"\S+-[0-9a-f]{16}", made)
        assert identity_of(tmp_path) == made
        assert [record.message for record in caplog.records] == [
            f"{tmp_path}/identity holds no identity of a node: made another one"
        ]

    @pytest.mark.parametrize("content", [None, b"", b"\xff"])
    def test_starts_at_one_time_agree(self, tmp_path, monkeypatch, content):
        """The first waits for the others where it has none yet; locked out, they never get there."""
        if content is not None:
            (tmp_path / "identity").write_bytes(content)
        together, urandom = threading.Barrier(3), os.urandom

        def wait_and_draw(count: int) -> bytes:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            return urandom(count)

        monkeypatch.setattr(stores.os, "urandom", wait_and_draw)
        with ThreadPoolExecutor(3) as threads:
            made = set(threads.map(identity_of, [tmp_path] * 3))
        assert len(made) == 1
        assert (tmp_path / "identity").read_text() == f"{made.pop()}\n"
        assert [path.name for path in tmp_path.iterdir()] == ["identity"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_systemd_hears_of_the_stop_when_it_begins(started, monkeypatch, tmp_path, number):
    """Not when everything is undone, which may take a while: it is told while the node still runs, and once."""
    heard = []

    class StoppedNode(service.Node):
        def summary(self) -> str:
            return "all is well"

        async def run(self, stop, ready):
            ready()
            for _ in range(2):
                os.kill(os.getpid(), number)
            await stop.wait()
            with contextlib.suppress(BlockingIOError):
                while True:
                    heard.append(end.recv(100).decode().split("\n")[0])

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setattr(service, "Node", lambda *args, **options: StoppedNode.__new__(StoppedNode))
        run(*STATIC)
        assert heard == ["READY=1", "STOPPING=1"]
        with pytest.raises(BlockingIOError):
            end.recv(100)
