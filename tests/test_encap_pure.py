"""encap/pure.py, HOT_MODULES and faults: which file a hot module runs from, and that both give the same answers."""

import ast
import importlib
import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import encap
from encap import faults, icmp, pure
from encap.faults import Fault

ROOT = Path(encap.__file__).resolve().parent.parent
PURE = bool(os.environ.get("PYFLANNEL_DP_PURE"))


def source_of(name: str) -> Path:
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def has_compiled(name: str) -> bool:
    source = source_of(name)
    return any(source.parent.glob(f"{source.stem}.*.so")) or any(source.parent.glob(f"{source.stem}.*.pyd"))


def run(program: str, pure_mode: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYFLANNEL_DP_PURE"}
    if pure_mode is not None:
        environment["PYFLANNEL_DP_PURE"] = pure_mode
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", encap.HOT_MODULES)
def test_hot_module_has_a_source_and_c_types(name):
    assert source_of(name).is_file()
    assert source_of(name).with_suffix(".pxd").is_file()


def test_every_module_with_c_types_is_hot():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("encap", "routing", "dataplane", "bench")
        for path in (ROOT / folder).rglob("*.pxd")
        if path.stem != "__init__"
    }
    inline_in_the_others = {"encap.fields", "encap.checksum", "dataplane.syscalls"}
    assert found == set(encap.HOT_MODULES) | inline_in_the_others


