"""`python -m launcher` is `launch`."""

from launcher.cli.main import main

main()
