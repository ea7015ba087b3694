"""Files that are whole or not there: written beside their place, flushed, then renamed over it.

A reader sees the old content or the new, never a part; after a power loss too, since file and folder are flushed before
the call returns.
"""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace `path` by `text`, with permission bits `mode` whatever the umask.

    Raises OSError; then `path` is as before.
    """
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
    """Flush the names in `folder`, so that a rename or removal in it survives a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