def test_hot_modules_are_listed_once_and_as_setup_can_read_them():
    assert len(set(encap.HOT_MODULES)) == len(encap.HOT_MODULES)
    (value,) = (
        node.value
        for node in ast.parse((ROOT / "encap" / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "HOT_MODULES"
    )
    assert ast.literal_eval(value) == encap.HOT_MODULES


@pytest.mark.parametrize("name", encap.HOT_MODULES)
def test_hot_module_runs_from_the_file_that_was_asked_for(name):
    module = importlib.import_module(name)
    assert pure.is_compiled(module) is (has_compiled(name) and not PURE)
    if PURE:
        assert Path(module.__file__) == source_of(name)


def test_other_modules_are_not_compiled():
    assert not pure.is_compiled(icmp)
    assert not pure.is_compiled(encap)


@pytest.mark.parametrize(
    ("file", "expected"),
    [("/x/table.cpython-311-x86_64-linux-gnu.so", True), ("/x/table.pyd", True), ("/x/table.py", False)],
)
def test_is_compiled(file, expected):
    module = ModuleType("table")
    module.__file__ = file
    assert pure.is_compiled(module) is expected


FILES = """
import importlib, encap
from encap import pure
for name in encap.HOT_MODULES:
    print(name, pure.is_compiled(importlib.import_module(name)))
"""


@pytest.mark.parametrize(("variable", "wanted"), [(None, True), ("", True), ("1", False)])
def test_environment_variable_chooses(variable, wanted):
    expected = {name: str(wanted and has_compiled(name)) for name in encap.HOT_MODULES}
    assert dict(line.split() for line in run(FILES, variable).splitlines()) == expected


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A folder that pure takes for the project's, holding one package; sys.meta_path and sys.modules are put back."""
    package = tmp_path / "standin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "hot.py").write_text("ORIGIN = __file__\n")
    (package / "cold.py").write_text("ORIGIN = __file__\n")
    monkeypatch.setattr(pure, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "standin"]:
        del sys.modules[name]


def test_prefer_sources_answers_first_and_for_the_named_modules_alone(stand_in):
    before = sys.meta_path.copy()
    pure.prefer_sources(["standin.hot"])
    assert sys.meta_path[1:] == before
    finder = sys.meta_path[0]
    spec = finder.find_spec("standin.hot")
    assert (spec.name, Path(spec.origin)) == ("standin.hot", stand_in / "hot.py")
    for other in ("standin", "standin.cold", "hot", "standin.hot.more", "os"):
        assert finder.find_spec(other) is None
    assert str(stand_in / "hot.py") == importlib.import_module("standin.hot").ORIGIN
    assert str(stand_in / "cold.py") == importlib.import_module("standin.cold").ORIGIN


def test_prefer_sources_of_a_file_that_is_not_there(stand_in):
    pure.prefer_sources(["standin.gone"])
    with pytest.raises(FileNotFoundError):
        importlib.import_module("standin.gone")


def test_prefer_sources_wins_over_a_compiled_module(stand_in):
    # an extension module of that name that cannot be loaded, so that a wrong choice is heard
    (stand_in / f"hot{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    importlib.invalidate_caches()
    with pytest.raises(ImportError):
        importlib.import_module("standin.hot")
    pure.prefer_sources(["standin.hot"])
    assert pure.is_compiled(importlib.import_module("standin.hot")) is False


# The same questions put to both; the answers must be the same, number by number

QUESTIONS = """
import random
from encap import checksum, fields, ip, vnet, vxlan
draw = random.Random(7348)
for number in range(1500):
    buf = bytearray(draw.randbytes(draw.randrange(64, 128)))
    if number % 3 == 0:
        buf = bytearray([draw.choice([0, 255, 128])] * len(buf))
    at = draw.randrange(8)
    version = draw.choice([0x45, 0x46, 0x4F, 0x60, 0x44, 0x50])
    buf[at] = version
    length = len(buf) - at
    if draw.random() < 0.8:
        stated = length if version >> 4 == 4 else length - 40
        where = at + (2 if version >> 4 == 4 else 4)
        buf[where : where + 2] = stated.to_bytes(2, "big", signed=stated < 0)
        buf[at + (9 if version >> 4 == 4 else 6)] = draw.choice([0, 1, 6, 17, 44, 58, 60])
        buf[at + 6] &= draw.choice([0, 0x40, 0xFF]) if version >> 4 == 4 else 0xFF
    view = bytes(buf)
    fault = ip.check(view, at, length)
    print(number, fault, ip.stated_length(view, at, length), checksum.add(view, at, length, 2**48), end=" ")
    print(fields.load16(view, at), fields.load32(view, at), fields.load64(view, at), end=" ")
    print(checksum.internet_checksum(view, at, length), checksum.pseudo_sum(view, at, 32, 17, length), end=" ")
    print(checksum.replace_word(*(draw.randrange(65536) for _ in range(3))), checksum.fold(draw.getrandbits(64)), end=" ")
    mac = int.from_bytes(view[at + 8 : at + 14], "big")
    print(vxlan.check(view, at, length, int.from_bytes(view[at + 4 : at + 7], "big"), mac, 0), end=" ")
    print(vxlan.check(view, at, draw.randrange(length), 1, 0, (1 << 48) - 1), end=" ")
    if fault == 0:
        print(bool(ip.is_fragment(view, at)), ip.flow_hash(view, at, length), end=" ")
        print(ip.partial_checksum(view, at, length), end=" ")
        if ip.ttl(view, at):
            ip.decrement_ttl(buf, at)
        print(ip.ttl(buf, at), end=" ")
    if version >> 4 == 4 and (version & 15) * 4 >= 20:
        checksum.write_ipv4_header_checksum(buf, at, min(length, (version & 15) * 4))
    checksum.finish(buf, at, len(buf), at + 16)
    vnet.store(buf, at + 30, *(draw.randrange(256) for _ in range(2)), *(draw.randrange(65536) for _ in range(4)))
    print(*vnet.parse(buf, at + 30), buf.hex())
"""


@pytest.mark.skipif(not all(has_compiled(name) for name in encap.HOT_MODULES), reason="nothing compiled to compare with")
def test_compiled_and_source_give_the_same_answers():
    compiled, source = run(QUESTIONS, None).splitlines(), run(QUESTIONS, "1").splitlines()
    assert len(compiled) == 1500
    assert sum(line.split()[1] == "0" for line in source) > 300  # enough of them were good packets
    assert compiled == source


def test_fault_numbers_are_those_of_the_dataplane():
    from dataplane.verdict import Verdict

    assert faults.OK == 0
    assert {fault.name: int(fault) for fault in Fault} == {
        "BAD_OFFLOAD": 8,
        "NOT_IP": 2,
        "TRUNCATED": 3,
        "BAD_LENGTH": 4,
        "BAD_FLAGS": 5,
        "WRONG_VNI": 6,
        "WRONG_MAC": 7,
    }
    assert {fault.name: int(fault) for fault in Fault}.items() <= {
        verdict.name: int(verdict) for verdict in Verdict
    }.items()
