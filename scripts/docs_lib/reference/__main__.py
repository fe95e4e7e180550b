"""`python -m docs_lib.reference [--check]`: write docs/reference from the code, or say which pages are out of date."""

from __future__ import annotations

import sys

from docs_lib.reference import stale, write


def main(arguments: list[str]) -> int:
    """Exit code 1 where `--check` finds a page that differs from the code."""
    check = arguments == ["--check"]
    changed = stale() if check else write()
    for name in changed:
        print(
            f"docs/reference/{name}: {'out of date: scripts/docs reference writes it again' if check else 'written'}"
        )
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
