"""The commented evalspan.toml that `evalspan init` writes.

Rule: it holds every setting. Those that the probe of the cluster decided are set; all others are
commented out with their default, so the file is the reference and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.config.checks import GPU_REQUEST
from coordinator.config.schema import TrialConfig


def default_text(summary: str, chosen: Mapping[str, tuple[str, str]]) -> str:
    """Text of an evalspan.toml for a site. `chosen`: setting ("cluster.partition") -> its value, and a note for the reader."""

    def line(setting: str, example: str) -> str:
        key = setting.partition(".")[2]
        return f'{key} = "{chosen[setting][0]}"' if setting in chosen else f'# {key} = "{example}"'

    _, choice = chosen.get("cluster.partition", ("", ""))
    _, limit = chosen.get("trial.time_limit", ("", ""))
    return _TEXT.format(
        summary=summary,
        kind=chosen.get("cluster.kind", ("local", ""))[0],
        partition=line("cluster.partition", "gpu")
        + "   # partition of jobs with GPUs"
        + (f": {choice}" if choice else "; default: the site's"),
        cpu_partition=line("cluster.cpu_partition", "cpu"),
        account=line("cluster.account", "my-account"),
        qos=line("cluster.qos", "my-qos"),
        gpu_request=line("slurm.gpu_request", GPU_REQUEST),
        time_limit=line("trial.time_limit", TrialConfig().time_limit)
        + f"      # {f'{limit}; ' if limit else ''}",
        roles="\n".join(_ROLE.format(role=role, what=what) for role, what in ROLES.items()),
    )


ROLES = {
    "precursor": "jobs that stage weights on a node",
    "trial": "jobs with GPUs",
    "metric": "jobs that execute programs and score",
    "build": "jobs that build request sets and convert checkpoints",
}
_ROLE = """\
[slurm.{role}]   # {what}
# partition = "gpu"           # example: partition of these jobs; default: as [cluster] says
# account = "my-account"      # example: account of these jobs; default: as [cluster] says
# qos = "my-qos"              # example: QOS of these jobs; default: as [cluster] says
# extra_args = []             # options of sbatch, behind those of [cluster]
"""
_TEXT = """\
# evalspan.toml, written by `evalspan init` for: {summary}.
# Read from --config, $EVALSPAN_CONFIG, ./evalspan.toml or ~/.config/evalspan.toml, the first that exists.
# Each key is also an environment variable (EVALSPAN_CLUSTER_PARTITION); the command line overrides both.
# A line that is commented out shows the default, or an example where it says so.

# Folder of journals, request sets and results, on storage that all nodes share. A path here is relative to
# this file; the default is relative to the current folder.
# work_dir = "evalspan-work"
# shared_group = "llm-team"   # example: the Unix group that may read the work folder and submit; default: its user alone
# backlog = "all"             # waiting checkpoints to evaluate: "all", the "latest" of a folder, or {{ keep_every = 5 }} and the latest
# gpu_hour_price = 2.10       # example, any currency: reports and trackers then show what a checkpoint cost

[cluster]
kind = "{kind}"               # "local": processes on this machine; "slurm": jobs
# api = "cli"                 # how Slurm is called; "pyslurm" needs `pip install evalspan[slurm]` and Slurm 25.11
{partition}
{cpu_partition}               # partition of jobs without GPUs; default: partition
{account}      # example: Slurm account of all jobs; default: the site's
{qos}              # example: QOS of all jobs; default: the site's
# nice = 100                  # example: sbatch's --nice, so that jobs stand behind the site's others
# reservation = "my-res"      # example: reservation that all jobs run in
# extra_args = []             # options of every sbatch, e.g. ["--exclusive=user"]
# export = []                 # further variables that jobs get, e.g. ["SITE_*"] (docs/site/slurm.md#variables-that-jobs-get)
# poll_seconds = 10.0         # time between two listings of the cluster's jobs; of its nodes: 1.5 times that
# slots = 2                   # example: trials at once with kind "local"; default: one a GPU, or two without GPUs

[slurm]
{gpu_request}   # how sbatch asks for GPUs: "--gres=gpu:{{type}}:{{n}}" with the node's type, "--gpus-per-node={{n}}"

