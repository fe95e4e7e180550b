"""`evalspan` with these words, in this process."""

from typer.testing import CliRunner

from coordinator.interface.cli import app


def typed(*words, code=0, **how):
    """What came of it: `stdout`, `output`, `exception`; fails where it ended with another exit code. `how`: of CliRunner."""
    done = CliRunner().invoke(app, list(map(str, words)), **how)
    assert done.exit_code == code, (done.output, done.exception)
    return done
