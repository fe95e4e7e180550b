"""scripts/chaos [daemon | metrics] OPTION…: one of the three campaigns."""

from __future__ import annotations

import sys

from bench.harness import command

from chaos_lib import evaluations, metrics, storm

CAMPAIGNS = {"daemon": storm, "metrics": metrics}
given = sys.argv[1:]
name = given.pop(0) if given and given[0] in CAMPAIGNS else ""
campaign = CAMPAIGNS.get(name, evaluations)
title, slurm = f"chaos {name}".strip(), campaign is not metrics
sys.exit(command(title, campaign.__doc__, campaign.measure, *campaign.OPTIONS, argv=given, slurm=slurm))
