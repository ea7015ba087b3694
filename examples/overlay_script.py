"""An overlay in a script, without pytest: how many pings are answered over a link that loses so many datagrams.

Run it with ``python examples/overlay_script.py``. A ping needs two datagrams, so of links that lose one in three fewer than
half of the pings come back.
"""

from dataplane.overlay import Overlay

PINGS = 400


def main() -> None:
    """Print the table."""
    print("loss  answered  expected    seconds")
    with Overlay(seed=1) as overlay:
        a, b = overlay.add_nodes(2)
        for percent in range(0, 101, 20):
            overlay.impair(a, b, loss=percent / 100, delay="5ms")
            started = overlay.now
            answered = sum(a.pings(b) for _ in range(PINGS))
            expected = (1 - percent / 100) ** 2
            print(f"{percent:3}% {answered / PINGS:9.1%} {expected:9.1%} {overlay.now - started:10.3f}")


if __name__ == "__main__":
    main()
