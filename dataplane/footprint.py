"""What a node leaves on this host, noted so that ``cleanup`` removes that and nothing else.

The run folder holds ``state.json``, which names the device and the firewall table that the node makes, and the subnet file
that it writes with what it writes there. A subnet file with other content is somebody else's by now and stays. Device and
table are found by their marks; here they are named for whoever removes them, which is not this module's business.

A thing is noted before it is made, so that a node that is killed at any moment leaves nothing that is not noted. For the
same reason a subnet file that was noted before, and lies where it was with what was noted, is not forgotten when another is
noted: `Footprint.earlier` keeps it. What a cleanup could not remove stays noted for the next one.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.control import IDENTITY_NAME, LOCK_NAME, SOCKET_NAME
from routing.durable import write_whole

STATE_NAME = "state.json"


@dataclass(frozen=True)
class WrittenFile:
    """A file that a node wrote, and what it wrote there."""

    path: Path
    content: str

    def is_as_written(self) -> bool:
        """Whether it is there, with that content. Raises OSError."""
        return self.path.is_file() and self.path.read_text(encoding="utf-8", errors="replace") == self.content


@dataclass(frozen=True)
class Footprint:
    """What is noted: the names of the device and of the firewall table, the subnet file, and those before it.

    None: there was none.
    """

    device: str | None = None
    firewall: str | None = None
    subnet_file: WrittenFile | None = None
    earlier: tuple[WrittenFile, ...] = ()

    def files(self) -> Iterator[WrittenFile]:
        """All subnet files."""
        if self.subnet_file is not None:
            yield self.subnet_file
        yield from self.earlier


def read(run_dir: Path) -> Footprint | None:
    """What is noted in `run_dir`; None if nothing is, or it cannot be understood. Raises OSError."""
    try:
        return _parse(json.loads((run_dir / STATE_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
        return None


def is_broken(run_dir: Path) -> bool:
    """Whether there is a note in `run_dir` that cannot be understood. Raises OSError."""
    return (run_dir / STATE_NAME).is_file() and read(run_dir) is None


def note(
    run_dir: Path,
    subnet_file: Path | None = None,
    content: str = "",
    *,
    device: str | None = None,
    firewall: str | None = None,
) -> None:
    """Note what is about to be made: `content` in `subnet_file`, `device`, the table `firewall`. Raises OSError.

    What is not given stays as noted. An empty `firewall` says that there is none any more.
    """
    noted = read(run_dir) or Footprint()
    current, earlier = noted.subnet_file, noted.earlier
    if subnet_file is not None:
        current = WrittenFile(subnet_file, content)
        earlier = tuple(one for one in noted.files() if one != current and one.is_as_written())
    made = Footprint(
        noted.device if device is None else device,
        noted.firewall if firewall is None else firewall or None,
        current,
        earlier,
    )
    write_whole(run_dir / STATE_NAME, json.dumps(_as_json(made)))


def remove(
    run_dir: Path, *, device: str | None = None, firewall: str | None = None, failures: list[str] | None = None
) -> list[str]:
    """Remove the noted subnet files that are still as noted, then the note; says what was removed.

    The last step of a cleanup: the note tells what else there is to remove. A `device` and a `firewall` that could not be
    removed stay noted, with the files that cannot be. What fails is added to `failures`; without that list it is raised, as
    OSError.
    """
    state = run_dir / STATE_NAME
    removed: list[str] = []
    left: list[WrittenFile] = []
    noted = read(run_dir)
    for file in noted.files() if noted is not None else ():
        try:
            if file.is_as_written():
                file.path.unlink()
                removed.append(str(file.path))
        except OSError as error:
            if failures is None:
                raise
            failures.append(f"cannot remove {file.path}: {error.strerror}")
            left.append(file)
    kept = Footprint(device, firewall, left[0] if left else None, tuple(left[1:]))
    if kept != Footprint() and run_dir.is_dir():
        write_whole(state, json.dumps(_as_json(kept)))
    elif state.is_file():
        state.unlink()
        removed.append(str(state))
    return removed


def remove_run_dir(run_dir: Path) -> list[str]:
    """Remove what else is ours in the run folder, and the folder if nothing is left; the caller holds its lock."""
    removed = []
    names = (STATE_NAME, IDENTITY_NAME)
    half_written = [path for name in names for path in run_dir.glob(f".{name}.*.tmp")]  # by one that was killed meanwhile
    for path in (run_dir / SOCKET_NAME, *half_written, run_dir / IDENTITY_NAME, run_dir / LOCK_NAME):
        if path.exists() or path.is_socket():
            path.unlink()
            removed.append(str(path))
    if not any(run_dir.iterdir()):
        run_dir.rmdir()
    return [one for one in removed if not one.endswith(LOCK_NAME)]


def _as_json(footprint: Footprint) -> dict[str, Any]:
    """As it stands in the file. `subnet_file` and `content` are flat, as older versions wrote and read them."""
    written = footprint.subnet_file
    return {
        "subnet_file": str(written.path) if written else None,
        "content": written.content if written else None,
        "device": footprint.device,
        "firewall": footprint.firewall,
        "earlier": [{"subnet_file": str(one.path), "content": one.content} for one in footprint.earlier],
    }


def _parse(noted: Any) -> Footprint:
    """Raises ValueError, KeyError or TypeError on nonsense."""
    if not isinstance(noted, dict):
        raise ValueError("the note is no object")
    return Footprint(
        _name(noted.get("device")),
        _name(noted.get("firewall")),
        _file(noted) if noted["subnet_file"] is not None else None,
        tuple(_file(one) for one in noted.get("earlier", ())),
    )


def _name(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise ValueError(f"{value!r} is not a name")
    return value


def _file(noted: Any) -> WrittenFile:
    if not isinstance(noted["content"], str):
        raise ValueError("the content of a file is text")
    return WrittenFile(Path(noted["subnet_file"]), noted["content"])
