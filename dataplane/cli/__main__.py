"""``python -m dataplane.cli`` is ``pyflannel-dp``."""

from dataplane.cli import main

main()
