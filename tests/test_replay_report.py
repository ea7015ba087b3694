"""What people are shown of a run: one screen, and one page that refers to nothing outside itself."""

import importlib.util
import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace

import pytest
from rich.console import Console

from bench.html import PageError
from bench.replay import report, results
from bench.replay.results import (
    STAGES,
    Delivery,
    Histogram,
    Latency,
    Lateness,
    Loop,
    Pacing,
    Run,
    Stage,
    Trace,
)
from dataplane.verdict import by_name, new_counts


def latency() -> Latency:
    histogram = Histogram()
    histogram.record_all(range(0, 50_000, 11))
    return Latency.of(histogram)


SIZES = {"64": 500, "128": 120, "256": 30, "512": 10, "1024": 8, "1280": 4, "1518": 327, "larger": 1}
VERDICTS = by_name(new_counts()) | {"forwarded": 6993, "too_big": 7}
FULL = Run(
    mode="memory",
    command=["/x/pyflannel-dp", "replay", "my <1> trace.pcap"],
    machine={"cpu": "A <CPU>", "cores": 2},
    settings={"framing": "vxlan", "mtu": 1450},
    trace=Trace(
        "my <1> [x].pcap", "f", 1000, 600_000, 2.5, SIZES, {"IPv4 TCP": 996, "IPv6 UDP": 4}, {"not <IP>": 3, "x": 0}
    ),
    loops=[Loop(999, 599_400, 0.001 * (1 + i / 50)) for i in range(7)],
    delivery=Delivery(7000, 6993, 0, 0, 0),
    pacing=Pacing("as captured × 2", Lateness(30.1, 141.0, 1500.0)),
    stages=[Stage(name, 10.0 * (i + 1), 25.0 * (i + 1)) for i, name in enumerate(STAGES)],
    latency=latency(),
    verdicts={"outbound": VERDICTS, "inbound": by_name(new_counts()) | {"forwarded": 6993}},
    notes=["[x] <y> is left out"],
)
BARE = Run(
    mode="tun",
    command=[],
    machine={},
    settings={},
    trace=Trace("empty.pcap", "", 0, 0, 0.0, {}, {}, {}),
    loops=[],
    delivery=Delivery(0, 0),
    pacing=Pacing("as fast as possible"),
)


