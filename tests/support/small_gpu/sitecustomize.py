"""Read by every interpreter whose PYTHONPATH has this folder: a trial's model has the memory of SMALL_GPU_TOKENS.

Rule: a forward pass of more tokens, padding included, raises torch's out-of-memory error, as a GPU's would.
"""

import os
import sys

if "SMALL_GPU_TOKENS" in os.environ and {"evaljobs", "trial"} <= {*sys.orig_argv}:
    from evaljobs.trial.engines import loading

    _load = loading.load_engine

    def _on_a_small_gpu(*arguments, **keywords):
        import torch

        engine = _load(*arguments, **keywords)
        forward, most = engine.lm.model.forward, int(os.environ["SMALL_GPU_TOKENS"])

        def limited(input_ids=None, *more, **how):
            if input_ids is not None and input_ids.numel() > most:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {input_ids.numel()} tokens")
            return forward(input_ids, *more, **how)

        engine.lm.model.forward = limited
        return engine

    loading.load_engine = _on_a_small_gpu
