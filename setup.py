"""Builds the hot modules; everything else about the package is in pyproject.toml.

The hot modules are ordinary Python that Cython compiles with the C types in the .pxd beside each. All are optional: where
there is no C compiler the installation succeeds without them and the same files run uncompiled.
"""

import ast
import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup


def hot_modules() -> tuple[str, ...]:
    """HOT_MODULES of encap/__init__.py; read, not imported, since an isolated build cannot import the package."""
    tree = ast.parse(Path("encap/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "HOT_MODULES":
            names: tuple[str, ...] = ast.literal_eval(node.value)
            return names
    raise SystemExit("encap/__init__.py has no HOT_MODULES")


def types_changed() -> bool:
    """Whether a .pxd is newer than what was made last: Cython does not see that a module depends on another's inline C."""
    sources = [Path("build/cython", name.replace(".", "/") + ".c") for name in hot_modules()]
    made = [path.stat().st_mtime for path in sources if path.exists()]
    folders = ("encap", "routing", "dataplane", "bench")
    types = [path.stat().st_mtime for folder in folders for path in Path(folder).rglob("*.pxd")]
    return bool(made) and max(types) > min(made)


DIRECTIVES = {
    "language_level": "3",
    "annotation_typing": False,  # the C types are in the .pxd files; annotations are for people and mypy
    "boundscheck": True,  # a wrong offset must raise, not read somebody else's packet
    "wraparound": False,
    "cdivision": False,
}

setup(
    ext_modules=cythonize(
        [
            Extension(name, [name.replace(".", "/") + ".py"], optional=True, extra_compile_args=["-g0"])
            for name in hot_modules()
        ],
        compiler_directives=DIRECTIVES,
        force=types_changed(),
        build_dir="build/cython",
    ),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
