"""`evalspan diagnose`: why a job failed, from its logs, its id, or all failed jobs of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import OperatorError
from coordinator.interface.cli.app import (
    TableCommand,
    argument,
    command,
    option,
    print_text,
    report_write_errors,
    show_json,
)
from evaljobs.contract.paths import WorkPaths

if TYPE_CHECKING:
    from coordinator.site.config.schema import Config
    from coordinator.site.diagnosis.diagnose import Finding
    from coordinator.site.diagnosis.rules import Proposal

VOTES = 3  # answers requested by --ask, of which over half must agree


@command()
class Diagnose(TableCommand):
    """Find the failure that made a job end: its reason, who must act, and the line that shows it.

    LOG may also be the kernel's log (dmesg), torch's error file, or the dumps of the NCCL flight recorder, of several ranks.

    Examples:

    evalspan diagnose slurm-4711.out

    evalspan diagnose 4711

    evalspan diagnose EVALUATION
    """

    what: list[str] = argument("LOG ..., a job's id in Slurm, or an evaluation.")
    state: str = option("With LOG: the state reported by sacct, such as OUT_OF_MEMORY.", default="")
    exit_code: str = option("With LOG: the exit code reported by sacct, such as 0:9.", default="")
    ask: bool = option(
        "For a LOG that matches no rule: ask the judge's model (see [judge]), and mark its answer as such.",
        default=False,
    )
    keep: Path | None = option("With --ask: write the answer as a rule to this file.")
    healthy: list[Path] | None = option("With --ask: logs that the rule must not match.")

    def run(self) -> None:
        from coordinator.runtime.causes import accept_rules, read_logs
        from coordinator.site.cluster.past_jobs import JOB_ID
        from coordinator.site.diagnosis.diagnose import diagnose

        work = WorkPaths(self.settings(makes=False).work_dir)
        accept_rules(work)
        paths = [Path(name) for name in self.what]
        if all(path.is_file() for path in paths):
            found = diagnose(read_logs(paths), state=self.state, exit_code=self.exit_code)
            if not found.is_log:
                raise OperatorError(f"{', '.join(self.what)}: {found.diagnosis.advice}")
            if self.ask and found.diagnosis.reason is None and (made := self._ask(paths)):
                return self._show_answer(made, work.rules)
        elif len(self.what) == 1 and JOB_ID.fullmatch(self.what[0]):
            found = _of_job(self.what[0])
        elif len(self.what) == 1 and not paths[0].parent.name and not paths[0].suffix:
            return self._evaluation(self.what[0])
        else:
            missing = next(path for path in paths if not path.is_file())
            raise OperatorError(f"{missing}: no such file, job or evaluation")
        if self.as_json:
            return show_json(found.diagnosis.model_dump())
        _show(found)
        return None

    def _ask(self, paths: Sequence[Path]) -> Proposal | None:
        """Return the model's majority answer, within the limits of `[judge]`. Only the reduced log leaves this machine."""
        from coordinator.runtime.causes import FAILED_STATE, read_logs
        from coordinator.site.diagnosis import rules
        from coordinator.site.diagnosis.diagnose import diagnose
        from coordinator.site.diagnosis.reader import line_blocks, plain_text

        found = diagnose(read_logs(paths), state=self.state or FAILED_STATE, most=rules.MOST_LINES)
        lines = rules.reduce_log([line for _, _, line in found.telling], found.last, os.environ)
        answers = _asked(self.settings(makes=False), rules.SYSTEM_PROMPT, rules.question_text(lines))
        healthy = (
            plain_text(raw)
            for chunks in read_logs(self.healthy or ()).values()
            for block, _ in line_blocks(chunks)
            for raw in block.split(b"\n")
        )
        made = rules.agreed_proposal(answers, lines, healthy)
        if made is None:
            print_text(
                f"no answer of [judge] has over half of {VOTES} votes and matches these logs alone", err=True
            )
        return made

    def _show_answer(self, made: Proposal, accepted: Path) -> None:
        model = self.settings(makes=False).judge.model
        if self.keep is not None:
            with report_write_errors(self.keep):
                self.keep.write_text(made.as_toml())
            print_text(f"wrote {self.keep}: a person accepts it by adding it to {accepted}", err=True)
        if self.as_json:
            return show_json(
                {"reason": made.reason, "line": made.example, "said_by": model, "votes": made.votes}
            )
        print_text(
            f"{made.reason}, as {model} says ({made.votes} of {VOTES} votes): no rule knows this log", "bold"
        )
        print_text(made.example)
        print_text(made.explanation)
        return None

    def _evaluation(self, name: str) -> None:
        from coordinator.results.report.load_series import read_document
        from coordinator.runtime.causes import cause_of_outcome, cause_of_trial, job_failures
        from coordinator.runtime.known_evaluations import find_folder

        paths = find_folder(self.there(), name)
        found = {job: cause_of_trial(paths, job, state) for job, state in read_document(paths).died.items()}
        found |= {job: cause_of_outcome(outcome) for job, outcome in job_failures(paths).items()}
        if self.as_json:
            return show_json({job: one.model_dump() for job, one in found.items()})
        for job, one in found.items():
            print_text(f"{job}: {one.reason or 'not known'} (owner: {one.owner}): {one.line}")
            print_text(f"    {one.advice}", "dim")
        if not found:
            print_text(f"{name}: no job of it failed")
        return None


