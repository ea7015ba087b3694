"""The documents tell the truth where a program can tell."""

import re
from pathlib import Path

import click
import pytest

from bench.__main__ import bench
from dataplane.cli import cli
from dataplane.cli.leases import leases
from dataplane.verdict import Verdict
from encap import HOT_MODULES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_our_options_exist(page):
    commands = [cli, *cli.commands.values(), *leases.commands.values(), *bench.commands.values()]
    known = {name for command in commands for option in command.params for name in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "--version", "--device"}
    # Those of pytest, two of them our plugin's, and of pip: what the page on networks for tests tells its readers to type.
    known |= {"--overlay-seed", "--overlay-clock", "--basetemp", "--no-deps"}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", page.read_text()))
    assert named <= known


def test_the_readme_names_commands_that_dev_has():
    usage = (ROOT / "dev").read_text()
    for command in re.findall(r"\./dev (\w+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^    {command}\)", usage, re.MULTILINE), command


def test_the_map_of_the_house_names_every_module_and_nothing_else():
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = text[text.index("```") + 3 : text.index("```", text.index("```") + 3)]
    for folder in ("encap", "routing", "dataplane"):
        part = house[house.index(f"{folder}/ ") :]
        part = re.split(r"\n(?=\w)", part)[0]
        named = set(re.findall(r"^  (\w+\.py|\w+/)", part, re.MULTILINE))
        modules = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
        packages = {f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")}
        assert named == modules | packages


def test_every_verdict_is_explained():
    text = (ROOT / "docs" / "operation.md").read_text()
    table = text[text.index("| verdict |") : text.index("`queue drops`")]
    named = set(
        re.findall(r"\b[a-z_]+\b", " ".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| ")))
    )
    assert {verdict.name.lower() for verdict in Verdict if verdict is not Verdict.PENDING} <= named


def test_every_hot_module_has_its_types():
    for name in HOT_MODULES:
        assert (ROOT / (name.replace(".", "/") + ".pxd")).exists()


def test_every_option_is_explained_in_the_help():
    for option in cli.params:
        assert isinstance(option, click.Option)
        assert option.help
