"""The pytest plugin: fixtures with an overlay network in memory, and a report of it when a test fails.

Theory of operation: the fixtures make an `Overlay`, or a bare `FakeNetwork`, from the keywords of the test's marker of the
same name, with a seed that follows from the test's id, so that a test repeats itself and two tests differ;
``--overlay-seed`` sets another, also where the marker has one. After a test that failed, the report gets a section with the
seed, every node's counters, and the path of a pcapng file of the datagrams that crossed the underlay, which is written to
the test's temporary folder. What was raised on the overlay's loop and asked for by nobody is an error of the teardown.

Registered as ``overlay`` in the entry point group ``pytest11``; nothing of the rest is imported before a test asks for a
fixture.
"""

import asyncio
import inspect
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dataplane.overlay import Overlay
    from dataplane.underlay.fake import FakeNetwork

_MARKERS = (
    (
        "overlay(nodes=0, **options): what the fixture `overlay` is like: so many nodes, and the keywords of "
        "dataplane.overlay.Overlay, of which `link` may be a text like 'loss=10%,delay=20ms'"
    ),
    "underlay(**options): what the fixture `underlay` is like: the keywords of dataplane.underlay.fake.FakeNetwork",
)
_OVERLAY = pytest.StashKey["Overlay"]()
_FOLDER = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("overlay", "overlay networks in memory")
    group.addoption(
        "--overlay-seed",
        type=int,
        metavar="N",
        help="Seed of the overlays of this run, whatever their markers say. Default: the marker's, or from the test's id.",
    )
    group.addoption(
        "--overlay-clock",
        choices=("virtual", "real"),
        default="virtual",
        help="Whether waiting takes time in tests that use the fixtures overlay and underlay without a loop of their own.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.fixture
def overlay(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[Overlay]":
    """An overlay network in memory; see the marker of the same name."""
    from dataplane.overlay.overlay import Overlay  # noqa: PLC0415 - only when asked for

    options = _options(request, "overlay")
    nodes = options.pop("nodes", 0)
    loop = asyncio.new_event_loop() if _is_clock_real(request) else None
    with Overlay(loop=loop, **options) as made:
        if loop is not None:
            made.adopt_loop()
        request.node.stash[_OVERLAY], request.node.stash[_FOLDER] = made, tmp_path
        made.add_nodes(nodes)
        yield made


@pytest.fixture
def underlay(request: pytest.FixtureRequest) -> "Iterator[FakeNetwork]":
    """An underlay in memory without any node; see the marker of the same name.

    It has a loop, of virtual time unless the real one is asked for, which its `run` and `settle` drive. In a test that is a
    coroutine it takes the time of the loop that runs that.
    """
    from dataplane.overlay.failures import cancel_tasks  # noqa: PLC0415 - only when asked for
    from dataplane.overlay.virtualtime import VirtualLoop  # noqa: PLC0415
    from dataplane.underlay.fake import FakeNetwork  # noqa: PLC0415
    from dataplane.underlay.link import LinkSpec, parse_link  # noqa: PLC0415

    options = _options(request, "underlay")
    link = options.pop("link", LinkSpec())
    link = parse_link(link) if isinstance(link, str) else link
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        network = FakeNetwork(link=link, **options)
        yield network
        network.close()
        return
    loop = asyncio.new_event_loop() if _is_clock_real(request) else VirtualLoop()
    try:
        network = FakeNetwork(link=link, loop=loop, **options)
        yield network
        network.close()
        cancel_tasks(loop)
    finally:
        loop.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001 - pytest asks for hooks' parameters by name
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell of the overlay of a test that failed, while it is still there."""
    report = yield
    made = item.stash.get(_OVERLAY, None)
    if made is not None and report.when == "call" and report.failed:
        report.sections.append(("overlay", _tell(item, made)))
    return report


def _options(request: pytest.FixtureRequest, name: str) -> dict[str, Any]:
    """The keywords of all markers called `name`, the closest to the test winning; and the seed, the command line's best."""
    node = request.node
    options: dict[str, Any] = {"seed": zlib.crc32(node.nodeid.encode())}
    for marker in reversed(list(node.iter_markers(name))):
        if marker.args:
            raise pytest.UsageError(f"{node.nodeid}: the marker {name} takes keywords only")
        options |= marker.kwargs
    chosen = request.config.getoption("--overlay-seed")
    if chosen is not None:  # so that whoever repeats a failure need not edit the test
        options["seed"] = chosen
    return options


def _is_clock_real(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--overlay-clock") == "real")


def _tell(item: pytest.Item, made: "Overlay") -> str:
    lines = [made.report(), f"repeat it with --overlay-seed {made.seed}"]
    path = item.stash[_FOLDER] / "underlay.pcapng"
    try:
        count = made.write_capture(path)
        lines.append(f"{count} datagrams that crossed the underlay are in {path}")
    except OSError as error:
        lines.append(f"the datagrams could not be written to {path}: {error}")
    return "\n".join(lines)
