import logging
import os
import socket
import subprocess
import sys

import pytest

from dataplane.systemd import Notifier


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """systemd's end of the socket; `name` is what it would put in NOTIFY_SOCKET."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@test/{os.getpid()}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0" + name[1:] if name.startswith("@") else name)
        end.setblocking(False)
        yield end, name


def heard(end):
    messages = []
    while True:
        try:
            messages.append(end.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_what_systemd_hears(systemd):
    end, name = systemd
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name})
    notifier.ready("10.244.7.0-24,\n3 peers")
    notifier.status("4 peers")
    notifier.status("")
    notifier.stopping()
    notifier.beat()  # there is no watchdog
    assert heard(end) == ["READY=1\nSTATUS=10.244.7.0-24, 3 peers", "STATUS=4 peers", "STOPPING=1"]


def test_the_watchdog_hears_twice_as_often_as_it_must(systemd):
    end, name = systemd
    now = [50.0]
    notifier = Notifier.from_environment(
        {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}, now=lambda: now[0]
    )
    assert notifier.watchdog_interval == 5.0
    times = []
    for _ in range(24):
        notifier.beat()
        times += [now[0]] * len(heard(end))
        now[0] += 0.5
    assert times == [50.0, 55.0, 60.0]


def test_the_variables_are_gone_so_that_children_do_not_speak_for_us(systemd, monkeypatch):
    _, name = systemd
    for variable, value in (("NOTIFY_SOCKET", name), ("WATCHDOG_USEC", "2000000"), ("WATCHDOG_PID", str(os.getpid()))):
        monkeypatch.setenv(variable, value)
    assert Notifier.from_environment().watchdog_interval == 1.0
    child = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert "NOTIFY" not in child.stdout
    assert "WATCHDOG" not in child.stdout


def test_without_systemd_nothing_happens(caplog):
    notifier = Notifier.from_environment({})
    notifier.ready("x")
    notifier.beat()
    notifier.stopping()
    assert notifier.watchdog_interval is None
    assert not caplog.records


def test_a_watchdog_for_another_process_is_not_ours():
    environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}
    assert Notifier.from_environment(environment).watchdog_interval is None
    assert environment == {}


@pytest.mark.parametrize("value", ["", "0", "-5", "many", "1.5", "٣"])
def test_a_watchdog_that_makes_no_sense_is_ignored(value, caplog):
    assert Notifier.from_environment({"WATCHDOG_USEC": value}).watchdog_interval is None
    assert "no number of microseconds" in caplog.text


def test_a_kind_of_socket_that_we_do_not_have(caplog):
    Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:9999"}).ready()
    assert len(caplog.records) == 1
    assert "no path and no abstract name" in caplog.text


def test_nobody_at_the_other_end_is_one_warning(tmp_path, caplog):
    notifier = Notifier(str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING):
        notifier.ready()
        notifier.stopping()
    assert len(caplog.records) == 1
    assert "systemd cannot be told READY=1" in caplog.text


def test_a_full_queue_does_not_hold_up_the_loop(systemd, caplog):
    """systemd hangs and reads nothing. A status that finds no room is dropped at once."""
    end, name = systemd
    notifier = Notifier(name)
    for number in range(3000):
        notifier.status(str(number))
    messages = heard(end)
    assert 0 < len(messages) < 3000
    assert messages[0] == "STATUS=0"


def test_it_is_light():
    """Every node imports it."""
    code = "import sys; before = set(sys.modules); import dataplane.systemd; print(len(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80
