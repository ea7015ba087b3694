"""The benchmarks' arithmetic, on numbers made by hand; nothing here starts a program."""

import builtins
import importlib.util
import json
import re
import subprocess
import sys
from base64 import b64decode

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import html
from bench.__main__ import bench
from bench.processes import CpuTime, children, cpu_time, descriptors, resident_mebibytes, tree
from bench.profile import Profile
from bench.profile import table as profile_table
from bench.profiled_node import STAGES, Stopwatch
from bench.soak import Sample, counters, judge, memory_growth
from bench.throughput import contenders, page, report
from bench.upgrade import gap, gaps_of

ROUNDS = {
    "kernel VXLAN": {
        "TCP": [
            {"gigabits_per_second": 10.0, "retransmits": 0.0},
            {"gigabits_per_second": 20.0, "retransmits": 0.0},
            {"gigabits_per_second": 16.0, "retransmits": 0.0},
        ],
        "RTT": [{"median_milliseconds": 0.02}],
    },
    "ours <&> fast": {
        "TCP": [
            {"gigabits_per_second": 8.0, "retransmits": 4.0, "memory_mebibytes": 40.0},
            {"gigabits_per_second": 4.0, "retransmits": 12345.0, "memory_mebibytes": 41.0},
        ],
        "RTT": [{"median_milliseconds": 0.05}],
        "only here": [{"gigabits_per_second": 1.0}],
    },
    "failed": {},
}


def test_medians_are_of_the_rounds_that_have_the_number():
    middle = report.medians(ROUNDS)
    assert middle["kernel VXLAN"]["TCP"] == {"gigabits_per_second": 16.0, "retransmits": 0.0}
    assert middle["ours <&> fast"]["TCP"] == {
        "gigabits_per_second": 6.0,
        "retransmits": 6174.5,
        "memory_mebibytes": 40.5,
    }
    assert middle["failed"] == {}


def test_a_number_that_not_every_round_has_is_still_there():
    rounds = {"a": {"TCP": [{"x": 1.0}, {"x": 3.0, "y": 5.0}]}}
    assert report.medians(rounds) == {"a": {"TCP": {"x": 2.0, "y": 5.0}}}
    assert report.cell(rounds, "a", "TCP", "y") == "5"


def test_ratios_are_to_the_first_contender_by_the_first_number():
    assert report.ratios(ROUNDS) == {
        "TCP": {"kernel VXLAN": 1.0, "ours <&> fast": 0.375},
        "RTT": {"kernel VXLAN": 1.0, "ours <&> fast": 2.5},
        "only here": {},
    }


@pytest.mark.parametrize("rounds", [{}, {"a": {}}, {"a": {"TCP": []}}, {"a": {"TCP": [{"x": 0.0}]}}])
def test_nothing_to_compare_with_is_no_ratio_and_no_failure(rounds):
    assert not any(report.ratios(rounds).values())
    report.print_tables(Console(quiet=True), rounds)


def test_cells_show_median_and_spread():
    assert report.cell(ROUNDS, "kernel VXLAN", "TCP", "gigabits_per_second") == "16  (10 … 20)"
    assert report.cell(ROUNDS, "ours <&> fast", "TCP", "retransmits") == "6174  (4 … 12345)"
    assert report.cell(ROUNDS, "kernel VXLAN", "RTT", "median_milliseconds") == "0.02"
    assert report.cell(ROUNDS, "kernel VXLAN", "TCP", "memory_mebibytes") == ""


def test_tables_name_every_number_and_contender():
    console = Console(width=200, record=True, quiet=True)
    console.quiet = False
    with console.capture() as caught:
        report.print_tables(console, ROUNDS)
    said = caught.get()
    assert re.search(r"ours <&> fast +│ 0\.38 +│ 6  \(4 … 8\)", said)
    assert "ratio to kernel VXLAN" in said
    assert "failed" not in said


@pytest.mark.parametrize(
    ("name", "less"),
    [
        ("gigabits_per_second", False),
        ("delivered_kilopackets_per_second", False),
        ("lost_percent", True),
        ("retransmits", True),
        ("median_milliseconds", True),
        ("sender_cpu_seconds_per_gigabyte", True),
        ("memory_mebibytes", True),
    ],
)
def test_the_better_direction_follows_from_the_unit(name, less):
    assert report.less_is_better(name) is less


