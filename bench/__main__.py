"""``python -m bench``: all measurements, or one kind of them."""

import subprocess
import sys
from pathlib import Path

import click

from bench.etcdscale import etcdscale
from bench.overlay import overlay
from bench.profile import profile
from bench.replay.command import replay
from bench.replay.tracefile import trace
from bench.soak import soak
from bench.startup import startup
from bench.throughput.command import throughput
from bench.upgrade import upgrade


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure: without a command the microbenchmarks, then start-up, then throughput."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(kernels)
        ctx.invoke(startup)
        ctx.invoke(throughput)


@bench.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1)
def kernels(arguments: tuple[str, ...] = ()) -> None:
    """Microbenchmarks of the hot functions; ARGUMENTS go to pytest-benchmark."""
    folder = Path(__file__).parent / "kernels"
    if not folder.is_dir():
        raise click.ClickException(
            "the microbenchmarks are not installed with the program: run ./dev bench kernels in a checkout"
        )
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "--benchmark-columns=min,median,ops", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


for one in (startup, throughput, profile, soak, upgrade, etcdscale, overlay, replay, trace):
    bench.add_command(one)

if __name__ == "__main__":
    bench(prog_name="python -m bench")
