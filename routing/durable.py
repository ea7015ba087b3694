"""Files that are whole or not there: written beside their place, flushed, then renamed over it.

A reader sees the old content or the new, never a part; after a power loss too, since file and folder are flushed before
the call returns.

An error names the file that was to be written. The name of the temporary file is another one each time, so who tells an
error only when it is a new one would tell it each time.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` by `text`, with permission bits `mode` whatever the umask.

    Raises OSError, about `path`; then `path` is as before.
    """
    with _about(path):
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder`, so that a rename or removal in it survives a power loss.

    Raises OSError, about `folder`.
    """
    with _about(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    """An OSError in here is about `path`, whatever other file it names, or none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
