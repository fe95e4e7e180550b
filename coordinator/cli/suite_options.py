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
    from coordinator.intake.one_off import SuiteOptions, SuiteSettings

ONE_OFF = "What is evaluated"
LM_EVAL = "As in lm_eval run (underscores work, too)"

SUITE = Annotated[
    str | None,
    typer.Option(
        "--suite",
        "-s",
        help="A suite's name, or a suite file (default: \\[watch] suite).",
        rich_help_panel=ONE_OFF,
    ),
]
TASKS = Annotated[
    str | None, typer.Option(help="Tasks of lm-eval instead of a suite: a,b.", rich_help_panel=ONE_OFF)
]
LIMIT = Annotated[
    float | None,
    typer.Option(help="Documents of each task, or a share below 1.", rich_help_panel=ONE_OFF),
]
NUM_FEWSHOT = Annotated[
    int | None, typer.Option(min=0, help="Examples in each prompt.", rich_help_panel=ONE_OFF)
]
BATCH_SIZE = Annotated[
    str | None,
    typer.Option(help='A number or "auto", in place of the suite\'s.', rich_help_panel=ONE_OFF),
]
MODE = Annotated[
    str | None,
    typer.Option(
        metavar="exact|fast",
        help="lm-eval's digits, or each shared context computed once.",
        rich_help_panel=ONE_OFF,
    ),
]
TOKEN_BUDGET = Annotated[
    str | None,
    typer.Option(help='With mode fast: tokens of a forward pass, or "auto".', rich_help_panel=ONE_OFF),
]
GEN_KWARGS = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE,…", help="Generation settings of each task.", rich_help_panel=LM_EVAL),
]
INCLUDE_PATH = Annotated[
    list[str] | None, typer.Option(help="Folder of task YAMLs.", rich_help_panel=LM_EVAL)
]
CHAT = Annotated[
    str | None,
    typer.Option(
        "--apply-chat-template",
        metavar="[NAME]",
        help="Render prompts by the tokenizer's chat template.",
        rich_help_panel=LM_EVAL,
    ),
]
SYSTEM = Annotated[
    str | None,
    typer.Option("--system-instruction", help="System message of each prompt.", rich_help_panel=LM_EVAL),
]
MULTITURN = Annotated[
    str | None,
    typer.Option(
        "--fewshot-as-multiturn",
        metavar="[true|false]",
        help="Few-shot examples as turns of the conversation.",
        rich_help_panel=LM_EVAL,
    ),
]
SEED = Annotated[str | None, typer.Option(help="One seed for all generators.", rich_help_panel=LM_EVAL)]


def suite_options(
    suite: SUITE = None,
    tasks: TASKS = None,
    limit: LIMIT = None,
    num_fewshot: NUM_FEWSHOT = None,
    batch_size: BATCH_SIZE = None,
    mode: MODE = None,
    token_budget: TOKEN_BUDGET = None,
    gen_kwargs: GEN_KWARGS = None,
    include_path: INCLUDE_PATH = None,
    chat: CHAT = None,
    system: SYSTEM = None,
    multiturn: MULTITURN = None,
    seed: SEED = None,
) -> SuiteOptions:
    """What was typed, as the record that `coordinator.api` takes."""
    from coordinator.errors import OperatorError
    from coordinator.intake import one_off

    if mode not in (None, "exact", "fast"):
        raise OperatorError(f"--mode is exact or fast, not {mode!r}")
    more: SuiteSettings = {
        "mode": mode,  # type: ignore[typeddict-item]
        "token_budget": token_budget,
        "gen_kwargs": lm_eval_flags.pairs(gen_kwargs, "--gen-kwargs") if gen_kwargs else None,
        "include_path": tuple(include_path or ()),
        "apply_chat_template": lm_eval_flags.flag_of(chat),
        "system_instruction": system,
        "fewshot_as_multiturn": None if multiturn is None else multiturn.lower() in lm_eval_flags.TRUE,
        "seed": lm_eval_flags.seed_of(seed),
    }
    return one_off.suite_options(
        suite, tasks or (), more, limit=limit, num_fewshot=num_fewshot, batch_size=batch_size
    )


def takes_suite(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `suite_options` in place of its parameter `chosen`."""
    later = {"SuiteOptions": Any}  # its module takes 0.3 s to import: not for --help
    options = inspect.signature(suite_options).parameters
    own = inspect.signature(command).parameters
    types = get_type_hints(suite_options, localns=later, include_extras=True)
    types |= get_type_hints(command, localns=later, include_extras=True)

    @functools.wraps(command)
    def taking(**values: Any) -> None:
        chosen = suite_options(**{name: values.pop(name) for name in options})
        command(chosen=chosen, **values)

    parameters = [p for p in own.values() if p.name != "chosen"]
    parameters[:0] = options.values()
    taking.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=types[p.name], kind=p.KEYWORD_ONLY) for p in parameters]
    )
    taking.__annotations__ = {p.name: types[p.name] for p in parameters}
    return taking
