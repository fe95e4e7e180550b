"""Conversations: turns with the model's own answers equal a plain loop's, however sharded; classes with batches of their own."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from support.exactness.pipeline import OPTIONS, TASKS, Case, build_spec, our_run, requests_head, shard_record
from transformers import T5Config

from evaljobs.contract.paths import request_set_manifest
from evaljobs.contract.specs import ModelOptions, RequestSetManifest, SuiteSpec, TaskEntry
from evaljobs.contract.storage import FrameWriter, read_record
from evaljobs.errors import OperatorError
from evaljobs.lmeval.batches import (
    Batch,
    Conversation,
    Piece,
    Turn,
    batch_chunks,
    decode_pieces,
    encode_batches,
    encode_requests,
)
from evaljobs.lmeval.conversations import turn_answers
from evaljobs.lmeval.replay_model import ReplayError, check_whole, collect_answers
from evaljobs.lmeval.result_keys import instances_digest
from evaljobs.requests import build
from evaljobs.trial.engines.harness import SELF_BATCHING_SIZE, HarnessEngine, run_batch
from evaljobs.trial.engines.loading import load_engine
from evaljobs.trial.engines.protocol import Loaded
from evaljobs.trial.shard_runner import RequestSet

SYSTEM = "Be brief."
CAP = 24
CHAT = {"apply_chat_template": True, "system_instruction": SYSTEM}
TALKS = Case(task="toy_talks", suite=CHAT)


def spec(model_dir, folder, include=TASKS, engine="hf", **entry):
    tasks = (TaskEntry(name="toy_talks", **entry.pop("task", {})),)
    suite = SuiteSpec(name="s", include_path=(str(include),), tasks=tasks, **{**CHAT, **entry})
    options = OPTIONS.model_copy(update={"engine": engine})
    return build_spec(model_dir, suite, folder, batch_size=4, model=options)


def documents():
    rows = runpy.run_path(str(TASKS / "rows.py"))
    return list(rows["talks"]()["test"])


def plain_loop(model_dir, batch_size):
    """Answers by document, and the longest prompt in tokens, with one model call per turn.

    The first turn of all documents is one call; later ones are a call per batch of lm-eval's,
    longest first.
    """
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(1)
    lm = HFLM(pretrained=str(model_dir), batch_size=batch_size, device="cpu")
    docs = documents()
    begin = [{"role": "system", "content": SYSTEM}]
    messages = [[*begin, {"role": "user", "content": doc["question"]}] for doc in docs]

    def render(n):
        return str(lm.tokenizer.apply_chat_template(messages[n], tokenize=False, add_generation_prompt=True))

    def ask(numbers):
        how = {"until": ["Q:"], "do_sample": False, "max_gen_toks": CAP}
        asked = [Instance("generate_until", {}, (render(n), dict(how)), 0) for n in numbers]
        return list(lm.generate_until(asked, disable_tqdm=True))

    said = [[answer] for answer in ask(list(range(len(docs))))]
    order = sorted(range(len(docs)), key=lambda n: (-len(lm.tok_encode(render(n))), render(n)))
    longest = 0
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        for turn in range(3):
            going = [n for n in batch if len(docs[n]["next"]) > turn]
            for n in going:
                messages[n] += [
                    {"role": "assistant", "content": said[n][-1]},
                    {"role": "user", "content": docs[n]["next"][turn]},
                ]
                longest = max(longest, len(lm.tok_encode(render(n))))
            for n, answer in zip(going, ask(going) if going else [], strict=True):
                said[n].append(answer)
    return said, longest


@pytest.mark.model
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_turn_is_that_of_a_plain_loop(batch_size, model_dir, tmp_path):
    """System instruction, one to three turns, long prompts: the same at 1 and 3 shards."""
    expected, longest = plain_loop(model_dir, batch_size)
    assert longest > 256 - CAP, "no prompt is truncated: the law is not tested"
    for n_shards in (1, 3):
        folder = tmp_path / str(n_shards)
        ours = our_run(model_dir, TALKS, batch_size, n_shards, folder, sets=tmp_path / "sets")
        assert [sample["resps"] for sample in ours.samples["toy_talks"]] == [[[said]] for said in expected]
        letters = [float(len("".join(said))) for said in expected]
        found = ours.results["results"]["toy_talks"]["letters,none"]
        assert found == pytest.approx(sum(letters) / len(letters))


@pytest.mark.model
def test_repeats_are_conversations_of_their_own_and_sampling_does_not_depend_on_sharding(model_dir, tmp_path):
    """Two sampled repeats of a document differ, and each is the same in every trial."""
    sampling = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 6}
    folder = task_folder(tmp_path, {"repeats": 2, "generation_kwargs": sampling})
    case = Case(task="toy_talks", suite=CHAT, include_path=str(folder))
    runs = [our_run(model_dir, case, 4, n, tmp_path / str(n)) for n in (1, 3)]
    assert runs[0] == runs[1]
    answers = [sample["resps"][0] for sample in runs[0].samples["toy_talks"]]
    assert all(len(repeats) == 2 for repeats in answers)
    assert any(one != other for one, other in answers)


@pytest.mark.model
def test_a_set_counts_all_turns_and_is_known_by_them(model_dir, tmp_path):
    """Prompts and caps of every turn count in manifest and index; another later message is another
    set; engines with batches of their own get the same ones.
    """
    built = build.build_request_sets(spec(model_dir, tmp_path / "a"))
    place = Path(built.sets["toy_talks"])
    manifest = read_record(request_set_manifest(place), RequestSetManifest)
    docs = documents()
    asked = sum(1 + len(doc["next"]) for doc in docs)
    assert manifest.requests == len(docs)
    index = RequestSet(place, 4).index
    assert sum(index.generated_tokens) == asked * CAP
    head, pieces = build.read_requests(place)
    assert head.follow_up == "next"
    assert manifest.prompt_tokens == sum(sum(p.lengths(CAP)) for p in pieces)
    assert all(len(p.lengths(CAP)) == 1 + len(docs[p.document]["next"]) for p in pieces)
    shots = build.build_request_sets(spec(model_dir, tmp_path / "b", task={"num_fewshot": 2})).sets[
        "toy_talks"
    ]
    histories = [p.conversation.history for p in build.read_requests(Path(shots))[1]]
    (roles,) = {tuple(m["role"] for m in history) for history in histories}
    assert roles == ("system", *("user", "assistant") * 2, "user")
    other = task_folder(tmp_path / "c", {"dataset_kwargs": {"seed": 9, "rows": 10, "other": 1}})
    assert build.build_request_sets(spec(model_dir, tmp_path / "d", other)).sets != built.sets
    texts = build.build_request_sets(spec(model_dir, tmp_path / "e", engine="vllm")).sets["toy_talks"]
    assert list(RequestSet(texts, 4).batches(0, 3)) == list(RequestSet(place, 4).batches(0, 3))


CHOICES = {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "doc_to_target": 0}
# what a task's YAML says, what its suite says, words of the refusal
REFUSED = {
    "no chat template": ({}, {"apply_chat_template": False}, "apply_chat_template = true"),
    "no generation": (CHOICES, {}, "only generate_until"),
    "filters": ({"filter_list": [{"name": "f", "filter": [{"function": "take_first"}]}]}, {}, "in process_results"),
    "lm-eval's metrics": ({"process_results": None}, {}, "give it a process_results"),
    "no such column": ({"metadata": {"follow_up": "nxt"}}, {}, "column 'nxt'"),
    "no texts in it": ({"metadata": {"follow_up": "number"}}, {}, "neither a text nor a list"),
    "no name": ({"metadata": {"follow_up": 3}}, {}, "no column's name"),
    "a sequence-to-sequence model": ({}, {}, "sequence-to-sequence"),  # it reads a prompt and writes a text
    "a begun answer": ({"gen_prefix": "Sure:"}, {}, "omit gen_prefix"),
}  # fmt: skip


@pytest.mark.model
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_conversation_is_refused_when_it_is_built(name, model_dir, tmp_path):
    """Before any GPU, with what to do about it."""
    task, suite, says = REFUSED[name]
    if "sequence" in name:
        T5Config(vocab_size=600, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(
            tmp_path
        )
        for file in (*model_dir.glob("*token*"), model_dir / "chat_template.jinja"):
            shutil.copy(file, tmp_path)
        model_dir = tmp_path
    with pytest.raises(OperatorError, match=says):
        build.build_request_sets(
            spec(model_dir, tmp_path / "sets", task_folder(tmp_path / "tasks", task), **suite)
        )


@pytest.mark.model
def test_a_template_that_changes_is_refused_by_the_trial(model_dir, tmp_path):
    """A model whose template renders the first turn differently gives no answers."""
    place = build.build_request_sets(spec(model_dir, tmp_path)).sets["toy_talks"]
    lm = load_engine(str(model_dir), OPTIONS, 4).lm
    (batch,) = RequestSet(place, 4).batches(0, 1)
    lm.tokenizer.chat_template = "Today is Tuesday. " + lm.tokenizer.chat_template
    with pytest.raises(OperatorError, match="contain the date"):
        run_batch(lm, batch)


# --- values ----------------------------------------------------------------------------------------------------------

TEXTS = st.text() | st.sampled_from(['["a", "b"]', '{"turns": []}', "\\ud800", "\x00", "[[10]]", "null", ""])
SHAPE = {"settings": [{}], "max_gen_tokens": [7], "grouped": True, "max_length": 100, "follow_up": "next"}
HEAD = requests_head(digests={"generate_until": "d"}, **SHAPE)


@settings(max_examples=30)  # each is synced to disk
@given(said=st.lists(TEXTS, min_size=1, max_size=4))
def test_answers_come_back_turn_by_turn_whatever_they_say(said, tmp_path_factory):
    """Text that looks like JSON, a list or a rating stays text: the type tells turns apart."""
    place = tmp_path_factory.getbasetemp() / "said.frames"
    with FrameWriter(place) as writer:
        frame = writer.append(shard_record((0, said)))
    (answer,) = collect_answers(HEAD, "k", place.parent, [frame])
    assert turn_answers(answer) == tuple(said)
    with pytest.raises(OperatorError, match="evalspan eval"):  # plain `lm_eval` gives one text
        turn_answers(said[0])


def piece(document, length, later):
    history = [{"role": "user", "content": "c" * length}]
    turns = [Turn(message="m", length=length + more) for more in later]
    return Piece(
        "generate_until", document, document, "c" * length, length=length, settings=0,
        conversation=Conversation(history, turns),
    )  # fmt: skip


LATER = st.lists(st.integers(1, 30), max_size=3)
PIECES = st.lists(st.builds(piece, st.integers(0, 99), st.integers(1, 120), LATER), min_size=1, max_size=12)


@given(pieces=PIECES, size=st.integers(1, 5))
def test_every_turn_costs_its_prompt_and_its_cap(pieces, size):
    """Batches of one are exact: prompts with earlier answers at their cap. Others pad."""
    assert [*decode_pieces(encode_requests(HEAD, pieces).splitlines()[1:])] == pieces
    _, index = encode_batches(HEAD, "k", list(batch_chunks(HEAD, pieces, size)), size)
    answers = sum(1 + len(p.conversation.turns) for p in pieces)
    exact = sum(min(n, 93) for p in pieces for n in p.lengths(7))
    assert sum(index.generated_tokens) == 7 * answers
    assert sum(index.prefill_tokens) == exact if size == 1 else sum(index.prefill_tokens) >= exact
    assert sum(index.requests) == len(pieces)


@given(one=st.lists(st.text()), other=st.lists(st.text()))
def test_a_digest_covers_the_later_messages(one, other):
    """Instances of other later messages have another digest: their answers are not replayed."""

    def digest(messages, follow_up="next"):
        made = Instance("generate_until", {"next": messages}, ("c", {}), 0, metadata=("t", 0, 1))
        return instances_digest([made], follow_up)

    assert (digest(one) == digest(other)) == (one == other)
    assert digest(one, "") == digest(other, "")


def task_folder(folder, changes):
    """A folder with the toy task in other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"include: {TASKS / 'talks.yaml'}", *(f"{k}: {json.dumps(v)}" for k, v in changes.items())]
    (folder / "talks.yaml").write_text("\n".join(lines) + "\n")
    return folder


