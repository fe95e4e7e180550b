"""`evalspan supervise`: a training that is started again after failures that another start can help."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import typer

from coordinator.cli.app import Where, command, option, say
from coordinator.errors import OperatorError

WRAPPER = "train-with-eval.sbatch"


@command(context_settings={"allow_extra_args": True})
class Supervise(Where):
    """Run a training's COMMAND, and run it again from its newest whole checkpoint after failures that a restart can help.

    It is also ended and run again where it hangs. COMMAND finds the checkpoint in $EVALSPAN_RESUME_FROM (empty: from the
    beginning). Where COMMAND is sbatch, its job is followed, and after failures of nodes those are checked, and bad ones left
    out. Examples:

    evalspan supervise --max-restarts 3 -- sbatch --nodes=4 SCRIPTS/train-with-eval.sbatch runs/7b core -- srun python train.py

    evalspan supervise --max-restarts 3 --checkpoints runs/7b -- torchrun train.py
    """

    max_restarts: int = option("Restarts at most.", "--max-restarts", min=0, default=3)
    checkpoints: str = option(
        f"Folder, or a quoted glob, of its checkpoints. Default: the folder that {WRAPPER} gets.", default=""
    )
    hang: float = option(
        "Seconds without output and heartbeat after which it hangs; 0: never.", min=0, default=1800.0
    )
    pause: float = option(
        "Seconds before a restart; doubled with each that brought no checkpoint.", min=0, default=10.0
    )

    def run(self) -> None:
        from coordinator.supervise.run import Supervision

        if not self.rest:
            raise OperatorError("name the training's command behind --: evalspan supervise -- COMMAND")
        batch = Path(self.rest[0]).name == "sbatch"
        supervision = Supervision(
            config=self.settings({"cluster.kind": "slurm"} if batch else None),
            argv=self.rest,
            place=self._place(),
            most=self.max_restarts,
            hang_seconds=self.hang,
            first_pause=self.pause,
            say=lambda line: say(f"supervise: {line}", err=True),
        )
        raise typer.Exit(supervision.run())

    def _place(self) -> str:
        named = (after for word, after in pairwise(self.rest) if word.endswith(WRAPPER))
        place = self.checkpoints or next(named, "")
        if not place:
            raise OperatorError("--checkpoints: name the folder where the training leaves its checkpoints")
        if Path(place).is_file():
            raise OperatorError(
                f"--checkpoints {place}: is a file: name the folder that holds the checkpoints"
            )
        return str(Path(place).absolute())
