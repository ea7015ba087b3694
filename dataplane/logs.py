"""Where log lines go and what they look like.

Theory of operation: everything goes to stderr, a line an event. There are three forms. For people: time, level, message.
For journald, which notes the time itself: the message behind ``<N>``, the level as sd-daemon(3) and syslog number them; it
is chosen when stderr is the stream that JOURNAL_STREAM names (systemd.exec(5)). For programs, on demand: one JSON object a
line.

The libraries that we use are heard from WARNING on, because at INFO they talk about themselves.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

OURS = ("encap", "routing", "dataplane", "bench", "__main__")
PLAIN = "%(asctime)s %(levelname)s %(message)s"
_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIRST_EVERYTHING = 2


def configure(verbosity: int, as_json: bool, *, stream: TextIO | None = None) -> None:
    """Log to `stream` (stderr if not given): our own messages from INFO on, with `verbosity` 1 from DEBUG on, and with 2 or
    more everybody's. May be called again; the last call counts."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    formatter: logging.Formatter = JsonFormatter() if as_json else logging.Formatter(PLAIN)
    if is_journal(stream, os.environ):
        formatter = JournalFormatter(formatter if as_json else logging.Formatter("%(message)s"))
    handler.setFormatter(formatter)
    everything = verbosity >= _FIRST_EVERYTHING
    logging.basicConfig(level=logging.DEBUG if everything else logging.WARNING, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbosity > 0 else logging.INFO)


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether `stream` is connected to journald: its device and inode are those of JOURNAL_STREAM ("dev:inode")."""
    named = environment.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (ISO 8601, UTC), ``level``, ``logger``, ``message``; ``exception`` (the traceback) and
    ``stack`` if there are any; and what was given as `extra`, under its own names. Our names win."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {name: value for name, value in vars(record).items() if name not in _ATTRIBUTES}
        fields |= {
            "time": f"{whole}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        try:
            return json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError):  # a key that is no text, a number that JSON does not have, a loop
            return json.dumps({name: str(value) for name, value in fields.items()})


class JournalFormatter(logging.Formatter):
    """What `inner` makes, with the priority in front of each line."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in self._inner.format(record).split("\n"))


def priority(level: int) -> int:
    """The priority of syslog(3) for a level of `logging`: 2 critical, 3 error, 4 warning, 6 info, 7 debug."""
    for least, number in ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6)):
        if level >= least:
            return number
    return 7
