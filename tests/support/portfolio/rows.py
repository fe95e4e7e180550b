"""Drawn rows of the portfolio's data sets: the columns that each lm-eval task reads, in words without meaning.

Rule: a row is a function of data set, configuration, split and number, so each run draws the same. `WORDS` is the
length of a document's main text; it follows the prior's prompt tokens of that data set.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from priors import sizes

Row = dict[str, Any]
WORDS = """
the a one this river lake stone water small old green light paper house morning child teacher road market number
city garden winter letter answer people money music glass bread horse window table simple early quiet between
under after before because often never always again along with from into over near and or but is was are were
has had made took gave found kept went came saw said thought asked wrote built opened moved
"""
VOCABULARY = WORDS.split()
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
LETTERS = "ABCDEFGHIJ"
UNKNOWN = "Not known"  # BBQ's answer that accuses no group


class Draw(random.Random):
    """Draws of one row; `words`: the length of its main text; `number`: its place in the split."""

    words: int
    number: int
    config: str

    def text(self, count=None):
        """A sentence of so many words, by default a main text."""
        words = self.choices(VOCABULARY, k=max(2, count or self.words))
        return " ".join(words).capitalize() + "."

    def phrase(self, count=3):
        return " ".join(self.choices(VOCABULARY, k=count))

    def phrases(self, number, count=3):
        """So many different phrases."""
        return [f"{self.phrase(count)} {index + 1}" for index in range(number)]

    def pick(self, count):
        return self.randrange(count)

    def letter(self, count=4):
        return LETTERS[self.pick(count)]


def _options(r, keys, count=5):
    return dict(zip(keys.split(), r.phrases(len(keys.split()), count), strict=True))


def _ai2(r, stem):
    return {stem: r.text(), "choices": {"text": r.phrases(4), "label": list("ABCD")}, "answerKey": r.letter()}


def _pair(r, first="sentence1", second="sentence2", labels=2):
    return {first: r.text(), second: r.text(10), "label": r.pick(labels)}


def _blank(r):
    sentence = f"{r.phrase(6)} _ {r.phrase(8)}."
    return {"sentence": sentence, "option1": "Ada", "option2": "Ben", "answer": str(1 + r.pick(2))}


def _copa(r):
    question = r.choice(["cause", "effect"])
    return {"premise": r.text(8), **_options(r, "choice1 choice2"), "question": question, "label": r.pick(2)}


def _wsc273(r):
    before, after = r.text(6)[:-1], r.phrase(5)
    text = f"Ada met Ben. {before} and they {after}."
    return {"text": text, "pronoun": "they", "pronoun_loc": text.index("they"), "options": ["Ada", "Ben"]} | {
        "label": r.pick(2)
    }


def _race(r):
    problems = [{"question": r.text(8), "answer": r.letter(), "options": r.phrases(4)} for _ in range(3)]
    return {"article": r.text(), "problems": repr(problems)}


def _drop(r):
    answer = {"number": str(r.pick(90)), "date": {"day": "", "month": "", "year": ""}, "spans": [r.phrase()]}
    others = {"number": [""], "date": [answer["date"]], "spans": [[r.phrase()]]}
    asked = {"passage": r.text(), "question": r.text(9), "query_id": f"q{r.number}"}
    return {**asked, "answer": answer, "validated_answers": others}


def _bbq(r):
    groups = r.sample(["old", "nonOld"], 2)
    asked = {"context": r.text(), "question": r.text(6), **_options(r, "ans0 ans1", 2), "ans2": UNKNOWN}
    info = {"ans0": ["x", groups[0]], "ans1": ["y", groups[1]], "ans2": ["z", "unknown"]}
    kind = {
        "context_condition": ("ambig", "disambig")[r.number % 2],
        "question_polarity": ("neg", "nonneg")[r.pick(2)],
    }
    label = 2 if kind["context_condition"] == "ambig" else r.pick(2)
    return {**asked, **kind, "category": "Age", "label": label} | {
        "answer_info": info,
        "additional_metadata": {
            "stereotyped_groups": ["old"],
            "subcategory": "None",
            "version": "a",
            "source": "s",
        },
    }


def _ethics(r):
    by = {
        "commonsense": {"input": r.text()},
        "deontology": {"scenario": r.text(), "excuse": r.text(8)},
        "justice": {"scenario": r.text()},
        "virtue": {"scenario": r.text(), "trait": r.choice(VOCABULARY)},
        "utilitarianism": {"activity": r.text(), "baseline": r.text()},
    }
    return {**by[r.config], "label": r.pick(2)}


def _super_glue(r):
    by = {
        "boolq": lambda: {"passage": r.text(), "question": r.phrase(8), "label": r.pick(2)},
        "multirc": lambda: {
            "paragraph": r.text(),
            "question": r.text(9),
            "answer": r.phrase(),
            "label": r.pick(2),
        },
        "copa": lambda: _copa(r),
    }
    return by[r.config]()


def _glue(r):
    return _pair(r, "question", "sentence") if r.config == "qnli" else _pair(r)


def _truthful(r):
    right, wrong = r.phrases(3, 6), r.phrases(3, 7)
    if r.config == "generation":
        return {
            "question": r.text(9),
            "correct_answers": right,
            "incorrect_answers": wrong,
            "best_answer": right[0],
        }
    targets = {"choices": [*right, *wrong], "labels": [1, 1, 1, 0, 0, 0]}
    return {"question": r.text(9), "mc1_targets": targets, "mc2_targets": targets}


def _sum(r, question="question", answer="answer"):
    one, two = 2 + r.pick(90), 2 + r.pick(90)
    text = f"{r.text()} There are {one} and {two}. How many are there?"
    return {question: text, answer: f"We add {one} and {two}.\n#### {one + two}"}


def _maths(r):
    one, two = 2 + r.pick(90), 2 + r.pick(90)
    return {"problem": f"{r.text()} ${one}+{two}$?", "solution": f"It is $\\boxed{{{one + two}}}$."} | {
        "level": "1"
    }


def _program(r):
    add, name = 1 + r.pick(9), f"add_{r.number}"
    prompt = f'def {name}(x):\n    """Add {add} to x. {r.text()}"""\n'
    test = f"def check(candidate):\n    assert candidate(1) == {1 + add}\n    assert candidate(-5) == {add - 5}\n"
    solution = f"    return x + {add}\n"
    return {"task_id": f"T/{r.number}", "prompt": prompt, "canonical_solution": solution, "test": test} | {
        "entry_point": name
    }


def _mbpp(r):
    add, name = 1 + r.pick(9), f"add_{r.number}"
    tests = [f"assert {name}({x}) == {x + add}" for x in (1, 2, -5)]
    text = f"Write a function {name} that adds {add} to a number. {r.text()}"
    code = f"def {name}(x):\n    return x + {add}"
    return {"task_id": r.number, "text": text, "prompt": text, "code": code, "test_list": tests}


def _ifeval(r):
    keys = ("num_words", "relation", "keywords", "forbidden_words", "end_phrase")
    asked = r.choice([{"relation": "at least", "num_words": 9}, {"relation": "less than", "num_words": 9}])
    kinds = ["length_constraints:number_words", "punctuation:no_comma"]
    kwargs = [{key: asked.get(key) for key in keys}, dict.fromkeys(keys)]
    return {"key": r.number, "prompt": r.text(), "instruction_id_list": kinds, "kwargs": kwargs}


def _mathqa(r):
    options = " , ".join(f"{letter} ) {r.pick(900)}" for letter in "abcde")
    return {"Problem": r.text(), "options": options, "correct": r.choice("abcde"), "Rationale": r.text(5)}


def _gpqa(r):
    wrong = _options(r, "first second third")
    row = {f"Incorrect Answer {number + 1}": text for number, text in enumerate(wrong.values())}
    return {"Question": r.text(), "Correct Answer": r.phrase(6), **row}


def _xnli(r):
    return _pair(r, "premise", "hypothesis", 3)


def _story(r):
    told = {f"input_sentence_{number}": r.text(9) for number in range(1, 5)}
    return {
        **told,
        "sentence_quiz1": r.text(7),
        "sentence_quiz2": r.text(7),
        "answer_right_ending": 1 + r.pick(2),
    }


def _qa4mre(r):
    answers = {"answer_id": [str(n) for n in range(1, 6)], "answer_str": r.phrases(5)}
    asked = {"document_str": r.text(), "question_str": r.text(8), "answer_options": answers}
    return {**asked, "correct_answer_id": str(1 + r.pick(5))}


def _lettered(r, question="question", answer="answer"):
    return {question: r.text(), **_options(r, "A B C D"), answer: r.letter()}


SUBJECTS = """
biology business chemistry computer_science economics engineering health history law math other philosophy physics psychology
"""


def _mmlu_pro(r):
    subjects = SUBJECTS.split()
    about = {"category": subjects[r.number % len(subjects)].replace("_", " "), "question": r.text()}
    cot = f"A: Let's think step by step. {r.text(20)} The answer is ({r.letter(10)})."
    return {**about, "options": r.phrases(10), "answer": r.letter(10), "cot_content": cot}


class Kind(NamedTuple):
    """A data set: its splits, how a row is drawn, its rows in a split that is scored, and the prior with its length."""

    splits: str
    draw: Callable[[Draw], Row]
    rows: int = 24
    prior: str = ""  # name in the table of sizes, if the lm-eval task's own name has no row
    shots: int = 12  # rows of a split that gives few-shot examples


T, TV, TVT = "test", "train validation", "train validation test"
KINDS = {
    "Rowan/hellaswag": Kind(TV, lambda r: {"ctx_a": r.text(), "ctx_b": r.phrase(4), "activity_label": r.phrase(2),
        "endings": r.phrases(4, 9), "label": str(r.pick(4))}, prior="hellaswag"),
    "baber/piqa": Kind(TV, lambda r: {"goal": r.text(), **_options(r, "sol1 sol2", 12), "label": r.pick(2)},
        prior="piqa"),
    "lighteval/siqa": Kind(TV, lambda r: {"context": r.text(), "question": r.text(6),
        **_options(r, "answerA answerB answerC"), "label": str(1 + r.pick(3))}, prior="siqa"),
    "allenai/winogrande": Kind(TV, _blank),
    "allenai/openbookqa": Kind(TVT, lambda r: _ai2(r, "question_stem"), prior="openbookqa"),
    "tau/commonsense_qa": Kind(TV, lambda r: {"question": r.text(12),
        "choices": {"text": r.phrases(5), "label": list("ABCDE")}, "answerKey": r.letter(5)}),
    "allenai/ai2_arc": Kind(TVT, lambda r: _ai2(r, "question"), prior="arc_challenge"),
    "aps/super_glue": Kind(TV, _super_glue),
    "lighteval/winograd_wsc": Kind(T, _wsc273),
    "allenai/swag": Kind(TV,
        lambda r: {"startphrase": r.text(12), **_options(r, "ending0 ending1 ending2 ending3", 8), "label": r.pick(4)}),
    "baber/logiqa2": Kind(TVT,
        lambda r: {"text": r.text(70), "question": r.text(12), "options": r.phrases(4, 9), "answer": r.pick(4)}),
    "SaylorTwift/bbh": Kind(T, lambda r: {"input": r.text(30), "target": r.phrase(1)}, 1),
    "Muennighoff/babi": Kind("train valid test",
        lambda r: {"passage": "".join(f"{r.choice(NAMES)} {r.phrase(5)}.\n" for _ in range(8)), "question": r.text(6),
        "answer": r.choice(VOCABULARY)}),
    "facebook/anli": Kind(" ".join(f"{part}_r{n}" for n in (1, 2, 3) for part in ("train", "dev", "test")), _xnli, 8),
    "cais/mmlu": Kind("test dev", lambda r: {"question": r.text(40), "choices": r.phrases(4), "answer": r.pick(4)}, 1),
    "TIGER-Lab/MMLU-Pro": Kind("test validation", _mmlu_pro, 28, shots=84),
    "google-research-datasets/nq_open": Kind(TV, lambda r: {"question": r.phrase(9), "answer": r.phrases(2)}),
    "mandarjoshi/trivia_qa": Kind(TV, lambda r: {"question": r.phrase(14), "answer": {"aliases": r.phrases(3, 2)}}),
    "allenai/sciq": Kind(TVT, lambda r: {"support": r.text(), "question": r.text(12),
        **_options(r, "distractor1 distractor2 distractor3 correct_answer", 2)}, prior="sciq"),
    "stanfordnlp/web_questions": Kind("train test", lambda r: {"question": r.text(8), "answers": r.phrases(2)}),
    "Idavidrein/gpqa": Kind("train", _gpqa, prior="gpqa_main_zeroshot"),
    "GBaker/MedQA-USMLE-4-options-hf": Kind(TVT,
        lambda r: {"sent1": r.text(90), **_options(r, "ending0 ending1 ending2 ending3"), "label": r.pick(4)}),
    "openlifescienceai/medmcqa": Kind(TV,
        lambda r: {"question": r.text(20), **_options(r, "opa opb opc opd"), "cop": r.pick(4)}),
    "bigbio/pubmed_qa": Kind(TVT, lambda r: {"QUESTION": r.text(14), "CONTEXTS": [r.text(60), r.text(60)],
        "final_decision": r.choice(["yes", "no", "maybe"])}),
    "hails/agieval": Kind(T, lambda r: {"query": r.text(), "choices": r.phrases(4), "gold": [r.pick(4)],
        "answer": str(r.pick(90))}, 4, prior="agieval_mc"),
    "EleutherAI/headqa": Kind(TVT, lambda r: {"qtext": r.text(18),
        "answers": [{"aid": n, "atext": r.phrase()} for n in range(1, 5)], "ra": 1 + r.pick(4)}),
    "nyu-mll/glue": Kind(TV, _glue),
    "EleutherAI/race": Kind(T, _race, prior="race_high"),
    "EleutherAI/drop": Kind(TV, _drop, prior="squad2"),
    "hazyresearch/based-squad": Kind("validation", lambda r: {"text": r.text(), "value": r.phrase(2)}, prior="squad2"),
    "community-datasets/qa4mre": Kind("train", _qa4mre, 8, prior="race_high"),
    "EleutherAI/lambada_openai": Kind(T, lambda r: {"text": r.text()[:-1]}, prior="lambada"),
    "nyu-mll/blimp": Kind("train", lambda r: {"sentence_good": r.text(8), "sentence_bad": r.text(8)}, 1),
    "openai/gsm8k": Kind("train test", _sum),
    "qintongli/GSM-Plus": Kind(T, lambda r: _sum(r, answer="solution")),
    "EleutherAI/hendrycks_math": Kind("train test", _maths, 4),
    "EleutherAI/asdiv": Kind("validation",
        lambda r: {"body": r.text(20), "question": r.text(8), "answer": f"{r.pick(90)} (pieces)"}),
    "regisss/math_qa": Kind(TVT, _mathqa),
    "juletxara/mgsm": Kind("train test",
        lambda r: {"question": r.text(35), "answer": None, "answer_number": r.pick(90), "equation_solution": None}, 2),
    "openai/openai_humaneval": Kind(T, _program),
    "evalplus/humanevalplus": Kind(T, _program),
    "google-research-datasets/mbpp": Kind(T, _mbpp),
    "evalplus/mbppplus": Kind(T, _mbpp),
    "cambridgeltl/xcopa": Kind("validation test", _copa, 3),
    "facebook/xnli": Kind(TV, _xnli, 2),
    "Muennighoff/xwinograd": Kind(T, _blank, 4),
    "google-research-datasets/paws-x": Kind(TVT, _pair, 4),
    "juletxara/xstory_cloze": Kind("train eval", _story, 3),
    "ceval/ceval-exam": Kind("val dev", _lettered, 1, shots=5),
    "haonan-li/cmmlu": Kind("test dev", lambda r: _lettered(r, "Question", "Answer"), 1, shots=5),
    "recursal/longbench-v2": Kind("train",
        lambda r: {"context": r.text(900), "question": r.text(12), "choices": r.phrases(4), "answer": r.letter()}, 1),
    "truthfulqa/truthful_qa": Kind("validation", _truthful),
    "skg/toxigen-data": Kind("train test",
        lambda r: {"text": r.text(18), "toxicity_ai": 1.0 + r.pick(5), "toxicity_human": 1.0 + r.pick(5)}),
    "oskarvanderwal/bbq": Kind(T, _bbq),
    "jannalu/crows_pairs_multilingual": Kind(T,
        lambda r: {"sent_more": r.text(12), "sent_less": r.text(12), "bias_type": "age"}),
    "EleutherAI/hendrycks_ethics": Kind("train test", _ethics, 5),
    "google/IFEval": Kind("train", _ifeval),
    "cais/wmdp": Kind(T, lambda r: {"question": r.text(), "choices": r.phrases(4), "answer": r.pick(4)}, 8),
}  # fmt: skip
FOR_EXAMPLES = frozenset(("train", "dev", "valid"))  # splits that few-shot examples come from, unless scored


def words_of(kind, default=30):
    """Words of a main text: about three of four prompt tokens of a document without examples."""
    known = sizes.known_size(kind.prior) if kind.prior else None
    return max(8, min(600, round(0.75 * known.prompt_tokens))) if known else default


def drawn(path, config):
    """Split -> rows of a data set's configuration. KeyError: a data set that the portfolio does not hold."""
    kind = KINDS["hails/agieval" if path.startswith("hails/agieval-") else path]
    words = words_of(kind)
    splits = kind.splits.split()

    def row(split, number):
        draw = Draw(f"{path} {config} {split} {number}")
        draw.words, draw.number, draw.config = words, number, config or ""
        return kind.draw(draw)

    def count(split):
        examples = len(splits) > 1 and split.split("_", maxsplit=1)[0] in FOR_EXAMPLES
        return kind.shots if examples or (path == "TIGER-Lab/MMLU-Pro" and split != "test") else kind.rows

    return {split: [row(split, number) for number in range(count(split))] for split in splits}


def sentences(count):
    """Sentences of the rows' words, to train a tokenizer on."""
    return [Draw(number).text(40) for number in range(count)]
