"""`python -m docs_lib.examples`: how many blocks of the pages run here, by other tests, or not, and why not."""

from __future__ import annotations

from support.examples.pages import blocks, pages


def main() -> None:
    found = [block for _, page in sorted(pages().items()) for block in blocks(page)]
    runnable = [block for block in found if block.runnable]
    for block in runnable:
        if block.not_run:
            print(f"{block.place}: not run: {block.not_run}")
    here, elsewhere, never = (
        sum(1 for block in runnable if law(block))
        for law in (lambda b: b.run_here, lambda b: b.run_by, lambda b: b.not_run)
    )
    print(f"{here} blocks run with their page, {elsewhere} by other tests, {never} not")


if __name__ == "__main__":
    main()
