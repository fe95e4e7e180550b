"""A server of OpenAI-compatible completions around a checkpoint: real log-probabilities, one request at a time."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@contextmanager
def completions_server(folder, *, echoes=True):
    """The address of a server. `echoes` False: it refuses to give a prompt's log-probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone, asked = threading.Lock(), []

    def completed(ids, body):
        """Greedy: the text, and of each token of the prompt and the answer its log-probability, and the best one."""
        start = len(ids)
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        for _ in range(body["max_tokens"]):
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            ids = [*ids, int(scores[-1].argmax())]
            text = tokenizer.decode(ids[start:])
            if cut := [text.index(stop) for stop in stops if stop in text]:
                text = text[: min(cut)]
                break
        own = [float(scores[at, token]) for at, token in enumerate(ids[1:])]
        best = [{"best": float(row.max())} for row in scores]
        return text, {"token_logprobs": [None, *own], "top_logprobs": [None, *best]}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            status, answer = 200, {"choices": []}
            if body.get("echo") and not echoes:
                status, answer = 400, {"error": {"message": "echo is not supported"}}
            else:
                prompt = body["prompt"]
                prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
                for index, one in enumerate(prompts):
                    ids = (
                        tokenizer(one, add_special_tokens=False)["input_ids"] if isinstance(one, str) else one
                    )
                    with alone:
                        text, logprobs = completed(ids, body)
                    answer["choices"].append({"index": index, "text": text, "logprobs": logprobs})
            sent = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/completions", asked
    finally:
        server.shutdown()
        server.server_close()
