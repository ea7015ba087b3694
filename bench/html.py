"""Pages that hold everything: style, tables and charts of the benchmarks' reports.

Theory of operation: matplotlib, imported only when a page is wanted, draws charts as SVG, which go into the page as data
URIs; with the style in its head a page refers to nothing outside itself, and can be mailed or archived.
"""

import base64
import html
import importlib
import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em } h3 { font-size: 1em; margin-top: 2em }
table { border-collapse: collapse; margin: 0.5em 0 } .wide { overflow-x: auto }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
img { max-width: 100% } code { background: #f2f2f2; padding: 0.1em 0.3em; overflow-wrap: anywhere }
p.note { color: #666 }
"""


class PageError(Exception):
    """No page can be made; the text says what to do."""


def require_matplotlib() -> None:
    """Raises PageError if it is missing: better before an hour of measuring than after it."""
    matplotlib("figure")


def matplotlib(module: str) -> Any:
    """A module of matplotlib, by name: neither the node nor mypy needs it to be installed. Raises PageError."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise PageError(
            f"a page needs matplotlib ({error}): {Path(sys.executable).name} -m pip install 'pyflannel-dp[bench]'"
        ) from None


def opening(title: str, heading: str, more_style: str = "") -> list[str]:
    """The page up to its heading."""
    return [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>',
        f"<style>{_STYLE}{more_style}</style></head><body>\n<h1>{text(heading)}</h1>",
    ]


def closing(machine: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """What every page ends with."""
    return [
        "<h2>Machine</h2>",
        table([], [[key, str(value)] for key, value in machine.items()]),
        f"<h2>Command</h2><p><code>{text(command_line(command))}</code></p>",
        "</body></html>",
    ]


def note(words: str) -> str:
    """A remark."""
    return f'<p class="note">{text(words)}</p>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in rows, below `heads` if there are any."""
    head = f"<tr>{''.join(f'<th>{text(one)}</th>' for one in heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{text(one)}</td>' for one in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'


def svg(figure: Any) -> bytes:
    """A figure of matplotlib as SVG; the same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def image(name: str, drawing: bytes) -> str:
    """An SVG inside the page."""
    return f'<img alt="{text(name)}" src="data:image/svg+xml;base64,{base64.b64encode(drawing).decode("ascii")}">'


def text(words: str) -> str:
    """`words` as they are to be read."""
    return html.escape(words)


def command_line(command: Sequence[str]) -> str:
    """`command` (sys.argv) as one types it."""
    if command and Path(command[0]).name == "__main__.py":
        return shlex.join(["python", "-m", Path(command[0]).parent.name, *command[1:]])
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else ""
