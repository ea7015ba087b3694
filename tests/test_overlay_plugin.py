"""The pytest plugin, by pytest's own means: as it is here, and from a wheel in an environment of its own without rights."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import encap

pytest_plugins = ["pytester"]

ROOT = Path(encap.__file__).resolve().parent.parent


@pytest.fixture
def run(pytester):
    def run(test: str, *options: str):
        pytester.makepyfile(test)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:asyncio", *options)

    return run


def test_the_marker_makes_the_overlay(run):
    result = run("""
        import pytest

        @pytest.mark.overlay(nodes=3, link="delay=10ms", framing="ip", seed=9)
        def test_one(overlay):
            a, b, c = overlay.nodes
            assert overlay.run(a.ping(c)) == pytest.approx(0.020)
            assert (overlay.framing, overlay.seed) == ("ip", 9)

        @pytest.mark.underlay(mtu=1400, link="loss=100%")
        def test_other(underlay):
            assert underlay.path_mtu("192.0.2.1", "192.0.2.2") == 1400
            assert underlay.link_spec("a", "b").loss == 1.0

        @pytest.mark.overlay(nodes=1)
        class TestClosestMarkerWins:
            @pytest.mark.overlay(nodes=2)
            def test_method(self, overlay):
                assert len(overlay.nodes) == 2

            def test_class(self, overlay):
                assert len(overlay.nodes) == 1
    """)
    result.assert_outcomes(passed=4)


FAILING = """
    import pytest

    @pytest.mark.overlay(nodes=2)
    def test_it(overlay):
        a, b = overlay.nodes
        assert a.pings(b)
        overlay.partition(a, b)
        assert a.pings(b), "not any more"
"""


def test_a_failure_tells_the_seed_the_counters_and_where_the_datagrams_are(run, pytester):
    result = run(FAILING, f"--basetemp={pytester.path / 'out'}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "*- overlay -*",
        "seed *, 1.000000 s, 3 datagrams sent, 0 on their way, 1 stopped by partitions",
        "node1: 10.0.1.0-24 at 198.18.0.1",
        "*outbound: forwarded 2",
        "*inbound: forwarded 1",
        "node2: 10.0.2.0-24 at 198.18.0.2",
        "repeat it with --overlay-seed *",
        "3 datagrams that crossed the underlay are in *underlay.pcapng",
    ])  # fmt: skip
    (path,) = (pytester.path / "out").rglob("underlay.pcapng")
    command = ["tshark", "-n", "-r", path, "-d", "udp.port==8472,vxlan"]
    command += ["-T", "fields", "-e", "icmp.type", "-e", "frame.comment"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["8\tarrived after 0.000 ms", "0\tarrived after 0.000 ms", "8\tpartition"]


def test_the_seed_follows_from_the_test_and_can_be_set(run, pytester):
    seeds = []
    for options in ([], [], ["--overlay-seed", "77"]):
        lines = run(FAILING, *options).stdout.lines
        seeds.append(next(line for line in lines if line.startswith("repeat it with")))
    assert seeds[0] == seeds[1]
    assert seeds[2] == "repeat it with --overlay-seed 77"
    assert seeds[0] != seeds[2]


def test_the_seed_of_the_command_line_is_stronger_than_a_markers(run):
    test = """
        import pytest

        @pytest.mark.overlay(seed=9)
        def test_it(overlay):
            print("seed", overlay.seed)

        @pytest.mark.underlay(seed=9)
        def test_other(underlay):
            print("seed", underlay.seed)
    """
    assert run(test, "-s").stdout.str().count("seed 9") == 2
    assert run(test, "-s", "--overlay-seed=77").stdout.str().count("seed 77") == 2


UNDERLAY = """
    import asyncio
    import time
    import pytest
    from dataplane.underlay.fake import Datagram

    @pytest.mark.underlay(link="delay=20ms")
    def test_it(underlay):
        underlay.attach(9, "192.0.2.1")
        receiver = underlay.attach(9, "192.0.2.2")
        started = time.monotonic()
        underlay.send(Datagram("192.0.2.1", "192.0.2.2", 9, b"one"))
        underlay.run(0.010)
        assert len(receiver.queue) == 0
        underlay.settle()
        assert receiver.queue.take().payload == b"one"
        waiting = underlay.loop.create_task(asyncio.Event().wait())
        print("took", "long" if time.monotonic() - started >= 0.020 else "no time")