# What jobs of one role ask for in place of what [cluster] says; their extra_args follow those of [cluster].
{roles}
[trial]
# python = "/path/python"     # example: the interpreter that has your torch or vLLM; default: evalspan's own
# prologue = "module load cuda"   # example: shell lines before the interpreter of builds, precursors, trials and metric workers
# container = "apptainer exec --nv image.sif"   # example: command in front of the interpreter
# env = {{}}                    # variables of the jobs, e.g. {{ NCCL_DEBUG = "WARN" }}
# engine = "hf"               # lm-eval's name of the engine: "hf" or "vllm"; "sglang" is passed to lm-eval, not tested here
# mode = "exact"              # mode of suites without one; "fast": hf computes each shared context once (docs/evaluating/fast-mode.md)
# model_args = {{}}             # lm-eval's --model_args, e.g. {{ dtype = "bfloat16" }}
# gpus_per_trial = 1          # GPUs of a trial
# cpus = 1                    # CPU cores of a trial
# memory_mb = 16384           # example: MB that a trial asks of Slurm; default: 4096 and what the weights need
# threads = 1                 # example: CPU threads of a trial; default: torch's own choice
# device = "cpu"              # example: torch device of a trial; default: cuda where the job has a GPU
{time_limit}time limit of a trial at most; trials ask for what their work is predicted to take
# hung_seconds = 900.0        # example: without progress for so long a trial is ended, its shard given to another; default: 900, vllm 1800
# redis_patience_seconds = 600.0   # a trial without work waits this long for Redis: a requeued coordinator's is away for 2 minutes

[plan]
# policy = "evalspan"         # how shards are planned; "round-robin": sets sorted by prior, dealt round-robin to trials (Hu et al., NSDI 2024)
# steal = true                # example: a trial without shards takes another's; default: true, with "round-robin" false

[stage]
# enabled = true              # false: every trial reads the checkpoint from shared storage
# host_trials = "auto"        # true: one long job a node stages and hosts trials (private /dev/shm, exclusive nodes);
#                             # "auto": where Slurm's own rules ask for it
# roots = ["/dev/shm"]        # folders of a node for the weights: the first that is usable and large enough, e.g. ["/dev/shm", "/local/scratch"]
# lease_seconds = 900.0       # staged weights are cleared after so long without the coordinator's renewal: keep it above 90 on Slurm
# readers = 16                # a precursor's parallel reads of one file
# prefetch = 0.5              # share of a node's free memory that the next checkpoint may take while its GPUs are busy

[redis]
# url = "rediss://redis.site:6380/0"   # example: the site's server; default: evalspan starts its own here
# bind = "10.0.0.1"           # example: address of evalspan's server; default: the one that compute nodes reach
# port = 0                    # port of evalspan's server; 0: any free one
# username = "evalspan"       # example: ACL user at the site's server
# password_file = "redis.password"     # example: file of mode 0600 with that user's password
# ca_file = "site-ca.pem"     # example: authority of a server with rediss://; default: the system's authorities
# cert_file = "client.pem"    # example: the client's certificate, where the server asks for one
# key_file = "client.key"     # example: key of that certificate

[metric]
# workers = 16                # example: most CPU jobs that execute programs and score; default: what the partition's cores hold, 64 at most
# cpus = 1                    # CPU cores of a metric worker
# memory_mb = 4096            # MB that a metric worker asks of Slurm
# bootstrap_iters = 100000    # resamples for standard errors, as in lm-eval; fewer are faster
# item_seconds = 60.0         # time limit of one program, or of one item's metric
# allow_unsafe = false        # true: run generated programs also where resource limits alone hold

