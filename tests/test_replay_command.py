"""``pyflannel-dp replay`` from outside: what it says and writes, and its exit code."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.__main__ import bench
from bench.replay import command, compare, results
from bench.replay.command import replay
from bench.replay.pacing import Pacer
from bench.replay.paths import MemoryPath
from bench.replay.traces import write
from dataplane.cli import main

ROOT = Path(__file__).resolve().parent.parent
PACKETS = 300


@pytest.fixture
def trace(tmp_path) -> Path:
    write(tmp_path / "trace.pcap", "dual", 1, PACKETS)
    return tmp_path / "trace.pcap"


def run(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(replay, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return done


def apart(*arguments: object) -> int:
    """The exit code of another process, since matplotlib keeps the files of its fonts open."""
    command = [sys.executable, "-m", "bench", "replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def said(done: Result) -> str:
    """What was said, whatever the width that it was said in."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


def test_a_replay_says_how_fast_and_how_correctly(trace):
    text = said(run(trace, "--loops", 2))
    assert f"sent {2 * PACKETS}, delivered {2 * PACKETS}, lost 0, reordered 0, corrupted 0" in text
    for word in ("trace.pcap: memory, as fast as possible", "lookup", "encapsulate", "decapsulate", "p99.9", "IPv6 UDP"):
        assert word in text


@pytest.mark.parametrize("mode", ["memory", "loopback"])
@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_json_holds_the_run(trace, tmp_path, mode, framing):
    options = ["--mode", mode, "--framing", framing, "--peers", 3, "--leases", 20, "--loops", 3, "--seed", 7]
    run(trace, *options, "--json", tmp_path / "out.json")
    read = results.read_json(tmp_path / "out.json")
    assert read.mode == mode
    assert (read.settings["framing"], read.settings["peers"], read.settings["leases"]) == (framing, 3, 20)
    assert [loop.packets for loop in read.loops] == [PACKETS] * 3
    assert all(loop.seconds > 0 for loop in read.loops)
    assert (read.delivery.sent, read.delivery.delivered, read.delivery.lost) == (3 * PACKETS, 3 * PACKETS, 0)
    assert [stage.name for stage in read.stages][:3] == ["read", "lookup", "encapsulate"]
    assert all(stage.ns_per_packet > 0 for stage in read.stages)
    assert read.latency is not None
    assert read.verdicts["inbound"] == {"forwarded": 3 * PACKETS}
    assert read.notes == []


def test_several_files_and_the_same_through_the_programs_other_names(trace, tmp_path, capsys):
    write(tmp_path / "b.pcap", "small", 1, 100)
    assert f"sent {PACKETS + 100}," in said(run(trace, tmp_path / "b.pcap", "--loops", 1))
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trace), "--loops", "1"])
    assert ended.value.code == 0
    assert f"sent {PACKETS}," in capsys.readouterr().out
    done = CliRunner().invoke(bench, ["replay", str(trace), "--loops", "1"])
    assert done.exit_code == 0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_page_is_written(trace, tmp_path):
    run(trace, "--loops", 5, "--json", tmp_path / "a.json")
    options = ["--loops", "5", "--baseline", tmp_path / "a.json", "--threshold", "99", "--report", tmp_path / "out.html"]
    assert apart(trace, *options) == 0
    page = (tmp_path / "out.html").read_text()
    assert "Replay of trace.pcap" in page
    assert "Compared with the baseline" in page


# --- what is wrong with the capture


def test_a_damaged_beginning_is_exit_code_1(tmp_path):
    (tmp_path / "a.pcap").write_bytes(b"no capture at all")
    text = said(run(tmp_path / "a.pcap", code=1))
    assert "a.pcap: offset 0" in text
    assert "editcap" in text


def test_the_second_file_is_looked_at_before_the_first_is_replayed(trace, tmp_path):
    (tmp_path / "b.pcap").write_bytes(b"no capture at all")
    assert "sent" not in said(run(trace, tmp_path / "b.pcap", code=1))


def test_of_a_file_that_breaks_off_the_readable_part_is_replayed(trace, tmp_path):
    folder = tmp_path / "[bold"  # what is in brackets is no markup
    folder.mkdir()
    broken = folder / "red].pcap"
    broken.write_bytes(trace.read_bytes()[:-10])
    done = run(broken, "--loops", 2, "--json", tmp_path / "out.json")
    read = results.read_json(tmp_path / "out.json")
    assert read.delivery.delivered == 2 * (PACKETS - 1)
    assert len(read.notes) == 1
    assert str(broken) in read.notes[0]
    assert "what follows is left out" in read.notes[0]
    assert said(done).count("what follows is left out") == 1