def _asked(settings: Config, system: str, user: str) -> list[str]:
    """Return answers of the model in sequence. Raise OperatorError without an endpoint, or if they may cost too much."""
    import openai

    from coordinator.intake.from_settings import judge_options
    from evaljobs.judges.asking import read_key
    from evaljobs.judges.judgement import Ask, cost_at_most

    judge = judge_options(settings)
    if judge is None:
        raise OperatorError("--ask needs a model: set [judge] url and model")
    most = VOTES * cost_at_most(judge, Ask(system=system, user=user, form="rating")) / 1e6
    if judge.max_cost is not None and most > judge.max_cost:
        raise OperatorError(f"--ask may cost {most:.2f}: more than [judge] max_cost")
    client = openai.OpenAI(
        base_url=judge.url,
        api_key=read_key(judge) or "none",
        timeout=judge.timeout_seconds,
        max_retries=judge.retries,
    )
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    asked: dict[str, Any] = {
        "model": judge.model,
        "max_tokens": judge.max_tokens,
        "temperature": judge.temperature,
    }
    try:
        given = [client.chat.completions.create(messages=messages, **asked) for _ in range(VOTES)]
    except openai.OpenAIError as error:
        raise OperatorError(f"[judge] {judge.url} gave no answer: {type(error).__name__}") from error
    return [one.choices[0].message.content or "" for one in given if one.choices]


def _of_job(job_id: str) -> Finding:
    from coordinator.runtime.causes import read_logs
    from coordinator.site.cluster import ClusterError
    from coordinator.site.cluster.past_jobs import look_up
    from coordinator.site.cluster.slurm_rules import ask_slurm
    from coordinator.site.diagnosis.diagnose import CERTAIN_STATES, diagnose

    try:
        job = look_up(job_id, ask_slurm, CERTAIN_STATES)
    except ClusterError as error:
        raise OperatorError(f"job {job_id}: Slurm does not answer: {error}") from error
    if job is None:
        raise OperatorError(f"neither `scontrol` nor `sacct` knows a job {job_id} of yours")
    if not job.has_ended:
        raise OperatorError(f"job {job_id} has not ended: it is {job.state}")
    logs = [path for log in job.logs if (path := Path(log)).is_file()]
    if not logs:
        print_text(f"job {job_id} has no log left ({', '.join(job.logs)})", "dim", err=True)
    return diagnose(read_logs(logs), state=job.state, exit_code=job.exit_code)


def _show(found: Finding) -> None:
    one = found.diagnosis
    again = (
        ""
        if one.reason in (None, "Healthy")
        else ", a restart can help"
        if one.recoverable
        else ", a restart will not help"
    )
    print_text(f"{one.reason or 'not known'} (owner: {one.owner}{again})", "bold")
    for line in found.traceback[-12:-1]:
        print_text(f"    {line}", "dim")
    for log, number, line in found.telling or ((found.log, one.line_number, one.line),):
        place = f"{log}:{number}: " if number else ""
        print_text(f"{place}{line}" if line else "")
    print_text(one.advice)
    for number, before in enumerate(found.earlier, 1):
        print_text(f"attempt {number} before: {before.reason or 'not known'}: {before.line}", "dim")
