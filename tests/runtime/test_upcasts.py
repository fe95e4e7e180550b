"""The law of recorded histories: a release reads the journals of the one before it, open evaluations included."""

import gzip
import json
from pathlib import Path

import pytest

from coordinator.runtime.journal import Journal, read_events, replayed_state
from coordinator.runtime.make_summary import summary_of

HISTORIES = Path(__file__).parents[1] / "golden" / "histories"
NAMES = sorted(str(path.relative_to(HISTORIES)) for path in HISTORIES.rglob("*.jsonl.gz"))
OUTCOMES = json.loads((HISTORIES / "outcomes.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_histories_of_earlier_releases_are_replayed(name, tmp_path, caplog):
    """To what they came to then; each prefix of one is an evaluation that is open at the upgrade. Fails where `JOURNAL_FORMAT`
    was raised without a function in `UPCASTS`. Gone on with, the journal is of the present format and says the same.
    """
    path = tmp_path / "journal.jsonl"
    path.write_bytes(gzip.decompress((HISTORIES / name).read_bytes()))
    events = list(read_events(path))
    assert len(events) == len(path.read_bytes().splitlines())
    for end in range(1, len(events), max(1, len(events) // 20)):
        assert replayed_state(events[:end]).ended_at is None
    summary = summary_of(replayed_state(events), events[-1].at).model_dump(mode="json")
    assert {key: summary[key] for key in OUTCOMES[name]} == OUTCOMES[name]
    assert "skipped" not in caplog.text
    journal = Journal(path)
    journal.renew()
    assert list(journal.replay()) == events
    journal.close()
