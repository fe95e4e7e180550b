"""Plain lm_eval of what is on disk now: python plain.py ASKED.json OUT.json, in the tasks' folder, without evalspan."""

import json
import sys
from pathlib import Path

KEPT = ("doc_id", "target", "arguments", "resps", "filtered_resps", "filter", "number")


def main(asked):
    """Results and samples of each entry, one run an entry."""
    import torch
    from lm_eval import evaluator, simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    torch.set_num_threads(1)
    evaluator.add_env_info = lambda _results: None  # a list of packages by pip: a second a run
    found = {"results": {}, "samples": {}}
    for entry in asked["entries"]:
        made = simple_evaluate(
            model="hf",
            model_args=asked["model_args"],
            tasks=[entry["name"]],
            batch_size=entry["batch_size"],
            device="cpu",
            num_fewshot=entry.get("num_fewshot"),
            limit=entry.get("limit"),
            gen_kwargs=entry.get("gen_kwargs"),
            bootstrap_iters=0,
            system_instruction=asked["system_instruction"],
            apply_chat_template=asked["chat"],
            fewshot_as_multiturn=asked["chat"],
            **{f"{name}_seed": seed for name, seed in asked["seeds"].items()},
            task_manager=TaskManager(
                include_path=asked["tasks"], include_defaults=False, metadata=asked["model_args"]
            ),
            log_samples=True,
        )
        found["results"] |= made["results"] | made.get("groups", {})
        found["samples"] |= made["samples"]
    return json.loads(json.dumps(found, default=handle_non_serializable))


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
