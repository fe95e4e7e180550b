"""Options of `lm_eval run` (0.4.13) on the command line of `eval`, `submit` and `prepare`.

Rule: an option with an equivalent is accepted in either spelling (`--num_fewshot`, `--num-fewshot`); one that requests the
default is skipped with a message; any other is refused by name, with an alternative. Values are parsed like in
`lm_eval/_cli/utils.py`. The values of lm_eval's `--config FILE.yaml` are read as options.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from coordinator.errors import OperatorError

SHORT_FLAGS = {
    "-t": "--tasks",
    "-M": "--model",
    "-a": "--model-args",
    "-L": "--limit",
    "-f": "--num-fewshot",
    "-b": "--batch-size",
    "-c": "--use-cache",
    "-o": "--output-path",
    "-E": "--samples",
    "-w": "--write-out",
    "-x": "--predict-only",
    "-C": "--config",
}
TRUSTS_CODE = "--model-args=trust_remote_code=True"  # what lm_eval makes of its --trust_remote_code
UNSUPPORTED_FLAGS = {
    "--cache-requests": "requests are always kept, in the work folder",
    "--check-integrity": "`evalspan validate --suite FILE` checks tasks",
    "--hf-hub-log-args": "`evalspan export ID --to lm-eval --out FOLDER` writes files to upload",
    "--max-batch-size": "say --batch-size N, or auto",
    "--predict-only": "omit it; responses and samples are always kept",
    "--trackio-args": "set a tracker in [trackers] of evalspan.toml",
    "--trust-remote-code": "say --model-args trust_remote_code=True",
    "--use-cache": "responses are always kept and reused",
    "--verbosity": "set LMEVAL_LOG_LEVEL in env of [trial]",
    "--wandb-args": "set wandb_project in [trackers] of evalspan.toml",
    "--wandb-config-args": "set wandb_project in [trackers] of evalspan.toml",
}
REDUNDANT = {  # flags without a value that request the default
    "--confirm-run-unsafe-code": "programs run in a sandbox",
    "--log-samples": "samples are always kept: `evalspan export ID --to lm-eval --out DIR` writes them",
    "--show-config": "each task's configuration is in results.json",
    "--write-out": "prompts are in the samples: `evalspan export ID --to lm-eval --out DIR` writes them",
}
ENGINES = {
    "hf": "hf",
    "huggingface": "hf",
    "hf-auto": "hf",
    "vllm": "vllm",
    "sglang": "sglang",
    "local-completions": "local-completions",
}
LIST_FLAG = "--tasks"  # takes several words
PAIR_FLAGS = ("--model-args", "--gen-kwargs", "--metadata")  # take several words KEY=VALUE
OPTIONAL_VALUE_FLAGS = ("--apply-chat-template", "--fewshot-as-multiturn")  # take one word or none
TEXT_ARGUMENTS = ("revision",)  # a commit's hash may look like a number
PAIR = re.compile(r"[A-Za-z_]\w*=.*|\{.*", re.DOTALL)
TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


class LmEvalCommand(TyperCommand):
    """A command that also accepts the options of `lm_eval run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = (p for p in self.params if isinstance(p, TyperOption) and not p.is_flag)
        valued = {name for option in options for name in option.opts}
        takes = any(isinstance(p, TyperArgument) for p in self.params)
        needless: list[str] = []
        words = translate_options(with_yaml_values(args), valued, needless, checkpoint=takes)
        if needless:
            typer.echo(f"redundant: {'; '.join(f'{name}: {REDUNDANT[name]}' for name in needless)}", err=True)
        ctx.allow_extra_args = takes
        rest: list[str] = super().parse_args(ctx, words)
        if ctx.args and not ctx.resilient_parsing:
            said = f"{ctx.info_name} takes one checkpoint, and {ctx.args[0]!r} is an unexpected argument"
            raise OperatorError(
                f"{said}: say --suite {ctx.args[0]}, or run another `evalspan {ctx.info_name}` for it"
            )
        return rest


# --- command-line words --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Several:
    """An option whose value is several words, the last of which may be the checkpoint. `out`: its position."""

    option: str
    words: list[str]
    least: int  # words that certainly belong to the option
    out: int


@dataclass(slots=True)
class _Rewriting:
    valued: set[str]
    out: list[str] = field(default_factory=list)
    several: list[_Several] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    needless: list[str] = field(default_factory=list)
    checkpoint: bool = False  # named by a word of its own, or by pretrained=

    def option(self, typed: str, rest: Sequence[str]) -> int:
        """Consume an option and its value, and return the number of words consumed from `rest`."""
        name, equals, value = split_option(typed)
        if name == "--trust-remote-code" and "--model-args" in self.valued and not equals:
            self.out.append(TRUSTS_CODE)
            return 0
        if name in UNSUPPORTED_FLAGS:
            self.refused[name] = UNSUPPORTED_FLAGS[name]
            return 0
        if name in REDUNDANT and not equals:
            self.needless.append(name)
            return 0
        if name not in (LIST_FLAG, *PAIR_FLAGS, *OPTIONAL_VALUE_FLAGS):
            takes = name in self.valued and not equals and rest
            self.out += [f"{name}{equals}{value}", *(rest[:1] if takes else [])]
            return 1 if takes else 0
        following = [] if equals else self._following(name, rest)
        words = [value, *following] if equals else following
        self.checkpoint |= name == "--model-args" and any("pretrained" in parse_pairs([w]) for w in words)
        self.several.append(_Several(name, words, 0 if name in OPTIONAL_VALUE_FLAGS else 1, len(self.out)))
        self.out.append("")
        return len(following)

    def _following(self, name: str, rest: Sequence[str]) -> list[str]:
        taken: list[str] = []
        for word in rest:
            foreign = word.startswith("-") or (name in PAIR_FLAGS and taken and not PAIR.fullmatch(word))
            if name in OPTIONAL_VALUE_FLAGS:
                multiturn = name == "--fewshot-as-multiturn"
                foreign = foreign or bool(taken) or (multiturn and word.lower() not in TRUE + FALSE)
            if foreign:
                break
            taken.append(word)
        return taken


def split_option(typed: str) -> tuple[str, str, str]:
    """An option's long name with dashes, "=" where its value follows in the same word, and that value."""
    name, equals, value = typed.partition("=")
    name = SHORT_FLAGS.get(name, name)
    return name.replace("_", "-") if name.startswith("--") else name, equals, value


def with_yaml_values(words: Sequence[str]) -> list[str]:
    """`words` with the values of lm_eval's YAML in place of its `--config FILE.yaml`; as in lm_eval, an option counts before them."""
    for at, word in enumerate(words):
        name, equals, value = split_option(word)
        value = value if equals else next(iter(words[at + 1 :]), "")
        if name == "--config" and value.endswith((".yaml", ".yml")):
            rest = [*words[:at], *words[at + (1 if equals else 2) :]]
            given = {split_option(each)[0] for each in rest if each.startswith("-")}
            values = read_yaml_values(Path(value))
            return [*(w for key, words in values.items() if key not in given for w in words), *rest]
    return list(words)


def read_yaml_values(file: Path) -> dict[str, list[str]]:
    """Option -> the words that mean the same as a value of lm_eval's YAML. OperatorError."""
    import yaml

    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise OperatorError(f"--config {file} cannot be read: {why}") from error
    if not isinstance(read, dict):
        raise OperatorError(f"--config {file}: lm_eval's YAML holds KEY: VALUE lines")
    found: dict[str, list[str]] = {}
    for key, value in read.items():
        option = split_option(f"--{key}")[0]
        match value:
            case False if option in OPTIONAL_VALUE_FLAGS:
                found[option] = [f"{option}=false"]
            case None | False:
                continue
            case True:
                found[option] = [option]
            case dict():
                found[option] = [f"{option}={json.dumps(value)}"]
            case list():
                found[option] = [f"{option}={','.join(map(str, value))}"]
            case _:
                found[option] = [f"{option}={value}"]
    return found


def translate_options(
    words: Sequence[str], valued: set[str], needless: list[str] | None = None, *, checkpoint: bool = True
) -> list[str]:
    """Return `words` as this program's own options. `valued`: options that take a value. Raise OperatorError for unsupported
    ones.

    `checkpoint`: the command takes one as a positional argument. Names of redundant options are appended to `needless`.
    lm_eval's `--tasks a b` takes all words up to the next option. If nothing else names the checkpoint, the last of them is
    the checkpoint.
    """
    done = _Rewriting(valued, needless=[] if needless is None else needless, checkpoint=not checkpoint)
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if word == "--":
            done.checkpoint |= at < len(words)
            done.out += words[at - 1 :]
            break
        # lm_eval's flag, if no suite's name follows
        if word == "-s" and (at == len(words) or words[at].startswith("-")):
            done.needless.append("--log-samples")
            continue
        if word.startswith("-") and word != "-":
            at += done.option(word, words[at:])
        else:
            done.out.append(word)
            done.checkpoint = True
    if done.refused:
        said = "; ".join(f"{name}: {instead}" for name, instead in done.refused.items())
        raise OperatorError(f"these lm_eval options are not supported: {said}")
    moved: list[str] = []
    for each in reversed(done.several):
        if not done.checkpoint and each.option != "--fewshot-as-multiturn" and len(each.words) > each.least:
            moved, done.checkpoint = [each.words.pop()], True
    made = {each.out: _rendered(each) for each in done.several}
    return [*(w for n, word in enumerate(done.out) for w in made.get(n, [word])), *moved]


def _rendered(several: _Several) -> list[str]:
    if several.option == LIST_FLAG:
        return [f"{LIST_FLAG}={','.join(several.words)}"]
    if several.option in PAIR_FLAGS:
        return [f"{several.option}={word}" for word in several.words]
    return [f"{several.option}={(several.words or ['true'])[0]}"]


# --- values ----------------------------------------------------------------------------------------------------------


def parse_pairs(words: Sequence[str], option: str = "--model-args") -> dict[str, Any]:
    """Parse KEY=VALUE words, or a JSON object, like lm_eval."""
    found: dict[str, Any] = {}
    for word in words:
        if word.lstrip().startswith("{"):
            try:
                found |= dict(json.loads(word))
            except ValueError as error:
                raise OperatorError(f"{option}: {word!r} is not a JSON object ({error})") from error
            continue
        for part in _split(word):
            key, equals, value = part.partition("=")
            if not equals:
                raise OperatorError(f"{option}: {part!r} is not KEY=VALUE")
            found[key] = value if key in TEXT_ARGUMENTS else _value(value)
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth = max(depth - 1, 0)
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part for part in parts if part]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


def samples_of(text: str | None) -> dict[str, Any] | None:
    """Return lm_eval's `--samples`: a JSON object, or a file of one. Raise OperatorError."""
    if text is None:
        return None
    try:
        return dict(json.loads(text if "{" in text else Path(text).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise OperatorError(
            f'--samples: {text!r} is neither a JSON object such as {{"TASK": [0, 1]}} nor a file of one ({error})'
        ) from error


def seed_of(text: str | None) -> int | None:
    """Return the seed of `--seed`: a number, or lm_eval's list of four equal ones; None: lm_eval's own defaults."""
    if text is None or text.replace(" ", "") == "0,1234,1234,1234":
        return None
    listed = text.replace(" ", "").split(",")
    parts = set(listed)
    if len(listed) not in (1, 4) or len(parts) != 1 or not listed[0].isdecimal():
        raise OperatorError(f"--seed: {text!r}: evalspan takes one number for all of lm_eval's generators")
    return int(parts.pop())


def flag_of(text: str | None) -> bool | str | None:
    """Return the value of an option with an optional value: true, false, or a text such as a template's name."""
    return None if text is None else {"true": True, "false": False}.get(text.lower(), text)


def trial_settings(
    model: str | None, model_args: Sequence[str] | None, device: str | None
) -> tuple[str | None, Mapping[str, object]]:
    """Return the checkpoint that `pretrained=` names, and the settings of [trial] that the options replace."""
    settings: dict[str, object] = {}
    if model is not None:
        if model not in ENGINES:
            known = ", ".join(dict.fromkeys(ENGINES.values()))
            raise OperatorError(f"--model {model}: evalspan loads checkpoints by {known}")
        settings["trial.engine"] = ENGINES[model]
    if device is not None:
        if ":" in device:
            raise OperatorError(
                f"--device {device}: each trial has its own GPUs: use --device cuda, or omit it"
            )
        settings["trial.device"] = device
    arguments = parse_pairs(model_args or ())
    for key in ("batch_size", "max_batch_size", "device"):
        if key in arguments:
            raise OperatorError(
                f"--model-args: {key} is an option: --{key.removeprefix('max_').replace('_', '-')}"
            )
    if "subfolder" in arguments:
        raise OperatorError("--model-args: subfolder: name that folder itself by pretrained=")
    checkpoint = arguments.pop("pretrained", None)
    revision = arguments.pop("revision", "None")
    settings |= {f"trial.model_args.{key}": value for key, value in arguments.items()}
    if revision == "None":
        return None if checkpoint is None else str(checkpoint), settings
    return _at_revision(str(checkpoint), str(revision)), settings


def _at_revision(checkpoint: str, revision: str) -> str:
    """Return the id of a revision of a Hub model. Raise OperatorError for a folder, where revisions do not apply."""
    from coordinator.intake.hub import HUB_ID

    text = f"{checkpoint}@{revision}"
    named = HUB_ID.fullmatch(text)
    if named is None or named[1] != checkpoint:
        raise OperatorError(
            f"--model-args: revision={revision} needs pretrained=ORG/MODEL, which is also written ORG/MODEL@{revision}"
        )
    return text


def checkpoint_argument(typed: str | None, pretrained: str | None) -> str:
    """Return the checkpoint that a command line names. Raise OperatorError if it names none, or two."""
    if typed is not None and pretrained not in (None, typed):
        raise OperatorError(f"two checkpoints are named: {typed}, and {pretrained} by --model-args: give one")
    named = typed or pretrained
    if named is None:
        raise OperatorError("name a checkpoint: a folder with config.json, safetensors and tokenizer")
    return named
