"""The options of `eval`, `submit` and `prepare` that name a suite and change its settings, declared once.

Rule: such a command has one parameter `chosen: SuiteOptions`, and `takes_suite` puts the options in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from coordinator.cli import lm_eval_flags

if TYPE_CHECKING:
    from coordinator.intake.one_off import SuiteOptions

ONE_OFF = "What is evaluated"
LM_EVAL = "As in lm_eval run (underscores work, too)"


def _option(kind: Any, text: str, panel: str, *names: str, **more: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=text, rich_help_panel=panel, **more)]


OPTIONS = {
    "suite": _option(
        str, "A suite's name, or a suite file (default: \\[watch] suite).", ONE_OFF, "--suite", "-s"
    ),
    "tasks": _option(str, "Tasks of lm-eval instead of a suite: a,b.", ONE_OFF),
    "limit": _option(float, "Documents of each task, or a share below 1.", ONE_OFF),
    "num_fewshot": _option(int, "Examples in each prompt.", ONE_OFF, min=0),
    "batch_size": _option(str, 'A number or "auto", in place of the suite\'s.', ONE_OFF),
    "mode": _option(
        str, "lm-eval's digits, or each shared context computed once.", ONE_OFF, metavar="exact|fast"
    ),
    "token_budget": _option(str, 'With mode fast: tokens of a forward pass, or "auto".', ONE_OFF),
    "gen_kwargs": _option(list[str], "Generation settings of each task.", LM_EVAL, metavar="KEY=VALUE,…"),
    "include_path": _option(list[str], "Folder of task YAMLs.", LM_EVAL),
    "apply_chat_template": _option(
        str, "Render prompts by the tokenizer's chat template.", LM_EVAL, metavar="[NAME]"
    ),
    "system_instruction": _option(str, "System message of each prompt.", LM_EVAL),
    "fewshot_as_multiturn": _option(
        str, "Few-shot examples as turns of the conversation.", LM_EVAL, metavar="[true|false]"
    ),
    "seed": _option(str, "One seed for all generators.", LM_EVAL),
}


def suite_options(typed: dict[str, Any]) -> SuiteOptions:
    """What was typed, option -> value, as the record that `coordinator.api` takes."""
    from coordinator.errors import OperatorError
    from coordinator.intake import one_off

    more = dict(typed)
    suite, tasks, mode, multiturn = (more.pop(n) for n in ("suite", "tasks", "mode", "fewshot_as_multiturn"))
    if mode not in (None, "exact", "fast"):
        raise OperatorError(f"--mode is exact or fast, not {mode!r}")
    read: Any = {
        **more,
        "mode": mode,
        "gen_kwargs": lm_eval_flags.pairs(typed["gen_kwargs"] or (), "--gen-kwargs") or None,
        "include_path": typed["include_path"] or (),
        "apply_chat_template": lm_eval_flags.flag_of(typed["apply_chat_template"]),
        "fewshot_as_multiturn": None if multiturn is None else multiturn.lower() in lm_eval_flags.TRUE,
        "seed": lm_eval_flags.seed_of(typed["seed"]),
    }
    return one_off.suite_options(suite, tasks or (), read)


def takes_suite(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `OPTIONS` in place of its parameter `chosen`."""
    later = {"SuiteOptions": Any}  # its module takes 0.3 s to import: not for --help
    types = OPTIONS | get_type_hints(command, localns=later, include_extras=True)
    own = inspect.signature(command).parameters

    @functools.wraps(command)
    def taking(**values: Any) -> None:
        chosen = suite_options({name: values.pop(name) for name in OPTIONS})
        command(chosen=chosen, **values)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS]
    parameters += [p for p in own.values() if p.name != "chosen"]
    taking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=types[p.name], kind=p.KEYWORD_ONLY) for p in parameters]
    )
    taking.__annotations__ = {p.name: types[p.name] for p in parameters}
    return taking