[judge]
# url = "https://api.openai.com/v1"   # example: an OpenAI-compatible endpoint, needed by suites with judge tasks
# model = "gpt-4.1"           # example: the model's name at the endpoint
# api_key_env = "OPENAI_API_KEY"      # example: the variable that holds the key
# api_key_file = "judge.key"  # example: in place of api_key_env a file of mode 0600 with the key
# allow_http = false          # true: a key may go to another host by http://, for a network that you trust
# temperature = 0.0           # sampling temperature of the judge
# max_tokens = 2048           # most tokens of an answer
# concurrency = 8             # most requests at once, of all workers together
# requests_per_minute = 60    # example: most requests within 60 s, of all workers together; default: no bound
# max_cost = 5.0              # example: most cost of an evaluation, in the currency of the prices; default: no bound
# price_per_million_prompt_tokens = 2.0       # example: price in any currency; default: not counted
# price_per_million_completion_tokens = 8.0   # example: price in any currency; default: not counted
# timeout_seconds = 120.0     # time limit of a request
# retries = 5                 # further tries of a request that failed

[watch]
# folders = []                # folders that a training writes checkpoints to, listed every second, e.g. ["/shared/run7/checkpoints"]; needs `suite` below
# roots = []                  # checkpoints that the hook announces are taken below these and `folders` only, e.g. ["/shared"]
# suite = "core"              # example: suite of checkpoints announced without a suite
# suites = []                 # suite files that the hook may name, e.g. ["suites/mine.toml"], which it names "mine"

[borrow]
# max_nodes = 4               # example: most nodes of all evaluations together; default: no bound
# max_gpus = 16               # example: most GPUs of all evaluations together; default: no bound
# leave_nodes_free = 0        # idle nodes to leave to others
# best_effort = "scavenge"    # example: partitions whose jobs are preempted, used for nodes that [cluster] partition lacks
# best_effort_qos = "low"     # example: QOS of jobs there; default: [cluster] qos

[nodes]
# include = []                # the only nodes for jobs with GPUs, as Slurm hostlists, e.g. ["gpu[01-16]", "dgx1"]
# exclude = []                # nodes without jobs of evalspan, e.g. ["gpu[03,07]"]
# gpu_types = []              # GPU types to use, as Gres names them, e.g. ["a100", "h100"]; default: any
# features = []               # features that a node for jobs with GPUs has, all of them, e.g. ["nvlink"]
# gpu_memory_gb = {{}}          # GB of a GPU by its type, where the name does not say it, e.g. {{ h100 = 94 }}
# wake = false                # true: jobs may boot nodes that Slurm has powered down (idle~)

[checkpoint]
# allow_bin = false           # true: take pickled weights, which run code when they are loaded
# convert = "python dcp_to_hf.py {{src}} {{dst}}"   # example: command for checkpoints in training's own format; a CPU job, cached
# convert_memory_mb = 65536   # example: MB that a conversion asks of Slurm; default: twice the checkpoint and 4 GB

# Written at each evaluation's end; each needs its package (docs/results/trackers.md).
[trackers]
# tensorboard_dir = "tb"      # example: folder of TensorBoard's event files
# wandb_project = "pretraining"   # example: project of W&B; offline runs lie in the work folder below trackers/
# wandb_mode = "offline"      # when W&B gets them; "online" sends at once
# mlflow_uri = "http://mlflow.site:5000"   # example: MLflow's server, or file:///path of a file store
# mlflow_experiment = "evalspan"   # name of MLflow's experiment

# What the daemon keeps of evaluations that ended `older_than` ago; scores and journals always (docs/operations/retention.md).
[retention]
# keep = "scores"             # example: what stays: "scores" alone, or "responses" and samples too; default: nothing goes
# older_than = "30d"          # time since an evaluation's end, also "12h" or "8w"
# baselines = []              # evaluations that lose nothing, by id or glob of ids, e.g. ["step-100000-*"]; `prune` heeds it, too

# Of the daemon, for Prometheus (docs/results/alerts.md); needs `pip install 'evalspan[metrics]'`.
[metrics]
# listen = "127.0.0.1:9464"   # example: HOST:PORT that Prometheus scrapes; default: no metrics

# News of the daemon as JSON: an evaluation ended, failed or is parked, a score fell beyond its error.
[notify]
# command = ["/home/me/tell"] # example: program and arguments; it reads the JSON from its standard input
# webhook = "https://chat.site/hook"   # example: gets the JSON by POST
# webhook_file = "webhook.url"         # example: in place of webhook a file of mode 0600 with the address, where who knows it may post
"""
