import io
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.logs import OURS, JournalFormatter, JsonFormatter, configure, is_journal, priority


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in OURS}
    root.handlers.clear()  # `configure` closes what it finds, and these are pytest's
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)


def lines_of(verbosity, *, as_json=False):
    """What is logged at each level by us and by a library."""
    stream = io.StringIO()
    configure(verbosity, as_json, stream=stream)
    for name in ("dataplane.node", "routing.stores.local", "grpc", "asyncio"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "%s at %d", name, level)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("verbosity", "ours", "theirs"), [(0, 20, 30), (1, 10, 30), (2, 10, 10), (9, 10, 10)])
def test_levels(verbosity, ours, theirs):
    expected = {
        f"{name} at {level}"
        for name, least in (("dataplane.node", ours), ("routing.stores.local", ours), ("grpc", theirs), ("asyncio", theirs))
        for level in (10, 20, 30)
        if level >= least
    }
    assert {line.split(maxsplit=3)[3] for line in lines_of(verbosity)} == expected


def test_the_plain_form():
    stream = io.StringIO()
    configure(0, False, stream=stream)
    logging.getLogger("dataplane.x").warning("lost %s", "it")
    date, time, rest = stream.getvalue().split(" ", 2)
    datetime.strptime(f"{date} {time}", "%Y-%m-%d %H:%M:%S,%f").astimezone()
    assert rest == "WARNING lost it\n"


def test_the_last_call_counts():
    first, second = io.StringIO(), io.StringIO()
    configure(2, False, stream=first)
    configure(0, False, stream=second)
    logging.getLogger("dataplane").info("x")
    logging.getLogger("grpc").info("y")
    assert first.getvalue() == ""
    assert second.getvalue().endswith(" INFO x\n")


def record(message="m", *arguments, level=logging.INFO, extra=None, exc_info=None):
    return logging.getLogger("dataplane.node").makeRecord(
        "dataplane.node", level, "f", 1, message, arguments, exc_info, extra=extra
    )


def test_json():
    made = record("peer %s", "x\ny", extra={"subnet": "10.1.0.0/24", "count": 3})
    made.created, made.msecs = 1700000000.25, 250.0
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "dataplane.node",
        "message": "peer x\ny",
        "subnet": "10.1.0.0/24",
        "count": 3,
    }
    assert datetime.fromisoformat(json.loads(line)["time"]) == datetime(2023, 11, 14, 22, 13, 20, 250000, tzinfo=UTC)


def test_json_of_an_exception():
    try:
        raise ValueError("no good")
    except ValueError:
        fields = json.loads(JsonFormatter().format(record(exc_info=sys.exc_info())))
    assert fields["exception"].endswith("ValueError: no good")
    assert "Traceback" in fields["exception"]


def test_json_with_a_stack():
    made = record()
    made.stack_info = "Stack:\n  here"
    assert json.loads(JsonFormatter().format(made))["stack"] == "Stack:\n  here"


def test_extra_fields_do_not_pose_as_ours():
    fields = json.loads(JsonFormatter().format(record(extra={"level": "DEBUG", "time": "never", "logger": "x"})))
    assert fields["level"] == "INFO"
    assert fields["logger"] == "dataplane.node"
    assert fields["time"] != "never"


def _loop():
    loop = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize("value", [float("nan"), object(), {1: 2}, {(1, 2): 3}, _loop(), b"\xff", {"a": float("inf")}])
def test_any_extra_value_gives_a_line_of_json(value):
    line = JsonFormatter().format(record(extra={"value": value}))
    fields = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert fields["message"] == "m"


@given(st.text(), st.dictionaries(st.text(min_size=1).filter(lambda name: name not in vars(record())), st.text()))
def test_any_text_gives_one_line_of_json(message, extra):
    extra = {name: value for name, value in extra.items() if name not in {"message", "asctime"}}
    made = record(message.replace("%", "%%"), extra=extra)
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line)["message"] == made.getMessage()


def test_priorities():
    levels = [logging.DEBUG, logging.INFO, 25, logging.WARNING, logging.ERROR, logging.CRITICAL, 60]
    assert [priority(level) for level in levels] == [7, 6, 6, 4, 3, 2, 2]


def test_each_line_for_the_journal_has_its_priority():
    formatter = JournalFormatter(logging.Formatter("%(message)s"))
    assert formatter.format(record("a\nb", level=logging.ERROR)) == "<3>a\n<3>b"


def test_the_journal_is_known_by_device_and_inode(tmp_path):
    with open(tmp_path / "stream", "w") as stream:
        status = os.fstat(stream.fileno())
        named = f"{status.st_dev}:{status.st_ino}"
        assert is_journal(stream, {"JOURNAL_STREAM": named})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": ""})
        assert not is_journal(stream, {})
    assert not is_journal(stream, {"JOURNAL_STREAM": named})  # it is closed
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": named})


@pytest.mark.parametrize(("as_json", "expected"), [(False, "<4>three\n"), (True, '<4>{"time": ')])
def test_a_process_whose_stderr_goes_to_the_journal(tmp_path, as_json, expected):
    code = f"import logging; from dataplane.logs import configure; configure(0, {as_json});"
    code += "logging.getLogger('dataplane').warning('three')"
    with open(tmp_path / "journal", "w") as stream:
        status = os.fstat(stream.fileno())
        environment = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        subprocess.run([sys.executable, "-c", code], stderr=stream, env=environment, check=True)
    assert (tmp_path / "journal").read_text().startswith(expected)