def test_json_holds_every_round(tmp_path):
    report.write_json(tmp_path / "out.json", ROUNDS, ["bench", "throughput"])
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["rounds"] == ROUNDS
    assert read["ratios"]["TCP"]["ours <&> fast"] == 0.375
    assert read["machine"]["cores"]


MACHINE = {"cpu": "A CPU", "cores": 2, "kernel": "6.18", "python": "CPython 3.11"}


@pytest.fixture(scope="module")
def made_page():
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    command = ["/x/bench/__main__.py", "throughput", "--only", "kernel VXLAN"]
    arguments = [ROUNDS, MACHINE, command, ["n2n is left out: edge is not installed"]]
    # In a process of its own: matplotlib keeps the files of its fonts open.
    code = "import json, sys; from bench.throughput import page; print(page.render(*json.load(sys.stdin)), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_ratios_then_charts_then_numbers_then_machine_and_command(made_page):
    heads = re.findall(r"<h2>([^<]+)</h2>", made_page)
    assert heads == ["Ratios", "Charts", "Numbers", "Machine", "Command"]
    ratios, charts, numbers, machine, command = re.split(r"<h2>[^<]+</h2>", made_page)[1:]
    assert "<td>ours &lt;&amp;&gt; fast</td><td>0.38</td><td>2.50</td>" in ratios
    assert "RTT: median milliseconds (less is better)" in ratios
    assert "n2n is left out: edge is not installed" in ratios
    assert charts.count("<img ") == 3
    assert "<td>16  (10 … 20)</td>" in numbers
    for value in map(str, MACHINE.values()):
        assert value in machine
    assert "python -m bench throughput --only &#x27;kernel VXLAN&#x27;" in command


def test_the_page_refers_to_nothing_outside_itself(made_page):
    drawings = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', made_page)
    assert len(drawings) == made_page.count("src=") == 3
    around = re.sub(r'src="data:[^"]+"', "", made_page)
    assert not re.search(r"href|src|url\(|@import|https?:|<script|<link", around)
    for drawing in drawings:
        svg = b64decode(drawing).decode()
        svg = re.sub(r"<!DOCTYPE[^>]*>|<metadata>.*?</metadata>|xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.DOTALL)
        assert not re.search(r'(href|src)="(?!#)|url\((?!#)|@import|https?:', svg)


def test_contenders_names_are_escaped(made_page):
    assert "<&>" not in re.sub(r'src="[^"]+"', "", made_page)


def test_a_page_of_nothing_is_still_a_page():
    assert "<h2>Machine</h2>" in page.render({}, MACHINE, [])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/x/bench/__main__.py", "soak"], "python -m bench soak"),
        (["/usr/bin/pyflannel-dp", "bench", "soak"], "pyflannel-dp bench soak"),
        ([], ""),
    ],
)
def test_the_command_line_is_as_one_types_it(argv, line):
    assert html.command_line(argv) == line


