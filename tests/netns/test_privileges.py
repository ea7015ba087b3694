"""What a process has and can do after `privileges.drop`: as root, as somebody else with ambient capabilities, and in a user
namespace. Each test is a process of its own, since what is dropped does not come back."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from dataplane import privileges
from dataplane.lab import Lab
from dataplane.privileges import Capability, describe, drop, needed

pytestmark = pytest.mark.netns
SHARES_A_LAB = True
NET_ADMIN = 1 << Capability.NET_ADMIN
NOBODY = 65534
READ = {Capability.DAC_READ_SEARCH}

PRELUDE = """
import asyncio, ctypes, encodings.ascii, errno, json, os, socket, subprocess, sys
from pathlib import Path
from pyroute2 import IPRoute
from dataplane.device.tun import open_tun as open_tun_device
from dataplane import privileges
from dataplane.privileges import Capability, drop, needed

def sets(text=None):
    text = text or Path("/proc/self/status").read_text()
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    return {name: int(value.strip(), 16) for name, value in lines.items()}

def tried(what):
    try:
        return what()
    except OSError as error:
        return errno.errorcode[error.errno]
"""

# What the node does that needs privileges, and things that nobody should get it to do.
TRY_EVERYTHING = """
def open_tun():
    open_tun_device("prv0", 1400).close()
    return "ok"

def set_up_tun():
    # Address, route and sysctl, by netlink of our own and by a child.
    device = open_tun_device("prv1", 1400)
    loop = asyncio.SelectorEventLoop()
    with IPRoute(use_event_loop=loop) as netlink:
        index = netlink.link_lookup(ifname="prv1")[0]
        netlink.addr("add", index=index, address="10.9.0.0", prefixlen=32)
        netlink.link("set", index=index, state="up")
        netlink.route("add", dst="10.9.0.0/16", oif=index)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    subprocess.run(["ip", "route", "del", "10.9.0.0/16", "dev", "prv1"], check=True)
    path = Path("/proc/sys/net/ipv4/conf/prv1/accept_local")
    path.write_text("1")
    device.close()
    return "ok"

def set_buffer():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

def run_nft():
    script = "add table inet t { chain c { type nat hook postrouting priority 100; masquerade; }; }; delete table inet t"
    done = subprocess.run(["nft", "-f", "-"], input=script, capture_output=True, text=True)
    return done.returncode or done.stderr or "ok"

def bind_low():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 500))
        return "ok"

def mount():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")
    return "ok"

def everything(folder):
    child = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
    return {
        "sets": sets(),
        "child": sets(child),
        "can": {
            "open_tun": tried(open_tun),
            "set_up_tun": tried(set_up_tun),
            "set_buffer": tried(set_buffer),
            "run_nft": tried(run_nft),
            "write_folder": tried(lambda: Path(folder, "new").write_text("x")),
            "bind_low": tried(bind_low),
            "mount": tried(mount),
            "chown": tried(lambda: os.chown(Path(folder, "new"), 1, 1)),
            "setuid": tried(lambda: os.setresuid(-1, 1, -1)),
            "raw_socket": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()),
            "sysctl_of_the_kernel": tried(lambda: Path("/proc/sys/kernel/printk").write_text("4 4 1 7")),
            "other_process": tried(lambda: os.kill(1, 0)),
        },
    }
"""

WORKS = {
    "open_tun": "ok",
    "set_up_tun": "ok",
    "set_buffer": 128 << 20,  # the kernel doubles it (socket(7))
    "run_nft": "ok",
    "write_folder": 1,
    "bind_low": "EACCES",
    "mount": "EPERM",
    "chown": "EPERM",
    "setuid": "EPERM",
    "raw_socket": "EPERM",
}


@pytest.fixture(scope="module")
def host():
    with Lab("prv") as lab:
        yield lab.add_host(ipv6=False)


def run_in(host, code, *wrapper):
    """What the code prints, in a process of its own inside `host`."""
    program = PRELUDE + TRY_EVERYTHING + textwrap.dedent(code)
    done = host.run([*wrapper, sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_root_keeps_net_admin_and_nothing_else(host, tmp_path):
    found = run_in(
        host,
        f"""
        phrases = drop({{Capability.NET_ADMIN}})
        print(json.dumps(everything({str(tmp_path)!r}) | {{"phrases": phrases}}))
        """,
    )
    assert found["phrases"] == [
        "bounding set reduced", "capabilities: net_admin", "inherited by programs that it starts", "no new privileges",
    ]  # fmt: skip
    only = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), NET_ADMIN) | {"NoNewPrivs": 1}
    assert found["sets"] == only
    assert {name: found["child"][name] for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs")} == {
        name: only[name] for name in ("CapPrm", "CapEff", "CapBnd", "NoNewPrivs")
    }
    assert {name: found["can"][name] for name in WORKS} == WORKS
    assert found["can"]["other_process"] is None  # to root's processes root may send signals


# Becoming somebody else happens in the process, because the interpreter may lie where only root can go.
AS_NOBODY = f"""
privileges._prctl(8, 1)  # PR_SET_KEEPCAPS
os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
mask = 1 << Capability.NET_ADMIN | keep
privileges._set(mask, mask, mask)
privileges._set_ambient(mask)
"""


def test_another_user_with_ambient_net_admin(host, tmp_path):
    """As a unit with User= and AmbientCapabilities= starts it. All that root's node can do, except to open a /dev/net/tun
    that is root's alone (here it may be); the bounding set needs CAP_SETPCAP and does not matter without new privileges."""
    tmp_path.chmod(0o777)
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    device = tmp_path / "tun"
    os.mknod(device, 0o666 | 0o020000, os.makedev(10, 200))
    device.chmod(0o666)
    found = run_in(
        host,
        f"""
        keep = 0
        privileges._call("mount", {bytes(device)!r}, b"/dev/net/tun", None, 4096, None)  # MS_BIND; in ip's own mounts
        {textwrap.indent(textwrap.dedent(AS_NOBODY), " " * 8).strip()}
        phrases = drop({{Capability.NET_ADMIN}})
        print(json.dumps(everything({str(tmp_path)!r}) | {{"phrases": phrases}}))
        """,
    )
    assert found["phrases"] == [
        "not bounding set reduced (Operation not permitted)", "capabilities: net_admin",
        "inherited by programs that it starts", "no new privileges",
    ]  # fmt: skip
    only = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), NET_ADMIN) | {"NoNewPrivs": 1}
    assert {name: found["sets"][name] for name in only} == only
    assert {name: found["child"][name] for name in only} == only
    assert {name: found["can"][name] for name in WORKS} == WORKS
    assert found["can"]["sysctl_of_the_kernel"] == "EACCES"
    assert found["can"]["other_process"] == "EPERM"