@pytest.mark.parametrize("decap", [[], ["--decap"]], ids=["", "decap"])
def test_an_empty_capture_is_told(tmp_path, decap):
    write(tmp_path / "a.pcap", "imix", 1, 0)
    done = run(tmp_path / "a.pcap", "--json", tmp_path / "out.json", *decap, code=1)
    assert "there is no packet in the capture" in said(done)
    assert results.read_json(tmp_path / "out.json").delivery.sent == 0


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_an_empty_capture_makes_a_page_too(tmp_path):
    write(tmp_path / "a.pcap", "imix", 1, 0)
    assert apart(tmp_path / "a.pcap", "--report", tmp_path / "out.html") == 1
    assert "there is no packet in the capture" in (tmp_path / "out.html").read_text()


def test_a_capture_of_nothing_usable_is_told(trace):
    text = said(run(trace, "--decap", code=1))
    assert f"none of the {PACKETS} packets of the capture can be replayed" in text
    assert f"no datagram of an overlay {PACKETS}" in text


def test_a_path_that_corrupts_is_exit_code_1(trace, tmp_path, monkeypatch):
    class Corrupting(MemoryPath):
        def _hand_over(self):
            arrived = super()._hand_over()
            arrived.data[arrived.offset[0] + arrived.length[0] - 1] ^= 1
            return arrived

    monkeypatch.setattr(command, "MemoryPath", Corrupting)
    done = run(trace, "--loops", 1, "--json", tmp_path / "out.json", code=1)
    assert "corrupted 2" in said(done)
    assert results.read_json(tmp_path / "out.json").delivery.corrupted == 2


# --- options


WRITTEN = "--write", "out.pcapng"
WRONG = {
    "two paces": ["--speed", "2", "--pps", "1k"],
    "a rate that is none": ["--pps", "fast"],
    "a rate of nothing": ["--bps", ""],
    "a rate of 0": ["--pps", "0"],
    "a rate without end": ["--pps", "inf"],
    "gaps at a rate": ["--pps", "1k", "--max-gap", "1"],
    "decapsulation over sockets": ["--decap", "--mode", "loopback"],
    "decapsulation that is written": ["--decap", *WRITTEN],
    "the kernel without devices": ["--via", "kernel"],
    "the kernel in a framing that it lacks": ["--via", "kernel", "--mode", "tun", "--framing", "ip"],
    "more peers than leases": ["--peers", "3", "--leases", "2"],
    "leases in no table": ["--mode", "tun", "--leases", "9"],
    "no peers": ["--peers", "0"],
    "too many leases": ["--leases", "1000000"],
    "no loops": ["--loops", "0"],
    "a mode that there is not": ["--mode", "disk"],
    "one file for two results": ["--json", "out", "--report", "out"],
    "a baseline that is not there": ["--baseline", "none.json"],
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_nonsense_is_exit_code_2(trace, options):
    assert "Error: " in said(run(trace, *options, code=2))


def test_no_file_and_none_that_exists(tmp_path):
    run(code=2)
    run(tmp_path / "none.pcap", code=2)
    run(tmp_path, code=2)


@pytest.mark.parametrize("option", ["--json", "--report", "--write"])
def test_a_capture_is_not_written_over(trace, option):
    before = trace.read_bytes()
    assert "is a capture" in said(run(trace, option, trace, code=2))
    assert trace.read_bytes() == before


@pytest.mark.parametrize("option", ["--json", "--write"])
def test_a_result_that_cannot_be_written_is_told(trace, tmp_path, option):
    assert f"{tmp_path / 'x' / 'out'}: No such file" in said(run(trace, option, tmp_path / "x" / "out", code=1))


def test_the_help_explains_every_option():
    text = said(run("--help"))
    for option in replay.params:
        if option.param_type_name == "option":
            assert option.help, option.name  # type: ignore[attr-defined]
            assert option.opts[0] in text


# --- the pace


@pytest.fixture
def virtual(monkeypatch) -> list[Pacer]:
    """Replays whose schedule runs by a clock that only sleeping and looking at it moves; the pacers that were made."""
    now = [10**9]
    made: list[Pacer] = []

    def clock() -> int:
        now[0] += 100
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    def pacer(pace) -> Pacer:
        made.append(Pacer(pace, clock, sleep))
        return made[-1]

    monkeypatch.setattr(command, "Pacer", pacer)
    return made


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (["--pps", "1k"], (2 * PACKETS - 1) / 1e3),
        (["--pps", "0.05k"], (2 * PACKETS - 1) / 50),
        (["--bps", "1M"], None),
        (["--speed", "0.001"], None),
    ],
)
def test_the_pace_is_kept(trace, tmp_path, virtual, options, seconds):
    text = said(run(trace, "--loops", 2, *options, "--json", tmp_path / "out.json"))
    read = results.read_json(tmp_path / "out.json")
    if options[0] == "--bps":
        seconds = 2 * 8 * read.trace.inner_bytes / 1e6
    elif options[0] == "--speed":
        seconds = 2 * read.trace.duration_seconds * 1e3
    assert virtual[0].elapsed_ns / 1e9 == pytest.approx(seconds, rel=0.02)
    assert read.pacing.lateness is not None
    assert read.pacing.lateness.mean_microseconds < 10
    assert "late by" in text
    assert read.delivery.delivered == 2 * PACKETS


