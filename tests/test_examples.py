"""The examples work for whoever copies them, and the page on networks for tests runs as it stands.

That the examples pass here is their own business: pytest collects them beside the tests.
"""

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.overlay import Fate, LinkSpec, Overlay, OverlayNode
from dataplane.underlay.link import parse_link

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "fake-underlay.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
FAILS = "# fails"


def run(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Python, as somebody has it who has nothing of this checkout's configuration."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def pytest_of(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return run("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, cwd=cwd)


def test_the_examples_work_where_they_are_copied_to(tmp_path):
    for path in EXAMPLES:
        shutil.copy(path, tmp_path)
    done = pytest_of("-W", "error", "-p", "no:asyncio", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d{2} passed in", done.stdout, re.MULTILINE), done.stdout


def test_the_script_prints_its_table(tmp_path):
    done = run("-W", "error", ROOT / "examples" / "overlay_script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["loss", "answered", "expected", "seconds"]
    assert [row[0] for row in rows] == ["0%", "20%", "40%", "60%", "80%", "100%"]
    for _, answered, expected, _ in rows:
        assert abs(float(answered.rstrip("%")) - float(expected.rstrip("%"))) < 8


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_on_the_page_run(number, tmp_path):
    program = PROGRAMS[number]
    path = tmp_path / f"test_block{number}.py"
    path.write_text(program)
    if "def test_" not in program:
        done = run("-W", "error", path, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return
    done = pytest_of(f"--basetemp={tmp_path / 'out'}", path, cwd=tmp_path)
    if FAILS not in program:
        assert re.search(rf"^{program.count('def test_')} passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
        return
    told = BLOCKS[BLOCKS.index(("python", program)) + 1]
    assert told[0] == "text"
    heading, *lines, last = told[1].splitlines()
    shown = done.stdout.splitlines()
    at = next(i for i, line in enumerate(shown) if re.fullmatch(r"-+ overlay -+", line))
    assert re.fullmatch(r"-+ overlay -+", heading)
    assert shown[at + 1 : at + 1 + len(lines)] == lines
    before, after = last.split("…")
    assert shown[at + 1 + len(lines)].startswith(before)
    assert shown[at + 1 + len(lines)].endswith(after)
    assert list(tmp_path.rglob(Path(after).name))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table on the page that begins with `heading`."""
    at = PAGE.index(heading)
    lines = PAGE[at : PAGE.index("\n\n", at)].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_field_of_a_link():
    table = rows("| field | as text")
    fields = dataclasses.fields(LinkSpec)
    assert [row[0] for row in table] == [f"`{one.name}`" for one in fields]
    for one, (_, text, default, _) in zip(fields, table, strict=True):
        assert default == ("0" if one.default == 0 else str(one.default))
        spec = parse_link(text.strip("`"))
        assert getattr(spec, one.name) != one.default or one.name == "queue"


def test_the_page_has_every_fate_of_a_datagram():
    assert [row[0].strip("`") for row in rows("| fate |")] == list(Fate)


def test_the_page_has_every_keyword_of_an_overlay():
    named = [name for row in rows("| keyword |") for name in re.findall(r"`(\w+)`", row[0])]
    assert named == list(inspect.signature(Overlay).parameters)


def test_what_the_page_says_a_node_has_it_has():
    named = {re.findall(r"\w+", name)[0] for row in rows("| | |\n| --- | --- |\n| `pod(") for name in row[0].split(", `")}
    named = {"ping" if name == "await" else name for name in named}
    with Overlay() as overlay:
        (node,) = overlay.add_nodes(1)
        assert not {name for name in named if not hasattr(node, name)}
    public = {name for name in vars(OverlayNode) if not name.startswith("_")}
    assert public - named <= {"identity", "plan_renewal", "fail", "where"}
