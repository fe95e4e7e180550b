"""Options of `eval`, `submit`, `prepare` and `validate` that select a suite and override its settings, declared once."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from coordinator.errors import OperatorError
from coordinator.interface.cli import lm_eval_flags
from coordinator.interface.cli.app import TableCommand, option

ONE_OFF = {"rich_help_panel": "What is evaluated"}
LM_EVAL = {"rich_help_panel": "As in lm_eval run (underscores also work)"}


class SuiteCommand(TableCommand):
    """A command that takes a suite, or tasks, and settings that override the suite's."""

    suite: str | None = option(
        "A suite's name, or a suite file (default: \\[watch] suite).", "--suite", "-s", **ONE_OFF
    )
    tasks: str | None = option("lm-eval tasks instead of a suite: a,b.", **ONE_OFF)
    limit: float | None = option("Documents of each task, or a share below 1.", **ONE_OFF)
    num_fewshot: int | None = option("Examples in each prompt.", min=0, **ONE_OFF)
    every: int | None = option("1: ask every task, also those with `every` in the suite.", min=1, **ONE_OFF)
    batch_size: str | None = option('Batch size: a number or "auto".', **ONE_OFF)
    mode: str | None = option(
        "lm-eval's exact digits, or each shared context computed once.", metavar="exact|fast", **ONE_OFF
    )
    token_budget: str | None = option('With mode fast: tokens per forward pass, or "auto".', **ONE_OFF)
    gen_kwargs: list[str] | None = option(
        "Generation settings of each task.", metavar="KEY=VALUE,…", **LM_EVAL
    )
    samples: str | None = option(
        "Documents, from 0: a JSON object or a file of it.", metavar='{"TASK":[0,…]}', **LM_EVAL
    )
    metadata: list[str] | None = option("Added to each task's metadata.", metavar="KEY=VALUE,…", **LM_EVAL)
    include_path: list[str] | None = option("Folder of task YAMLs.", **LM_EVAL)
    apply_chat_template: str | None = option(
        "Render prompts with the tokenizer's chat template.", metavar="[NAME]", **LM_EVAL
    )
    system_instruction: str | None = option("System message of each prompt.", **LM_EVAL)
    fewshot_as_multiturn: str | None = option(
        "Few-shot examples as turns of the conversation.", metavar="[true|false]", **LM_EVAL
    )
    seed: str | None = option("Seed of all generators.", **LM_EVAL)

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Return the typed options as arguments of `coordinator.api`. Raise OperatorError."""
        from coordinator.intake.suites import SuiteSettings, suite_choice

        if self.mode not in (None, "exact", "fast"):
            raise OperatorError(f"--mode must be exact or fast, not {self.mode!r}")
        multiturn = self.fewshot_as_multiturn
        read: Any = {key: getattr(self, key) for key in SuiteSettings.__annotations__} | {
            "gen_kwargs": lm_eval_flags.parse_pairs(self.gen_kwargs or (), "--gen-kwargs") or None,
            "samples": lm_eval_flags.samples_of(self.samples),
            "metadata": lm_eval_flags.parse_pairs(self.metadata or (), "--metadata") or None,
            "include_path": self.include_path or (),
            "apply_chat_template": lm_eval_flags.flag_of(self.apply_chat_template),
            "fewshot_as_multiturn": None if multiturn is None else multiturn.lower() in lm_eval_flags.TRUE,
            "seed": lm_eval_flags.seed_of(self.seed),
        }
        return suite_choice(self.suite, self.tasks or (), read)