def test_long_gaps_are_shortened(trace, virtual):
    run(trace, "--loops", 1, "--speed", "0.000001", "--max-gap", "0.000001")
    assert virtual[0].elapsed_ns / 1e9 <= PACKETS


@pytest.mark.parametrize(("text", "rate"), [("50", 50), ("50k", 5e4), ("1.5M", 1.5e6), ("2g", 2e9), ("1e3", 1e3)])
def test_rates_have_units(text, rate):
    assert command._rate(text) == rate


# --- the underlay, and the way back


@pytest.mark.parametrize("mode", ["memory", "loopback"])
@pytest.mark.parametrize("framing", ["vxlan", "ip"])
def test_what_is_written_can_be_decapsulated(trace, tmp_path, mode, framing):
    written = tmp_path / "under.pcapng"
    done = run(trace, "--mode", mode, "--framing", framing, "--loops", 1, "--write", written, "--json", tmp_path / "a")
    assert f"sent {PACKETS}," in said(done)
    assert results.read_json(tmp_path / "a").stages[0].ns_per_packet > 0  # reading, which writing did
    run(written, "--decap", "--framing", framing, "--loops", 2, "--json", tmp_path / "out.json")
    read = results.read_json(tmp_path / "out.json")
    assert read.mode == "memory decap"
    assert (read.delivery.sent, read.delivery.delivered) == (2 * PACKETS, 2 * PACKETS)
    assert (read.delivery.lost, read.delivery.corrupted, read.delivery.reordered) == (None, None, None)
    other = "ip" if framing == "vxlan" else "vxlan"
    assert f"other framing {PACKETS}" in said(run(written, "--decap", "--framing", other, code=1))


# --- the baseline


def test_a_run_compared_with_itself_is_within_noise(trace, tmp_path):
    run(trace, "--json", tmp_path / "a.json")
    one = results.read_json(tmp_path / "a.json")
    compared = compare.compare(one, one)
    assert compared.changes[0].verdict is compare.Verdict.NOISE
    assert not compared.exceeds(0)
    text = said(run(trace, "--baseline", tmp_path / "a.json", "--threshold", 99))
    assert "not worse than the baseline by more than 99 %" in text


def test_worse_than_the_baseline_is_exit_code_3(trace, tmp_path):
    run(trace, "--json", tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    for loop in content["loops"]:
        loop["seconds"] /= 1000
    (tmp_path / "a.json").write_text(json.dumps(content))
    text = said(run(trace, "--baseline", tmp_path / "a.json", "--threshold", 50, code=3))
    assert "worse than the baseline by more than 50 %, beyond noise" in text


def test_a_baseline_of_something_else_costs_the_comparison_and_not_the_run(trace, tmp_path):
    run(trace, "--json", tmp_path / "a.json")
    write(tmp_path / "b.pcap", "small", 1, 50)
    done = run(tmp_path / "b.pcap", "--baseline", tmp_path / "a.json", "--json", tmp_path / "b.json", code=1)
    assert "the baseline replayed another trace" in said(done)
    assert "delivered 250" in said(done)
    assert results.read_json(tmp_path / "b.json").trace.packets == 50


def test_a_baseline_that_is_none_is_found_before_anything_is_replayed(trace, tmp_path):
    (tmp_path / "a.json").write_text("{}")
    done = run(trace, "--baseline", tmp_path / "a.json", code=1)
    assert "not the result of a replay" in said(done)
    assert "delivered" not in said(done)


# --- the documentation


PAGE = ROOT / "docs" / "replay.md"


def commands() -> list[list[str]]:
    """The program's command lines in the page, without what a shell makes of them."""
    lines = re.findall(r"^ {4}(?:pyflannel-dp|python -m) (.+)$", PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_commands_of_the_documentation_can_be_run(tmp_path, monkeypatch):
    """In their order, since some read what others wrote; those that need root are only parsed."""
    monkeypatch.chdir(tmp_path)
    found = commands()
    assert len(found) > 8
    for line in found:
        words = line[line[0] == "bench" :]
        if "tun" in words:
            replay.make_context("replay", words[1:])
            continue
        if words[0] == "trace":
            words += ["--packets", "300"]
        if "--baseline" in words:
            words += ["--threshold", "99"]
        if "--report" in words:  # tested elsewhere
            del words[words.index("--report") :]
        done = CliRunner().invoke(bench, words)
        assert done.exit_code == 0, (words, done.output)


def test_the_documentation_names_every_option_key_and_stage(trace, tmp_path):
    text = PAGE.read_text()
    for option in replay.params:
        if option.param_type_name == "option":
            assert f"`{option.opts[0]}" in text, option.opts[0]
    run(trace, "--mode", "loopback", "--loops", 1, "--json", tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    for key in content:
        assert f"`{key}`" in text, key
    for stage in content["stages"]:
        assert re.search(rf"^\| {stage['name']} \|", text, re.MULTILINE), stage
    assert text.rstrip().endswith("## Figures\n\nSee performance.md.")
