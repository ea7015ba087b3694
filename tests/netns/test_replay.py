"""Captures replayed over real devices: through two nodes and through the kernel; everything comes out as it went in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.replay import results
from bench.replay.traces import write

pytestmark = pytest.mark.netns
PACKETS = 1500


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``python -m bench replay --mode tun`` to its end; no namespace of it is left then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "replay", "--mode", "tun", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output, _ = process.communicate(timeout=90)
    left = [path.name for path in Path("/run/netns").glob("*") if f"{process.pid:x}-" in path.name]
    assert not left
    assert "Traceback" not in output
    return subprocess.CompletedProcess(process.args, process.returncode, output)


WAYS = {
    "node, vxlan": ["--via", "node"],
    "node, ip": ["--via", "node", "--framing", "ip"],
    "kernel": ["--via", "kernel"],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_everything_comes_out_unchanged(tmp_path, way):
    write(tmp_path / "a.pcap", "dual", 1, PACKETS)
    done = replay(tmp_path / "a.pcap", *way, "--loops", 2, "--peers", 3, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout
    read = results.read_json(tmp_path / "out.json")
    assert read.mode == f"tun via {way[1]}"
    assert (read.delivery.sent, read.delivery.delivered) == (2 * PACKETS, 2 * PACKETS)
    assert (read.delivery.lost, read.delivery.reordered, read.delivery.corrupted) == (0, 0, 0)
    assert read.verdicts == {"outbound": {"forwarded": 2 * PACKETS}, "inbound": {"forwarded": 2 * PACKETS}}
    assert read.latency is not None
    assert read.latency.packets == 2 * PACKETS
    assert [stage.name for stage in read.stages] == ["read", "send", "receive"]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_odd_is_refused_and_not_lost(tmp_path, way):
    write(tmp_path / "a.pcap", "hostile", 1, 800)
    done = replay(tmp_path / "a.pcap", *way, "--loops", 1, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout
    outbound = results.read_json(tmp_path / "out.json").verdicts["outbound"]
    assert outbound["multicast"] > 0
    assert outbound["too_big"] > 0
    assert ("ttl_expired" in outbound) == ("ip" in way)


def test_what_is_written_is_in_the_framing_that_was_asked_for(tmp_path):
    write(tmp_path / "a.pcap", "dual", 1, 100)
    written = tmp_path / "b.pcapng"
    assert replay(tmp_path / "a.pcap", "--framing", "ip", "--loops", 1, "--write", written).returncode == 0
    command = [sys.executable, "-m", "bench", "replay", str(written), "--decap", "--framing", "ip", "--loops", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "sent 100, delivered 100" in done.stdout


def test_without_root_it_says_so(tmp_path):
    write(tmp_path / "a.pcap", "dual", 1, 10)
    code = "import os; from bench.replay.command import replay; os.setuid(65534); replay()"
    os.chmod(tmp_path / "a.pcap", 0o644)
    with open(tmp_path / "a.pcap", "rb") as file:
        command = [sys.executable, "-c", code, f"/dev/fd/{file.fileno()}", "--mode", "tun"]
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[file.fileno()], check=False)
    assert done.returncode == 1
    assert "mode tun: " in done.stderr