@pytest.fixture
def no_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_a_missing_matplotlib_is_told_before_anything_is_measured(no_matplotlib, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.throughput.command.missing", lambda: None)
    done = CliRunner().invoke(bench, ["throughput", "--report", str(tmp_path / "out.html")])
    assert done.exit_code == 1
    assert "a page needs matplotlib" in done.output
    assert "pip install 'pyflannel-dp[bench]'" in done.output
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_folder_that_is_missing_is_told_before_anything_is_measured(option):
    done = CliRunner().invoke(bench, ["throughput", option, "/nowhere/out"])
    assert done.exit_code == 2
    assert "there is no folder /nowhere" in done.output


def test_a_choice_that_chooses_nothing_is_told(monkeypatch):
    monkeypatch.setattr("bench.throughput.command.missing", lambda: None)
    done = CliRunner().invoke(bench, ["throughput", "--only", "nobody"])
    assert done.exit_code == 2
    assert "no contender or no measure" in done.output


@pytest.mark.parametrize(
    ("make", "programs"),
    [
        (contenders.socat, "socat"),
        (contenders.wireguard_go, "wireguard-go and wg and unshare and nsenter"),
        (contenders.open_vswitch, "ovs-vswitchd and ovsdb-server and ovsdb-tool and ovs-vsctl and unshare"),
        (contenders.n2n, "supernode and edge and unshare"),
    ],
)
def test_a_contender_without_its_programs_is_left_out(make, programs, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert make().missing == programs


def test_who_is_left_out_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("bench.throughput.command.missing", lambda: None)
    done = CliRunner().invoke(bench, ["throughput", "--only", "socat", "--rounds", "1"])
    assert done.exit_code == 0
    assert "socat is left out: socat is not installed" in done.output


@pytest.mark.parametrize(
    ("said", "missing"), [("Welcome to n2n v.1.3.2 for unknown", None), ("Welcome to n2n v.3.0.0", "version 1 of edge")]
)
def test_n2n_is_taken_in_the_version_that_stays_in_the_foreground(said, missing, monkeypatch, tmp_path):
    for name in ("supernode", "edge", "unshare"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert contenders.n2n().missing == missing


def test_processes_are_read_from_proc():
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) as shell:
        try:
            while not children(shell.pid):
                pass
            (sleep,) = children(shell.pid)
            assert tree([shell.pid]) == [shell.pid, sleep]
            assert resident_mebibytes(shell.pid) > 0
            assert descriptors(shell.pid) >= 3
            assert cpu_time(shell.pid).seconds < 5
        finally:
            subprocess.run(["kill", "-9", "--", f"-{shell.pid}"], check=True)


def test_a_process_that_ended_counts_as_nothing():
    ended = subprocess.Popen(["true"])
    ended.wait()
    pid = ended.pid
    assert (children(pid), cpu_time(pid).seconds, resident_mebibytes(pid), descriptors(pid)) == ([], 0, 0, 0)


def samples(number=16, *, memory=lambda i: 40.0, fds=lambda i: 20, **changed):
    """Samples of a daemon that does well, but for what is given."""
    made = []
    for i in range(number):
        told = {
            "outbound.received": 100 * i,
            "outbound.verdicts.forwarded": 90 * i,
            "outbound.verdicts.no_route": 10 * i,
            "inbound.received": 7 * i,
            "inbound.verdicts.forwarded": 7 * i,
            "icmp_errors.sent": i,
        }
        told |= {path: function(i) for path, function in changed.items()}
        made.append(Sample(5.0 * i, memory(i), fds(i), i / 2, told))
    return made


def test_a_daemon_that_does_well_is_not_blamed():
    assert judge("node", samples()) == []
    assert judge("node", samples(8)) == []


def test_warming_up_in_the_first_quarter_is_no_growth():
    assert judge("node", samples(memory=lambda i: 20.0 + 8 * min(i, 4))) == []


def test_growth_is_from_the_second_quarter_to_the_last():
    grown = samples(memory=lambda i: 40.0 + i / 10)
    assert memory_growth(grown) == pytest.approx(0.8)
    assert judge("node", grown) == []
    (fault,) = judge("node", samples(memory=lambda i: 40.0 + i / 5))
    assert fault == "node: memory grew by 1.60 MiB from the second to the last quarter (1.0 allowed)"


def test_a_descriptor_leak_is_found():
    (fault,) = judge("node", samples(fds=lambda i: 20 + i // 8))
    assert fault == "node: descriptors leak: 20 in the second quarter, 21 in the last"
    assert judge("node", samples(fds=lambda i: 20 + (i == 9))) == []


def test_a_packet_without_a_verdict_is_found():
    changed = {"inbound.verdicts.forwarded": lambda i: 7 * i - (i == 3)}
    assert judge("node", samples(**changed)) == ["node: 15 s: inbound 21 received, but 20 verdicts"]


def test_a_counter_that_goes_backwards_or_away_is_found():
    assert judge("node", samples(**{"icmp_errors.sent": lambda i: 5 - (i >= 4)})) == [
        "node: 20 s: icmp_errors.sent went from 5 to 4"
    ]


def test_traffic_that_stands_still_is_found():
    changed = {way: lambda i: 7 * min(i, 12) for way in ("inbound.received", "inbound.verdicts.forwarded")}
    assert judge("node", samples(**changed)) == ["node: 75 s: nothing inbound since 60 s"]


def test_too_few_samples_tell_nothing():
    assert "only 7 samples" in judge("node", samples(7))[0]


def test_counters_are_the_numbers_that_only_grow():
    status = {
        "pid": 5,
        "compiled": True,
        "uptime_seconds": 3.5,
        "socket_drops": 2,
        "device": {"name": "flannel.1", "mtu": 1450, "queue_drops": None},
        "inbound": {"received": 4, "verdicts": {"forwarded": 4}},
        "peers": [],
    }
    assert counters(status) == {"socket_drops": 2, "inbound.received": 4, "inbound.verdicts.forwarded": 4}


def test_a_stage_is_charged_its_own_time_only():
    clock = iter([0, 10, 110, 130, 1000])
    watch = Stopwatch(lambda: next(clock))
    inner = watch.timed("coalesce", lambda: None)
    pump = watch.pump("inbound", inner)
    pump()  # starts at 0, the stage inside takes from 10 to 110, the end is at 130
    assert watch.nanoseconds["inbound"]["coalesce"] == 100
    assert watch.nanoseconds["inbound"]["other"] == 30
    assert watch.calls["inbound"]["coalesce"] == watch.calls["inbound"]["other"] == 1
    assert not any(watch.nanoseconds["outbound"].values())


def test_a_stage_that_raises_is_charged_too():
    clock = iter([0, 10, 20, 30])
    watch = Stopwatch(lambda: next(clock))

    def fail():
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - whatever it was
        watch.pump("outbound", watch.timed("transmit", fail))()
    assert watch.nanoseconds["outbound"] == dict.fromkeys(STAGES["outbound"], 0) | {"transmit": 10, "other": 20}


def test_the_profile_is_by_64_kib_of_the_flow():
    none = {way: dict.fromkeys(stages, 0) for way, stages in STAGES.items()}
    nanoseconds = none | {"outbound": none["outbound"] | {"transmit": 3_000_000, "lay out": 1_000_000}}
    profile = Profile(nanoseconds, none, CpuTime(0.002, 0.001), 0.008, 100 << 16)
    assert profile.busy_nanoseconds == 4_000_000
    assert profile.microseconds_per_unit(3_000_000) == 30.0
    console = Console(width=140)
    with console.capture() as caught:
        console.print(profile_table("sending daemon", profile, "outbound"))
    assert re.search(r"transmit .* 75\.0 % +│ 30\.00", caught.get())
    assert "50 % of the run" in caught.get()
    assert re.search(r"user time .* 66\.7 % of CPU │ 20\.00", caught.get())


def test_the_command_line_of_the_node_hands_over(capsys):
    from dataplane.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["bench", "throughput", "--help"])
    assert ended.value.code == 0
    assert "--report" in capsys.readouterr().out


def test_benchmarks_that_are_not_installed_are_told_in_one_line(capsys, monkeypatch):
    from dataplane.cli import main

    real = builtins.__import__

    def refuse(name, *args, **named):
        if name.startswith("bench"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "soak"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "pip install 'pyflannel-dp[bench]'" in said
    assert said.count("\n") == 1


class TestUpgradeGap:
    @pytest.mark.parametrize(
        ("replies", "longest"),
        [
            ([9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], 1),
            ([9, 10, 11, 15, 16, 20, 21], 4),
            ([9, 19, 21], 10),
            ([8, 12, 20], 8),
            ([1, 11, 20], 10),  # a gap that began before
            ([10, 18, 29], 11),  # one that ended later
            ([9, 30], 21),
            ([9, 11, 12], 8),  # traffic never returned
            ([9], 11),
            ([25, 26], 15),  # nor was there any before
            ([], 10),
            ([1, 2, 9, 10, 15, 20, 90], 5),  # what is before and behind does not count
        ],
    )
    def test_the_longest_time_without_a_reply_from_10_to_20(self, replies, longest):
        assert gap(replies, 10, 20) == longest

    def test_each_upgrade_has_its_own(self):
        assert gaps_of([0, 1, 4, 5, 10, 11, 12, 13], [(0.5, 5), (9.5, 12.5)]) == (3, 5)

    @pytest.mark.parametrize(
        ("replies", "said"),
        [([], "there never was one"), ([0, 1, 2.5], "came 2.5 s before"), ([0, 5], "came 0.0 s before")],
    )
    def test_traffic_that_never_returns_is_no_result(self, replies, said):
        with pytest.raises(click.ClickException, match="traffic has not returned") as caught:
            gaps_of(replies, [(0, 1), (1, 5)])
        assert said in caught.value.message
