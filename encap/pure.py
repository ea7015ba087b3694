"""Runs the hot modules from their ``.py`` files although compiled ones are installed.

Theory of operation: Python prefers ``table.cpython-….so`` to ``table.py`` in the same folder. A finder put before the
standard ones answers for the named modules alone, with the standard loader for source files. It must be in place before
the first hot module is imported, which is why ``encap/__init__.py`` asks for it: every import of this project passes
there first.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent.parent


class _SourceFinder:
    """Finds the named modules as source files, and nothing else."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = frozenset(modules)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        source = _ROOT.joinpath(*fullname.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, source)


def prefer_sources(modules: Sequence[str]) -> None:
    """From now on, import each of `modules` (dotted names) from its ``.py`` file."""
    sys.meta_path.insert(0, _SourceFinder(modules))


def is_compiled(module: ModuleType) -> bool:
    """Whether `module` runs as compiled code."""
    return not (module.__file__ or "").endswith(".py")
