"""The part of vLLM that lm-eval's class and evalspan use, in small: a folder of transformers behind vLLM's names.

It stands in vLLM's place on the path of a test's interpreter, so that lm-eval's own vllm class runs. Each
step of the engine answers one request. With tensor parallelism it starts worker processes that, as
vLLM's, do not end with the process that started them, and segments of shared memory. It appends what
it is asked to the file FAKE_VLLM_LOG, a JSON object a line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEGMENT_BYTES = 1 << 20


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class TokensPrompt(dict[str, Any]):
    pass


def say(**what):
    if place := os.environ.get("FAKE_VLLM_LOG"):
        with Path(place).open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


class LLM:
    def __init__(self, model, seed, tensor_parallel_size=1, **_more):
        import torch

        torch.manual_seed(seed)
        say(caches=_more.get("enable_prefix_caching", True))
        self.llm_engine = Engine(model, tensor_parallel_size, _more.get("max_model_len"))

    def generate(self, prompts, *, sampling_params, **_how):
        engine = self.llm_engine
        say(submitted=len(prompts), seeds=[p.seed for p in sampling_params])
        for prompt, params in zip(prompts, sampling_params, strict=True):
            engine.add_request(str(next(engine.numbers)), prompt, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return sorted(outputs, key=lambda output: int(output.request_id))


class Engine:
    def __init__(self, folder, workers, max_model_len):
        import itertools

        import transformers

        multiprocess = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "1"
        say(
            model=folder,
            whole_path=os.path.realpath(folder),
            multiprocess=multiprocess,
            method=os.environ.get("VLLM_WORKER_MULTIPROC_METHOD"),
        )
        self.numbers = itertools.count()
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        length = max_model_len or self.network.config.max_position_embeddings
        self.model_config = SimpleNamespace(max_model_len=length)
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)
        self.workers = []
        self.segments = []
        count = workers if workers > 1 else int(multiprocess)
        context = multiprocessing.get_context(os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"))
        for _ in range(count):
            segment = shared_memory.SharedMemory(create=True, size=SEGMENT_BYTES)
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, segment.name, folder), daemon=True)
            process.start()
            self.workers.append(process)
            self.segments += [segment, shared_memory.SharedMemory(name=ours.recv())]
        names = [segment.name for segment in self.segments]
        say(loaded=True, workers=[process.pid for process in self.workers], segments=names)
        if os.environ.get("FAKE_VLLM_HANGS"):
            time.sleep(3600)

    def _shutdown(self):
        for process in self.workers:
            process.kill()
            process.join()
        for segment in self.segments[::2]:  # as its maker
            segment.close()
            segment.unlink()
        say(shutdown=True)

    def add_request(self, request_id, prompt, params):
        self.output_processor.request_states[request_id] = (list(prompt["prompt_token_ids"]), params)

    def abort_request(self, request_ids, internal=False):
        say(aborted=len(request_ids), internal=internal)
        for name in request_ids:
            del self.output_processor.request_states[name]

    def get_num_unfinished_requests(self):
        return len(self.output_processor.request_states)

    def has_unfinished_requests(self):
        return bool(self.output_processor.request_states)

    def step(self):
        import torch

        name = next(iter(self.output_processor.request_states))
        tokens, params = self.output_processor.request_states[name]
        with torch.no_grad():
            output = SimpleNamespace(request_id=name, finished=True, prompt_logprobs=None, outputs=[])
            if params.prompt_logprobs is not None:
                output.prompt_logprobs = self._logprobs(tokens)
            else:
                output.outputs = [SimpleNamespace(text=self._text(tokens, params))]
        del self.output_processor.request_states[name]
        return [output]

    def _logprobs(self, tokens):
        import torch

        scores = torch.log_softmax(self.network(torch.tensor([tokens])).logits[0], -1)
        rows = [None]
        for row, token in zip(scores[:-1], tokens[1:], strict=True):
            best = int(row.argmax())
            rows.append({token: float(row[token]), best: float(row[best])})
        return rows

    def _text(self, tokens, params):
        import torch

        draws = torch.Generator().manual_seed(params.seed) if params.seed is not None else None
        made = []
        while len(made) < params.max_tokens:
            scores = self.network(torch.tensor([tokens + made])).logits[0, -1]
            if params.temperature == 0:
                made.append(int(scores.argmax()))
            else:
                chances = torch.softmax(scores / params.temperature, -1)
                made.append(int(torch.multinomial(chances, 1, generator=draws)))
            text = str(self.tokenizer.decode(made, skip_special_tokens=params.skip_special_tokens))
            if any(stop in text for stop in params.stop):
                return min((text.split(stop, 1)[0] for stop in params.stop), key=len)
        return text


def work(answers, name, folder):
    """A worker: it maps both segments, and lives on when its parent is gone."""
    theirs = shared_memory.SharedMemory(name=name)
    own = shared_memory.SharedMemory(create=True, size=SEGMENT_BYTES)
    assert (Path(folder) / "config.json").exists()
    answers.send(own.name)
    while theirs.size and own.size:
        time.sleep(3600)