"""


def test_the_underlay_has_a_loop_so_that_delays_work(run):
    for option, took in (("--overlay-clock=virtual", "took no time"), ("--overlay-clock=real", "took long")):
        result = run(UNDERLAY, "-s", "-W", "error", option)
        result.assert_outcomes(passed=1)
        assert took in result.stdout.str()


def test_the_underlay_takes_the_time_of_a_coroutines_loop(pytester):
    pytester.makepyfile("""
        import asyncio
        import pytest
        from dataplane.underlay.fake import Datagram

        @pytest.mark.asyncio
        @pytest.mark.underlay(link="delay=1ms")
        async def test_it(underlay):
            receiver = underlay.attach(9, "192.0.2.2")
            underlay.send(Datagram("192.0.2.1", "192.0.2.2", 9, b"one"))
            await asyncio.sleep(0.005)
            assert len(receiver.queue) == 1
    """)
    scope = "asyncio_default_fixture_loop_scope=function"
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "-o", scope).assert_outcomes(passed=1)


def test_what_fails_in_a_task_is_an_error_of_the_test(run):
    result = run("""
        def test_it(overlay):
            async def fail():
                raise LookupError("the server is gone")

            overlay.kept = overlay.loop.create_task(fail())
            overlay.run(1)
    """)
    result.assert_outcomes(passed=1, errors=1)
    assert "the server is gone" in result.stdout.str()
    result = run("""
        def test_it(overlay):
            overlay.loop.call_later(0.01, lambda: 1 // 0)
            overlay.run(0.1)
    """, "--overlay-clock=real")  # fmt: skip
    result.assert_outcomes(passed=1, errors=1)


def test_a_test_that_passes_writes_nothing(run, pytester):
    run("def test_it(overlay): overlay.add_nodes(2)", f"--basetemp={pytester.path / 'out'}").assert_outcomes(passed=1)
    assert not list((pytester.path / "out").rglob("*.pcapng"))


def test_the_same_test_on_the_real_clock(run):
    test = """
        import time
        import pytest

        @pytest.mark.overlay(nodes=2, link="delay=20ms")
        def test_it(overlay):
            a, b = overlay.nodes
            started = time.monotonic()
            assert overlay.run(a.ping(b)) >= 0.040
            print("took", "long" if time.monotonic() - started >= 0.040 else "no time")
    """
    assert "took no time" in run(test, "-s").stdout.str()
    result = run(test, "-s", "--overlay-clock=real")
    result.assert_outcomes(passed=1)
    assert "took long" in result.stdout.str()


def test_nonsense_in_a_marker_is_an_error_of_its_test(run):
    result = run("""
        import pytest

        @pytest.mark.overlay(2)
        def test_it(overlay):
            pass

        @pytest.mark.overlay(link="loss=much")
        def test_other(overlay):
            pass
    """)
    result.assert_outcomes(errors=2)
    text = result.stdout.str()
    assert "the marker overlay takes keywords only" in text
    assert "'much'" in text


def test_the_markers_are_explained(run):
    result = run("", "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.overlay(nodes=0, *", "@pytest.mark.underlay(*"])


@pytest.mark.skipif(
    shutil.which("unshare") is None, reason="giving up all rights needs unshare (Debian package util-linux)"
)
def test_from_a_wheel_in_an_environment_of_its_own_without_rights(tmp_path):
    """As somebody installs it for this alone: no checkout, no root. The dependencies are those installed here."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    test = tmp_path / "mine" / "test_mine.py"
    test.parent.mkdir()
    test.write_text(
        "import os, dataplane.overlay, pytest\n"
        "@pytest.mark.overlay(nodes=2)\n"
        "def test_it(overlay):\n"
        "    assert 'env' in dataplane.overlay.__file__, dataplane.overlay.__file__\n"
        "    assert os.geteuid() != 0\n"
        "    a, b = overlay.nodes\n"
        "    assert a.pings(b)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        ["unshare", "--user", tmp_path / "env" / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=test.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr
