"""`python -m coordinator`: the same as `evalspan`, for an interpreter whose scripts are not on the path."""

from coordinator.cli import main

main()