def screen(run: Run, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as caught:
        report.print_run(console, run)
    return caught.get()


@pytest.mark.parametrize(("width", "lines"), [(80, 30), (100, 30), (140, 24)])
def test_a_run_fits_on_one_screen(width, lines):
    said = screen(FULL, width)
    assert said.count("\n") <= lines
    assert max(map(len, said.splitlines())) <= width


def test_the_screen_has_everything():
    said = screen(FULL, 140)
    for text in (
        "Replay of my <1> [x].pcap: memory, as captured × 2",
        "942 kpps (892 kpps … 999 kpps in 7 loops), 4.52 Gbit/s of inner packets",
        "sent 7 000, delivered 6 993, lost 0, reordered 0, corrupted 0",
        "p99.9 50 µs, max 50 µs",
        "late by 30.1 µs on average, p99 141 µs, at most 1.5 ms",
        "1 000 packets, 600 kB, 600 on average, captured in 2.5 s",
        "not <IP> 3",
        "IPv4 TCP 100 %, IPv6 UDP < 1 %",
        "[x] <y> is left out",
    ):
        assert text in said
    assert re.search(r"decapsulate +60\.0 +150 +█+", said)
    assert re.search(r"≤ 1518 +33 % +█+", said)
    assert re.search(r"outbound +too big +7\b", said)
    assert "no route" not in said


@pytest.mark.parametrize(
    ("microseconds", "text"), [(0.25, "0.25 µs"), (999.4, "999 µs"), (999.6, "1 ms"), (999_400, "999 ms"), (999_600, "1 s")]
)
def test_times_have_three_digits(microseconds, text):
    run = replace(FULL, pacing=Pacing("as captured", Lateness(microseconds, 1.0, 1.0)))
    assert f"late by {text} on average" in screen(run)


def test_only_what_went_wrong_is_red():
    assert not report.is_wrong(FULL)
    assert not report.is_wrong(BARE)
    for name in ("lost", "reordered", "corrupted"):
        assert report.is_wrong(replace(FULL, delivery=replace(FULL.delivery, **{name: 1})))


def test_a_run_of_nothing_is_shown():
    said = screen(BARE)
    assert "nothing was measured" in said
    for absent in ("latency", "pacing", "protocols", "stage", "verdict", "bytes"):
        assert absent not in said


def test_one_loop_has_no_spread():
    assert "…" not in screen(replace(FULL, loops=FULL.loops[:1]))


def test_what_this_mode_does_not_look_for_is_not_told():
    assert "reordered" not in screen(replace(FULL, delivery=Delivery(7, 7, 0)))


def test_many_verdicts_are_cut():
    many = {"outbound": dict.fromkeys((f"verdict_{i}" for i in range(12)), 5)}
    said = screen(replace(FULL, verdicts=many))
    assert "3 more" in said
    assert said.count("verdict ") == 10  # one is the head


# --- the page


def rendered(run: Run, baseline: Run | None = None) -> str:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    code = (
        "import sys; from bench.replay import compare, report, results\n"
        "run, *baseline = [results.from_json(one) for one in sys.stdin.read().split('\\0')]\n"
        "print(report.render(run, compare.compare(baseline[0], run) if baseline else None), end='')"
    )
    given = "\0".join(results.to_json(one) for one in (run, baseline) if one is not None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def page():
    return rendered(FULL, replace(FULL, machine={"cpu": "<old>", "cores": 2}))


def test_the_page_has_a_summary_then_the_comparison_then_charts_numbers_machine_and_command(page):
    assert re.findall(r"<h2>([^<]+)</h2>", page) == [
        "Compared with the baseline",
        "Charts",
        "Numbers",
        "Machine",
        "Command",
    ]
    summary, compared, charts, numbers, machine, command = re.split(r"<h2>[^<]+</h2>", page)
    assert "<td>rate</td><td>942 kpps (892 kpps … 999 kpps in 7 loops)" in summary
    assert "<td>+0.0 %</td>" in compared
    assert "within noise" in compared
    assert "cpu was &lt;old&gt;, is A &lt;CPU&gt;" in compared
    assert re.findall("<h3>([^<]+)</h3>", charts) == ["Rate of each loop", "Stages", "Latency", "Packet sizes", "Verdicts"]
    assert charts.count("<img ") == 5
    assert "<td>decapsulate</td><td>60.0</td><td>150</td>" in numbers
    assert "<td>too big</td><td>7</td><td>larger than the path, and not to be fragmented</td>" in numbers
    assert "<td>mtu</td><td>1450</td>" in machine
    assert "pyflannel-dp replay &#x27;my &lt;1&gt; trace.pcap&#x27;" in command


def test_the_page_refers_to_nothing_outside_itself(page):
    drawings = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(drawings) == page.count("src=") == 5
    around = re.sub(r'src="data:[^"]+"', "", page)
    assert not re.search(r"href|src|url\(|@import|https?:|<script|<link", around)
    for drawing in drawings:
        svg = b64decode(drawing).decode()
        svg = re.sub(r"<!DOCTYPE[^>]*>|<metadata>.*?</metadata>|xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.DOTALL)
        assert not re.search(r'(href|src)="(?!#)|url\((?!#)|@import|https?:', svg)


def test_names_are_escaped(page):
    around = re.sub(r'src="[^"]+"', "", page)
    for raw in ("<1>", "<IP>", "<CPU>", "<y>", "<old>"):
        assert raw not in around
    assert "my &lt;1&gt; [x].pcap" in around


def test_what_went_wrong_is_marked_on_the_page(page):
    assert 'class="wrong"' not in page
    wrong = rendered(replace(FULL, delivery=replace(FULL.delivery, corrupted=2)))
    assert '<tr class="wrong"><td>delivery</td>' in wrong
    assert "Compared" not in wrong


@pytest.mark.parametrize(
    "run",
    [
        BARE,
        replace(FULL, loops=[Loop(0, 0, 1.0)], stages=[Stage("read", 0.0), Stage("read", 0.0)], latency=None),
        replace(FULL, latency=Latency.of(Histogram()), verdicts={"outbound": {"forwarded": 1}}),
    ],
)
def test_a_page_of_little_is_still_a_page(run):
    assert "<h2>Machine</h2>" in rendered(run)


def test_latencies_of_zero_can_be_drawn():
    histogram = Histogram()
    histogram.record(0, 5)
    assert "<h3>Latency</h3><img" in rendered(replace(FULL, latency=Latency.of(histogram)))


def test_a_missing_matplotlib_is_told(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PageError, match="a page needs matplotlib"):
        report.write_page(tmp_path / "out.html", FULL)
    assert not (tmp_path / "out.html").exists()
