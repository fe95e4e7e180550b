"""Draws docs/pictures/eval.svg from a run of scripts/quickstart, as `evalspan eval` printed it:

.venv/bin/python scripts/eval_picture.py evalspan-work/EVALUATION
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console

from coordinator.report.measurements import Report
from coordinator.report.render import show

COLUMNS = 96
OUT = Path(__file__).parents[1] / "docs" / "pictures" / "eval.svg"


def main(evaluation: Path) -> None:
    """Write the picture of the evaluation in this folder."""
    report = Report.model_validate_json((evaluation / "report.json").read_bytes())
    results = json.loads((evaluation / "results.json").read_bytes())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    checkpoint = Path(report.checkpoint).name
    console.print(
        f"$ evalspan eval {checkpoint} --suite {report.suite}", style="bold", highlight=False, soft_wrap=True
    )
    show(console, report, results)
    drawn = console.export_svg(title="evalspan eval", unique_id="evalspan")
    OUT.write_text(re.sub(r" *@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL))  # rich's is of another host


if __name__ == "__main__":
    main(Path(sys.argv[1]))
