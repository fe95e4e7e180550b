"""lm-eval's model class without weights: it builds prompts and tokens and gives no answers.

Rule: everything but the forward pass is the class's own code, so it receives the requests that the
real model will receive. Called from `requests.build`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from evaljobs.contract.specs import ModelOptions
from evaljobs.errors import OperatorError, one_line
from evaljobs.lmeval.run import RequestsBuiltError

# Arguments of hf model classes that place weights on devices: of no use without weights.
PLACEMENT_ARGUMENTS = (
    "parallelize",
    "tp_plan",
    "device_map",
    "max_memory_per_gpu",
    "max_cpu_memory",
    "peft",
    "delta",
)
MISSPELT_RATIO = 0.8  # difflib's ratio from which one name counts as another, misspelt


def make_stub_model(model_dir: str, options: ModelOptions) -> Any:
    """Return lm-eval's model class with the checkpoint's config and tokenizer, without weights.

    The engine's own class is used if it is an hf one. For other engines `hf` builds prompts and counts tokens, and batches
    are stored as text for the engine to tokenise.
    """
    import torch  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    own = _hf_class(options.engine)
    base: Any = own or HFLM
    extra: dict[str, Any] = {}
    if own is None and "max_model_len" in options.model_args:
        extra = {"max_length": options.model_args["max_model_len"]}

    def stop(*_arguments: Any, **_keywords: Any) -> Any:
        raise RequestsBuiltError

    class Weightless(base):  # type: ignore[misc]
        asked: Sequence[Any] = ()
        loglikelihood = loglikelihood_rolling = generate_until = stop

        def _create_model(self, *_place: Any, **keywords: Any) -> None:
            trust = bool(keywords.get("trust_remote_code"))
            if own is not None:
                _check_arguments(options.model_args, own, self.config)
            with torch.device("meta"):
                model = self.AUTO_MODEL_CLASS.from_config(self.config, trust_remote_code=trust)
            model.to = lambda *_where, **_how: model  # there are no weights to move
            self._model = model

        def _loglikelihood_tokens(self, requests: Any, **_keywords: Any) -> Any:
            self.asked = list(requests)
            raise RequestsBuiltError

    arguments = {k: v for k, v in options.model_args.items() if k not in PLACEMENT_ARGUMENTS} | extra
    arguments |= {"pretrained": model_dir, "device": "cpu", "batch_size": 1 << 30}
    try:
        lm = Weightless(**arguments)
    except OSError as error:
        raise OperatorError(_unreadable(model_dir, error)) from error
    if lm.prefix_token_id is None:
        said = "the tokenizer has neither bos_token nor eos_token: name them in tokenizer_config.json"
        raise OperatorError(f"{model_dir}: {said}")
    lm.is_text = own is None
    if "peft" not in options.model_args:  # lm-eval enlarges a model for its adapter's tokenizer
        _check_vocabulary(lm)
    return lm


def _check_arguments(given: Mapping[str, Any], own: Any, config: Any) -> None:
    """Raise OperatorError for an unknown dtype, and for a name that is nearly one of lm-eval's, transformers' or the config's.

    Other names are left to the model's load, since its own code may take them.
    """
    import torch  # noqa: PLC0415
    from transformers import PreTrainedModel  # noqa: PLC0415

    dtype = given.get("dtype", "auto")
    if (
        isinstance(dtype, str)
        and dtype != "auto"
        and not isinstance(getattr(torch, dtype, None), torch.dtype)
    ):
        raise OperatorError(f"[trial] model_args: torch has no dtype {dtype!r}, such as bfloat16 or float32")
    # `from_pretrained` takes most of its arguments out of its keywords, by names that only its code has
    known = {*PreTrainedModel.from_pretrained.__code__.co_consts, *vars(config)}
    for part in own.__mro__[:-1]:
        known |= inspect.signature(part.__init__).parameters.keys()
    names = [name for name in known if isinstance(name, str)]
    for name in given.keys() - known:
        if meant := difflib.get_close_matches(name, names, 1, MISSPELT_RATIO):
            raise OperatorError(f"[trial] model_args: unknown {name!r}; did you mean {meant[0]!r}?")


def _check_vocabulary(lm: Any) -> None:
    """Raise OperatorError if the tokenizer has ids without an embedding in the model."""
    with contextlib.suppress(
        NotImplementedError
    ):  # a tokenizer without a table, or a model without one embedding
        rows = lm.model.get_input_embeddings().weight.shape[0]
        known = lm.tokenizer.get_vocab()
        if lm.tokenizer.eos_token is None:
            known.pop(lm.tokenizer.pad_token, None)  # lm-eval adds one then
        token, highest = max(known.items(), key=itemgetter(1))
        if highest >= rows:
            raise OperatorError(
                f"the tokenizer has ids up to {highest} ({token!r}), and the model has {rows} embeddings: save the tokenizer "
                "that training used, or the model after resize_token_embeddings"
            )


def _unreadable(model_dir: str, error: OSError) -> str:
    if not Path(model_dir).is_dir():
        return f"{model_dir} is gone: the checkpoint was deleted while it was needed"
    return f"{model_dir} has no config or tokenizer: {one_line(error)}"


def keep_histories(lm: Any) -> None:
    """Make a stub record, in `histories`, the messages behind each prompt of its template."""
    render = lm.apply_chat_template
    lm.histories = {}

    def kept(messages: Sequence[dict[str, str]], *more: Any, **keywords: Any) -> str:
        copies = [dict(message) for message in messages]
        text = str(render(messages, *more, **keywords))
        lm.histories[text] = copies
        return text

    lm.apply_chat_template = kept


def tokens_asked(lm: Any, method: str, instances: Sequence[Any]) -> list[Any]:
    """Return arguments of lm-eval's forward pass: (strings or None, context ids, continuation ids)."""
    lm.asked = ()  # an empty text has no window
    with contextlib.suppress(RequestsBuiltError):
        getattr(super(type(lm), lm), method)(list(instances), disable_tqdm=True)
    return list(lm.asked)


def _hf_class(engine: str) -> Any:
    """Return the engine's class if it is an hf one that this node can import, otherwise None."""
    from lm_eval.api.registry import get_model  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415

    try:
        own = get_model(engine)
    except ImportError:
        return None
    except (ValueError, KeyError) as error:
        raise OperatorError(f"lm-eval has no model class {engine!r}: {one_line(error)}") from error
    return own if issubclass(own, HFLM) else None
