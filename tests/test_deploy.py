"""What is in deploy/ fits what the program does: options, metrics, folders. tests/netns/test_unit.py runs the unit."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dataplane.cli import cli
from dataplane.metrics import METRICS, PREFIX
from dataplane.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "pyflannel-dp.service"
DASHBOARD = DEPLOY / "grafana-dashboard.json"
ALERTS = DEPLOY / "prometheus-alerts.yml"
SUFFIXES = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
EXPOSED = {PREFIX + name + suffix for name, one in METRICS.items() for suffix in SUFFIXES[one.kind]}
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def settings():
    """The unit's lines as pairs; a key may be there more than once."""
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return [tuple(line.split("=", 1)) for line in lines]


def values(key):
    return [value for name, value in settings() if name == key]


def options():
    names = {name for option in cli.params for name in (*option.opts, *option.secondary_opts)}
    return names, {f"FLANNELD_{option.name.upper()}" for option in cli.params if option.name}


def test_the_command_of_the_unit_has_options_that_exist():
    program, *arguments = shlex.split(values("ExecStart")[0])
    assert Path(program).name == "pyflannel-dp"
    assert {one.split("=")[0] for one in arguments if one.startswith("--")} <= options()[0]


def test_the_folders_of_the_unit_are_the_defaults_of_the_options():
    defaults = {option.name: option.default for option in cli.params}
    runtime = [f"/run/{name}" for name in values("RuntimeDirectory")[0].split()]
    assert str(defaults["run_dir"]) in runtime
    assert "/run/flannel" in runtime  # of subnet.env
    assert str(defaults["store_dir"]) == f"/var/lib/{values('StateDirectory')[0]}"
    assert values("RuntimeDirectoryPreserve") == ["yes"]


def test_the_variables_in_the_example_are_options():
    assert values("EnvironmentFile") == ["-/etc/default/pyflannel-dp"]
    named = re.findall(r"^#?(FLANNELD_\w+)=", (DEPLOY / "pyflannel-dp.default").read_text(), re.MULTILINE)
    assert len(named) > 3
    assert set(named) <= options()[1]


def test_the_user_of_the_unit_is_the_one_that_is_made():
    made = re.findall(r"^u (\S+) ", (DEPLOY / "pyflannel-dp.sysusers").read_text(), re.MULTILINE)
    assert made == values("User") == values("Group")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")
def test_systemd_understands_every_line(tmp_path):
    """It says "Unknown key name" and the like, and would say that the program is not installed."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=.*$", "ExecStart=/bin/true", UNIT.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")
def test_systemd_finds_little_that_it_could_do():
    """Its scale goes from 0 to 10, here in tenths; what a network daemon cannot do without comes to 2.0."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def expressions_of_the_dashboard():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def expressions_of_the_alerts():
    """Each `expr` of the file, which are on one line or, behind ``>-``, on several that are further in."""
    text = ALERTS.read_text()
    folded = re.findall(r"^        expr: >-\n((?:          .*\n)+)", text, re.MULTILINE)
    return folded + re.findall(r"^        expr: (?!>-)(.*)$", text, re.MULTILINE)


def names_in(expressions):
    return set(re.findall(r"\b(?:pyflannel_dp|process)_\w+", " ".join(expressions)))


def test_the_dashboard_shows_what_there_is():
    named = names_in(expressions_of_the_dashboard())
    assert named <= EXPOSED | PROCESS
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert {PREFIX + name for name in METRICS} <= shown, "a metric that no panel shows"


def test_the_dashboard_is_sound():
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps([panel.get("targets") for panel in panels]))) <= variables


def test_the_alerts_are_about_what_there_is():
    expressions = expressions_of_the_alerts()
    assert len(expressions) == ALERTS.read_text().count("- alert: ")
    assert names_in(expressions) <= EXPOSED
    named = re.search(r'verdict=~"([a-z_|]+)"', " ".join(expressions))
    assert named is not None
    assert set(named[1].split("|")) <= {verdict.name.lower() for verdict in Verdict}


@pytest.mark.parametrize("labels", [re.findall(r"(\w+)=~?\"", " ".join(expressions_of_the_alerts()))])
def test_the_alerts_select_by_labels_that_there_are(labels):
    assert set(labels) <= {label for one in METRICS.values() for label in one.labels} | {"job", "le"}


def test_every_alert_is_explained():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for alert in re.findall(r"- alert: (\w+)", ALERTS.read_text()):
        assert f"| {alert} |" in page


def test_every_metric_is_in_the_documentation_with_its_labels():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    table = page[page.index("| metric |") :].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)`(.*?) \|", table, re.MULTILINE))
    assert set(rows) == set(METRICS)
    for name, labels in rows.items():
        assert tuple(re.findall(r"\w+", labels)) == METRICS[name].labels, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: it comes with Prometheus")
def test_the_alerts_fire_when_they_should():
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ROOT / "tests" / "alerts.test.yml")]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
