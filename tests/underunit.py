"""A real systemd in a host of a lab, which runs the unit in deploy/ as an operator's would.

systemd is process 1 of a process namespace of its own, with a cgroup and mounts of its own: what it could do to this
machine, which is to write below /run, /etc, /var and /tmp, it does to copies. It sees no unit but ours. The interpreter,
the packages and the project are mounted below /mnt, because the unit's user may not look into root's home, where they may
be.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from cluster import until

from dataplane.lab import Host

ROOT = Path(__file__).resolve().parent.parent
UNIT = "pyflannel-dp.service"
_SYSTEMD = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if os.path.exists(path)), None)

_OUTSIDE = """
set -eu
mount -t cgroup2 cgroup2 /mnt
mkdir /mnt/{cgroup}
echo $$ >/mnt/{cgroup}/cgroup.procs
umount /mnt
exec unshare --pid --mount --cgroup --uts --ipc --fork --kill-child sh '{folder}/inside'
"""
_INSIDE = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/python /mnt/project /mnt/packages /mnt/test
mount --bind '{python}' /mnt/python
mount --bind '{project}' /mnt/project
mount --bind '{packages}' /mnt/packages
mount --bind '{folder}' /mnt/test
cp -a /etc /mnt/etc
mount --bind /mnt/etc /etc
mknod -m 666 /mnt/tun c 10 200
chmod 666 /mnt/tun
mount --bind /mnt/tun /dev/net/tun
for place in /run /var/lib /usr/local/bin; do mount -t tmpfs -o mode=755 tmpfs $place; done
for place in /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs $place; done
mkdir /run/lock
install -m 755 /mnt/test/launcher /usr/local/bin/pyflannel-dp
rm -rf /etc/systemd/system
mkdir -p /etc/systemd/system/{unit}.d
cp /mnt/project/deploy/{unit} /etc/systemd/system
cp /mnt/test/override /etc/systemd/system/{unit}.d/override.conf
cp /mnt/test/options /etc/default/pyflannel-dp
systemd-sysusers /mnt/project/deploy/pyflannel-dp.sysusers
mount -t proc proc /proc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
export container=lxc SYSTEMD_UNIT_PATH=/etc/systemd/system
exec {systemd} --system --unit={unit} --log-target=console --log-level=info --show-status=no
"""
_LAUNCHER = """#!/bin/sh
export LD_LIBRARY_PATH=/mnt/python/lib PYTHONPATH=/mnt/project:/mnt/packages PYTHONDONTWRITEBYTECODE=1
exec /mnt/python/bin/python3 -m dataplane.cli "$@"
"""
_OVERRIDE = """
[Unit]
DefaultDependencies=no
[Service]
StandardOutput=append:/mnt/test/log
StandardError=append:/mnt/test/log
RestartSec=100ms
WatchdogSec=2
"""
"""No other units are there to depend on, nor a journal; and a test has less time."""


def missing() -> str | None:
    """Why this cannot be had here, or None."""
    if _SYSTEMD is None or shutil.which("systemctl") is None:
        return "systemd is not installed (Debian package systemd)"
    if "cgroup2" not in Path("/proc/filesystems").read_text():
        return "the kernel has no cgroup2"
    return None


class Systemd:
    """Made by `systemd`. `folder` is the test's."""

    def __init__(self, process: int, folder: Path) -> None:
        self._process = process
        self._folder = folder

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command beside systemd, as root; its output is text."""
        entered = ["nsenter", "--target", str(self._process), "--all", *command]
        return subprocess.run(entered, capture_output=True, text=True, check=False, timeout=30)

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self.run("systemctl", "show", "--property", name, "--value", UNIT).stdout.strip()

    def log(self) -> str:
        """What the node and systemd said."""
        return "".join(
            f"--- {name}\n{path.read_text()}" for name in ("log", "systemd") if (path := self._folder / name).exists()
        )

    def wait_until_active(self) -> None:
        """Until the unit has said that it is ready."""
        try:
            until(f"{UNIT} being active", lambda: self.show("ActiveState") == "active")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None


@contextlib.contextmanager
def systemd(host: Host, folder: Path, options: dict[str, str]) -> Iterator[Systemd]:
    """Start systemd on `host` with our unit and wait until that is active. `options` are for its EnvironmentFile."""
    cgroup = f"unit-{host.name}"
    places = {
        "python": sys.base_prefix, "project": ROOT, "packages": sysconfig.get_paths()["purelib"], "folder": folder,
        "unit": UNIT, "systemd": _SYSTEMD, "cgroup": cgroup,
    }  # fmt: skip
    (folder / "inside").write_text(_INSIDE.format(**places))
    (folder / "launcher").write_text(_LAUNCHER)
    (folder / "override").write_text(_OVERRIDE)
    (folder / "options").write_text("".join(f"{name}={value}\n" for name, value in options.items()))
    with open(folder / "systemd", "w") as said:
        outer = host.popen(["sh", "-c", _OUTSIDE.format(**places)], stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        until("systemd starting", lambda: outer.poll() is not None or _is_systemd(children))
        assert outer.poll() is None, (folder / "systemd").read_text()
        made = Systemd(int(children.read_text()), folder)
        made.wait_until_active()
        yield made
        made.run("systemctl", "stop", UNIT)
    finally:
        outer.send_signal(signal.SIGKILL)  # takes process 1 with it, and so all others (--kill-child)
        outer.wait()
        _remove_cgroup(cgroup)


def _is_systemd(children: Path) -> bool:
    with contextlib.suppress(OSError):
        found = children.read_text().split()
        return bool(found) and Path(f"/proc/{found[0]}/comm").read_text() == "systemd\n"
    return False


def _remove_cgroup(name: str) -> None:
    """Its processes may take a moment to be gone."""
    script = f"mount -t cgroup2 cgroup2 /mnt && [ ! -e /mnt/{name} ] || find /mnt/{name} -depth -type d -exec rmdir {{}} +"

    def removed() -> bool:
        return subprocess.run(["unshare", "-m", "sh", "-c", script], check=False, capture_output=True).returncode == 0

    until(f"the cgroup {name} being removed", removed)
