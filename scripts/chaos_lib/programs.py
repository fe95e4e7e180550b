"""Rows of the task in programs.yaml, copied beside it: small programs, some of which sleep, fail or hang."""

import datasets

KINDS = ("f(1) >= 1", "f(1) == -1", "f('') == 0", "f(1) >= 1", "f(None) or True")


def load(*, number: int, documents: int, **_metadata: object) -> dict[str, datasets.Dataset]:
    made = []
    for document in range(documents):
        place = number * documents + document
        body = f"    import time; time.sleep({place % 6 / 10})\n    return x + {place % 9}\n"
        if place % 40 == 5:
            body = "    while x: pass\n"
        name = f"f{number}_{document}"
        test = f"def check(f):\n    assert {KINDS[place % len(KINDS)]}\n"
        made.append({"prompt": f"def {name}(x):\n{body}# ", "test": test, "entry_point": name})
    return {"test": datasets.Dataset.from_list(made)}
