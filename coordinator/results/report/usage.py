"""What an evaluation used: GPU seconds of each trial by cause, tokens, and judgements with their cost. Pure.

Rules: a trial that reported its own seconds gets those. A trial that died without them, for instance with its node, gets the
time that its GPUs were held, and in it the seconds of its shards that count. Only tokens of shards with a valid record are
counted; those of a shard that ran twice count once. A judge's sums are over the judgements on disk; one that another
evaluation paid for costs nothing here. Called by `measurements` and `finalize`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from coordinator.decide.evaluation.state import State
from evaljobs.contract.names import LaneId, ShardId
from evaljobs.contract.outcomes import TrialEnded
from evaljobs.contract.specs import BatchIndex, JudgeConfig, Record
from evaljobs.judges.judgement import Judgement

DRAINED = "drained"  # end of a trial whose work is done
CAUSES = ("infer", "imports", "load", "warm", "dump", "wait", "other")  # of GPU seconds: fields of `GpuUse`
Member = tuple[str, int]  # a job's name, and the member
Indexes = Mapping[tuple[str, str], BatchIndex]  # (leaf task, cut) -> its batches
MILLION = 1e6


class GpuUse(Record):
    """One trial's GPUs, from the job's start to its end. All in seconds; the parts add up to `held`."""

    trial: str
    node: str
    gpus: int
    device: str  # "": the trial died without reporting it, and the settings do not say cpu
    started_at: float
    held: float
    infer: float
    imports: float = 0.0
    load: float = 0.0
    warm: float = 0.0  # the first forward pass
    dump: float = 0.0
    wait: float = 0.0  # for a shard from the queue, or for staged weights
    other: float  # the rest: interpreter start and exit
    shards: int
    ended: str  # a reason of `TrialEnded`, or the cluster's end state of a trial that died


def slot_word(devices: Iterable[str]) -> str:
    """Return what trials held: "GPU", or "slot" if every trial that reports its device has a CPU."""
    return "slot" if {device for device in devices if device} == {"cpu"} else "GPU"


def trial_gpu_use(outcome: TrialEnded, job_started: float | None) -> GpuUse:
    """Return the use that a trial reports. `job_started`: unix seconds, from the cluster."""
    begin = outcome.started_at if job_started is None else min(job_started, outcome.started_at)
    held = outcome.ended_at - begin
    parts = {
        "infer": outcome.infer_seconds,
        "imports": outcome.import_seconds,
        "load": outcome.load_seconds,
        "warm": outcome.warm_seconds,
        "dump": outcome.dump_seconds,
        "wait": outcome.wait_seconds,
    }
    return GpuUse(
        trial=outcome.name,
        node=outcome.node,
        gpus=outcome.gpus,
        device=outcome.devices,
        started_at=begin,
        held=held,
        **parts,
        other=max(0.0, held - sum(parts.values())),
        shards=outcome.shards,
        ended=outcome.reason,
    )


def dead_trials_gpu_use(
    state: State,
    started: Mapping[Member, float],
    ended: Mapping[Member, tuple[float, str]],
    said: Collection[str],
    shards: Mapping[str, list[float]],
) -> Iterator[GpuUse]:
    """Yield trials that ran and ended without reporting. `said`: the others; `shards`: trial -> its shards' seconds.

    `started`, `ended`: unix seconds from the cluster, with its end state.
    """
    for trial in state.trials.by_name.values():
        member = trial.job, trial.member
        if trial.name in said or member not in started or member not in ended:
            continue
        at, word = ended[member]
        held, seconds = max(0.0, at - started[member]), shards.get(trial.name, [])
        infer = min(held, sum(seconds))
        yield GpuUse(
            trial=trial.name,
            node=LaneId.parse(trial.lane).node,
            gpus=state.record.options.trial.gpus_per_trial,
            device="cpu" if (state.record.model.device or "").startswith("cpu") else "",
            started_at=started[member],
            held=held,
            infer=infer,
            other=held - infer,
            shards=len(seconds),
            ended=word,
        )


class TokenUse(Record):
    """`asked`: input tokens if each request were computed alone. `computed`: those of the forward passes.

    `computed` includes the padding of batches, and counts a context that several requests share once. It exceeds `asked` if
    padding outweighs sharing.
    """

    asked: int
    computed: int
    generated: int | None  # including padding behind shorter answers; None: no trial reported it
    infer_seconds: float  # of the trials, including tokenising
    tokenise_seconds: float

    @property
    def shared(self) -> float:
        """The fraction of `asked` that was not computed; negative if padding outweighs sharing."""
        return 1 - self.computed / self.asked if self.asked else 0.0

    @property
    def per_second(self) -> float | None:
        """Tokens computed and generated per second of inference on one lane."""
        return (self.computed + (self.generated or 0)) / self.infer_seconds if self.infer_seconds else None


def token_use(shards: Iterable[str], indexes: Indexes, trials: Iterable[TrialEnded]) -> TokenUse | None:
    """Return the tokens of these shards; None if an index is missing or of a version without asked tokens."""
    asked = computed = 0
    for shard in map(ShardId.parse, shards):
        index = indexes.get((shard.task, shard.cut))
        if index is None or len(index.asked_tokens) < shard.end_batch:
            return None
        asked += sum(index.asked_tokens[shard.first_batch : shard.end_batch])
        computed += sum(index.prefill_tokens[shard.first_batch : shard.end_batch])
    ended = list(trials)
    generated = [trial.generated_tokens for trial in ended if trial.generated_tokens is not None]
    return TokenUse(
        asked=asked,
        computed=computed,
        generated=sum(generated) if generated else None,
        infer_seconds=sum(trial.infer_seconds for trial in ended),
        tokenise_seconds=sum(trial.tokenise_seconds for trial in ended),
    )


class JudgeTask(Record):
    """Judgements of one task. Tokens: reported by the endpoint for this evaluation's requests."""

    judgements: int = 0
    missing: int = 0  # items without a judgement
    reused: int = 0  # judgements paid for by another evaluation
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # in the currency of the prices


class JudgeUse(Record):
    """The judge of an evaluation. `cost` is 0 if the settings give no prices."""

    model: str
    priced: bool
    cost: float
    max_cost: float | None
    tasks: dict[str, JudgeTask]


def judge_use(
    options: JudgeConfig, judgements: Iterable[Judgement], task_of: Mapping[str, str], evaluation: str
) -> JudgeUse:
    """Sum up a judge's work. `task_of`: metric job -> task. Judgements of unknown jobs count as "other"."""
    by_task: defaultdict[str, list[Judgement]] = defaultdict(list)
    for judgement in judgements:
        by_task[task_of.get(judgement.job, "other")].append(judgement)
    tasks = {task: _task_sum(by_task[task], evaluation) for task in sorted(by_task)}
    return JudgeUse(
        model=options.model,
        priced=bool(options.price_per_million_prompt_tokens or options.price_per_million_completion_tokens),
        cost=sum(task.cost for task in tasks.values()),
        max_cost=options.max_cost,
        tasks=tasks,
    )


def _task_sum(judgements: Iterable[Judgement], evaluation: str) -> JudgeTask:
    all_of_it = list(judgements)
    own = [j for j in all_of_it if j.evaluation == evaluation]
    return JudgeTask(
        judgements=sum(j.answer is not None for j in all_of_it),
        missing=sum(j.answer is None for j in all_of_it),
        reused=len(all_of_it) - len(own),
        prompt_tokens=sum(j.prompt_tokens or 0 for j in own),
        completion_tokens=sum(j.completion_tokens or 0 for j in own),
        cost=sum(j.cost_millionths for j in own) / MILLION,
    )
