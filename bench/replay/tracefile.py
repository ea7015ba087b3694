"""``python -m bench trace NAME FILE``: write one of the synthetic captures, as large as one likes."""

from pathlib import Path

import click

from bench.replay.traces import TRACES, write


@click.command()
@click.argument("name", type=click.Choice(list(TRACES)))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--packets", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same file.")
def trace(name: str, file: Path, packets: int, seed: int) -> None:
    """Write a synthetic capture: imix, small (64-byte), bulk (TCP), flows, dual (stack), fragments or hostile."""
    try:
        write(file, name, seed, packets)
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    click.echo(f"{file}: {packets} packets: {TRACES[name].meaning}")
