"""``python -m klb_probe``."""

from klb_probe.cli import main

main()
