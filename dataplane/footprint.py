"""What a node leaves on disk while it runs, noted so that ``cleanup`` removes that and nothing else.

The run folder holds ``state.json``, which names the subnet file that the node wrote and what it wrote there. A subnet file
with other content is somebody else's by now and stays.
"""

import json
from pathlib import Path

from dataplane.control import LOCK_NAME, SOCKET_NAME
from routing.durable import write_whole

STATE_NAME = "state.json"


def note(run_dir: Path, subnet_file: Path, content: str) -> None:
    """Note that `content` is about to be written to `subnet_file`. Raises OSError."""
    write_whole(run_dir / STATE_NAME, json.dumps({"subnet_file": str(subnet_file), "content": content}))


def remove(run_dir: Path) -> list[str]:
    """Remove the noted subnet file if it is still as noted, then the note; says what was removed. Raises OSError."""
    state = run_dir / STATE_NAME
    try:
        noted = json.loads(state.read_text(encoding="utf-8"))
        subnet_file, content = Path(noted["subnet_file"]), noted["content"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, KeyError, TypeError):
        state.unlink()
        return [str(state)]
    removed = []
    if subnet_file.is_file() and subnet_file.read_text(encoding="utf-8", errors="replace") == content:
        subnet_file.unlink()
        removed.append(str(subnet_file))
    state.unlink()
    return [*removed, str(state)]


def remove_run_dir(run_dir: Path) -> list[str]:
    """Remove what else is ours in the run folder, and the folder if nothing is left; the caller holds its lock."""
    removed = []
    for name in (SOCKET_NAME, LOCK_NAME):
        path = run_dir / name
        if path.exists() or path.is_socket():
            path.unlink()
            removed.append(str(path))
    if not any(run_dir.iterdir()):
        run_dir.rmdir()
    return [one for one in removed if not one.endswith(LOCK_NAME)]
