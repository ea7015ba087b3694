"""The benchmarks run, for a second each, and leave nothing behind; what they measure is nobody's promise."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench.throughput import contenders
from bench.throughput.hosts import two_hosts
from dataplane.lab import Lab

pytestmark = pytest.mark.netns


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m bench`` to its end; no namespace of it is left then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = process.communicate(timeout=90)
    left = [path.name for path in Path("/run/netns").glob("*") if f"{process.pid:x}-" in path.name]
    assert not left
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_throughput_measures_and_writes_json_and_a_page(tmp_path):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    report = ["--report", str(tmp_path / "out.html")] if has_matplotlib else []
    done = bench(
        "throughput", "--only", "kernel", "--only", "pyflannel-dp", "--seconds", "1", "--rounds", "1",
        "--measure", "one flow", "--json", str(tmp_path / "out.json"), *report,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    read = json.loads((tmp_path / "out.json").read_text())
    assert list(read["rounds"])[:2] == ["kernel VXLAN", "pyflannel-dp"]
    for results in read["medians"].values():
        assert results["TCP, one flow"]["gigabits_per_second"] > 0
    assert 0 < read["ratios"]["TCP, one flow"]["pyflannel-dp"] < 10
    if report:
        page = (tmp_path / "out.html").read_text()
        assert page.index("<h2>Ratios</h2>") < page.index("<img ") < page.index("<h2>Numbers</h2>")


def test_soak_judges_a_few_seconds(tmp_path):
    done = bench("soak", "--minutes", "0.07", "--json", str(tmp_path / "out.json"))
    read = json.loads((tmp_path / "out.json").read_text())
    faults = [fault for fault in read["faults"] if "memory grew" not in fault]  # four seconds are all warming up
    assert not faults
    assert done.returncode == bool(read["faults"]), done.stdout
    for samples in read["samples"].values():
        assert len(samples) == 8
        assert samples[-1]["counters"]["outbound.received"] > 100


def test_profile_names_the_stages():
    done = bench("profile", "--seconds", "1")
    assert done.returncode == 0, done.stdout
    for word in ("sending daemon", "receiving daemon", "lay out", "coalesce", "system time", "µs per 64 KiB"):
        assert word in done.stdout


def test_upgrade_tells_the_gap_and_what_was_deleted():
    done = bench("upgrade", "--rounds", "2")
    assert done.returncode == 0, done.stdout
    said = re.fullmatch(
        r"2 upgrades, gap: median (\d+) ms \((\d+) … (\d+)\); (\d+) links, addresses or routes deleted\n", done.stdout
    )
    assert said is not None, done.stdout
    middle, least, most, deletions = map(int, said.groups())
    assert 0 < least <= middle <= most < 20_000
    assert deletions == 0


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_etcdscale_tells_start_memory_and_how_soon_a_change_counts(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="es") as folder:  # short, for the nodes' sockets
        monkeypatch.setenv("TMPDIR", folder)
        done = bench("etcdscale", "--leases", "200", "--rounds", "2")
        assert os.listdir(folder) == []
    assert done.returncode == 0, done.stdout
    for part in (
        r"^0 leases: ready after \d+\.\d\d s, resident \d+\.\d MiB$",
        r"^200 leases: ready after \d+\.\d\d s, resident \d+\.\d MiB$",
        r"^a changed lease counts, idle: median \d+ ms \(\d+ … \d+\)$",
        r"^a changed lease counts, under traffic: median \d+ ms \(\d+ … \d+\)$",
        r"^traffic meanwhile: \d+\.\d\d Gbit/s$",
        r"^resident \d+\.\d MiB; the loop was late by \d+ ms at most$",
    ):
        assert re.search(part, done.stdout, re.MULTILINE), (part, done.stdout)


PEERS = {
    "socat": contenders.socat,
    "Open vSwitch": contenders.open_vswitch,
    "wireguard-go": contenders.wireguard_go,
    "n2n": contenders.n2n,
    "template": lambda: contenders.template(
        "own",
        "socat UDP-DATAGRAM:{remote}:9000,bind={local}:9000 "
        "TUN:{overlay}/16,tun-name=tun0,tun-type=tun,iff-no-pi,iff-up & wait",
    ),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
def test_a_contender_connects_and_dies_with_the_lab(name, fails, tmp_path):
    contender = PEERS[name]()
    if contender.missing or not shutil.which("socat"):
        pytest.skip(f"{contender.missing or 'socat'} is not installed")

    links: set[str] = set()

    def connect() -> None:
        with Lab("peer") as lab:
            first, second = two_hosts(lab)
            links.update(f"net:[{os.stat(f'/run/netns/{end.namespace.name}').st_ino}]" for end in (first, second))
            contender.connect(first, second, tmp_path)
            assert first.namespace.run(["ping", "-c1", "-W2", str(second.overlay)]).returncode == 0
            assert len(_processes_in(links)) >= 2
            if fails:
                raise RuntimeError

    if fails:
        with pytest.raises(RuntimeError):
            connect()
    else:
        connect()
    end = time.monotonic() + 5
    while _processes_in(links):
        assert time.monotonic() < end, "processes outlive the lab"
        time.sleep(0.02)


def _processes_in(links: set[str]) -> list[str]:
    """The living processes in one of the network namespaces `links`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found += [path.parts[2]] if os.readlink(path) in links else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