# --- model classes that tokenise and batch by themselves, as vLLM's ------------------------------------------------------


class SelfBatching(TemplateLM):
    """A class that sums its own windows and keeps its batch size as lm-eval's vllm class."""

    def __init__(self, batch_size="auto"):
        super().__init__()
        self.batch_size = batch_size

    @property
    def eot_token_id(self):
        return 0

    def tok_encode(self, string, **_more):
        return list(string.encode())

    def _loglikelihood_tokens(self, requests, **_more):
        return [(-float(len(continuation)), True) for _, _, continuation in requests]

    def loglikelihood_rolling(self, requests, **_more):
        return [-float(len(request.args[0])) for request in requests]

    def generate_until(self, requests, **_more):
        return [request.args[0] for request in requests]


def test_rolling_answers_of_an_engine_with_windows_of_its_own_are_scored(tmp_path):
    """Read back, each text's answer is the sum that the engine gave, an empty text's too."""
    texts = ["three", "", "a longer one"]
    pieces = [
        Piece(kind="loglikelihood_rolling", index=i, document=i, context=text) for i, text in enumerate(texts)
    ]
    batch = Batch(kind="loglikelihood_rolling", text=True, settings=None, pieces=pieces)
    with FrameWriter(tmp_path / "x.frames") as file:
        frame = file.append(shard_record(*run_batch(SelfBatching(), batch)))
    head = requests_head(requests=3, digests={"loglikelihood_rolling": "d"}, text=True)
    assert collect_answers(head, "k", tmp_path, [frame]) == [-5.0, 0.0, -12.0]


def test_answers_of_other_requests_or_in_part_score_nothing(tmp_path):
    """Another set's key, another task, one request without an answer: the score ends with the reason, and writes nothing."""
    for number, other in enumerate(({"key": "other"}, {"task": "other"}, {})):
        with FrameWriter(tmp_path / f"{number}.frames") as file:
            frame = file.append(shard_record((0, [0.5, True]), **other))
        if other:
            with pytest.raises(ReplayError, match="answers"):
                collect_answers(requests_head(), "k", tmp_path, [frame])
    found = collect_answers(requests_head(requests=2), "k", tmp_path, [frame])
    with pytest.raises(ReplayError):
        check_whole(requests_head(requests=2), found)


def test_a_settled_batch_size_reaches_an_engine_that_batches_by_itself():
    """Loaded with "auto" it is given the number, as an hf class is; its probe costs no forward."""
    lm = SelfBatching()
    loaded = Loaded(devices="cpu", gpus=0, import_seconds=0.0, load_seconds=0.0)
    engine = HarnessEngine(lm, ModelOptions(engine="vllm"), loaded)
    assert engine.probe_batch_size() == SELF_BATCHING_SIZE
    engine.fix_batch_size(32)
    assert lm.batch_size == 32