def test_a_low_port_can_be_kept(host, tmp_path):
    found = run_in(
        host,
        f"""
        phrases = drop(needed(ports=[500]))
        print(json.dumps(everything({str(tmp_path)!r}) | {{"phrases": phrases}}))
        """,
    )
    assert found["phrases"][1] == "capabilities: net_bind_service, net_admin"
    assert found["can"]["bind_low"] == "ok"
    assert found["can"]["mount"] == "EPERM"


def test_in_a_user_namespace_it_does_what_it_can(tmp_path):
    """Root of a namespace of its own has all capabilities in there."""
    found = run_in_userns(f"print(json.dumps({{'phrases': drop(needed()), **everything({str(tmp_path)!r})}}))")
    assert found["phrases"][1] == "capabilities: net_admin"
    assert found["sets"]["CapEff"] == NET_ADMIN
    assert found["can"]["open_tun"] == "ok"
    assert found["can"]["mount"] == "EPERM"


def run_in_userns(code):
    program = PRELUDE + TRY_EVERYTHING + code
    done = subprocess.run(["unshare", "-Urnm", sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_any_capability_it_fails_nothing(host):
    found = run_in(
        host,
        f"""
        os.setgroups([]); os.setresgid(*[{NOBODY}] * 3); os.setresuid(*[{NOBODY}] * 3)
        print(json.dumps({{"needed": sorted(needed(readable=[Path("/nowhere")], writable=[Path("/root/x")])),
                           "phrases": drop({{Capability.NET_ADMIN}}), "sets": sets()}}))
        """,
    )
    assert found["needed"] == [Capability.NET_ADMIN]
    assert found["phrases"][1] == "capabilities: none"
    assert found["phrases"][3] == "no new privileges"
    assert found["sets"]["CapEff"] == 0


def test_dropping_twice_is_dropping_once(host):
    found = run_in(
        host,
        """
        drop({Capability.NET_ADMIN, Capability.NET_BIND_SERVICE})
        print(json.dumps({"phrases": drop({Capability.NET_ADMIN}), "sets": sets()}))
        """,
    )
    assert found["phrases"][0] == "not bounding set reduced (Operation not permitted)"
    assert found["sets"]["CapPrm"] == NET_ADMIN


@pytest.mark.parametrize(
    ("mode", "owner", "expected"),
    [
        (0o600, 0, set()),
        (0o600, 1, {Capability.DAC_READ_SEARCH}),
        (0o644, 1, set()),
        (0o000, 0, {Capability.DAC_READ_SEARCH}),
    ],
)
def test_a_key_file_that_only_somebody_else_may_read(tmp_path, mode, owner, expected):
    key = tmp_path / "key.pem"
    key.write_text("x")
    os.chown(key, owner, owner)
    key.chmod(mode)
    assert needed(readable=[key, tmp_path / "missing"]) == {Capability.NET_ADMIN} | expected
    assert key.read_text() == "x", "the capabilities are back"


@pytest.mark.parametrize(("owner", "expected"), [(0, set()), (1, {Capability.DAC_OVERRIDE})])
def test_a_folder_of_somebody_else(tmp_path, owner, expected):
    os.chown(tmp_path, owner, owner)
    assert needed(writable=[tmp_path]) == {Capability.NET_ADMIN} | expected
    assert needed(writable=[tmp_path / "not" / "yet" / "there"]) == {Capability.NET_ADMIN} | expected


@pytest.mark.parametrize(
    ("ports", "expected"), [([8472, 8285, 0], False), ([1023], True), ([8472, None], True), ([1024], False)]
)
def test_ports(ports, expected):
    assert (Capability.NET_BIND_SERVICE in needed(ports=ports)) is expected


def test_other_threads_would_keep_everything():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    before = privileges._get()
    try:
        with pytest.raises(RuntimeError, match="before starting others"):
            drop({Capability.NET_ADMIN})
    finally:
        stop.set()
        thread.join()
    assert privileges._get() == before


def test_names():
    assert describe(NET_ADMIN | 1 << 21) == "net_admin, 21"
    assert describe(0) == "none"
