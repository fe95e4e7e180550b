"""Accounts, QOS and their limits on a user's jobs, from the output of sacctmgr and scontrol. Pure.

Rule: limits are those that slurmctld applies: if QOS and association both set a limit, the QOS takes precedence. Source:
slurm.schedmd.com/resource_limits.html. Called by `slurm_rules`, which keeps jobs within MaxWall, and by `evalspan doctor`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.site.cluster.slurm_limits import LIMIT_NAMES, PARTITION_QOS, Limit
from coordinator.site.cluster.slurm_parse import seconds_of

USER_FORMAT = (
    "defaultaccount,account,partition,defaultqos,"
    "qos,maxjobs,maxsubmit,maxtres,maxtrespernode,grptres,grpjobs,grpsubmit,maxwall"
)
ACCOUNT_FORMAT = "account,parentname,grptres,grpjobs,grpsubmit"
QOS_FORMAT = (
    "name,mintres,maxtres,maxtrespernode,maxtrespu,maxtrespa,grptres,"
    "maxjobspu,maxjobspa,grpjobs,maxsubmitpu,maxsubmitpa,grpsubmit,maxwall"
)
_OVERRIDES = {
    "MaxJobs": ("MaxJobsPerUser", "MaxJobsPerAccount"),
    "MaxSubmitJobs": ("MaxSubmitJobsPerUser", "MaxSubmitJobsPerAccount"),
}  # limit of an association -> limits of a QOS that replace it
_UNITS = "KMGTP"  # of 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """One user's associations, and their accounts and QOS, as rows of sacctmgr: field -> text."""

    associations: Sequence[Mapping[str, str]] = ()
    accounts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    qos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def own_accounts(self) -> list[str]:
        return sorted({row["account"] for row in self.associations})

    def qos_of(self, account: str | None) -> list[str]:
        """Return the QOS available to jobs of this account. None: the user's default account."""
        rows = [row for row in self.associations if row["account"] == (account or row["defaultaccount"])]
        return sorted({name for row in rows for name in row["qos"].split(",") if name})

    def association(self, account: str | None, partitions: Sequence[str]) -> Mapping[str, str] | None:
        """Return the association of a job: that of its partition if there is one, otherwise that of all. None: there is none."""
        rows = [row for row in self.associations if row["account"] == (account or row["defaultaccount"])]
        near = [row for row in rows if row["partition"] in partitions]
        return next(iter(near + [row for row in rows if not row["partition"]]), None)

    def limits(
        self,
        account: str | None,
        qos: str | None,
        partitions: Sequence[str],
        partition_qos: Sequence[str] = (),
    ) -> list[Limit]:
        """Return all limits on a job with this account, QOS and partitions; None: the defaults.

        Order: the partitions' QOS, the job's QOS, the association and its accounts. A limit hides the same one of later
        levels.
        """
        row = self.association(account, partitions)
        if row is None:
            return []
        levels = [[(f"{PARTITION_QOS}{name}", self.qos.get(name, {})) for name in partition_qos]]
        named = qos or row["defaultqos"]
        levels.append([(f"QOS {named}", self.qos.get(named, {}))])
        levels.append([(f"your association with account {row['account']}", row)])
        levels[-1] += [(f"account {name}", self.accounts[name]) for name in self.parents(row["account"])]
        found: list[Limit] = []
        for level in levels:
            hidden = {(limit.name, limit.what) for limit in found}
            for holder, fields in level:
                found += [
                    limit
                    for limit in _limits(holder, fields)
                    if hidden.isdisjoint(
                        (name, limit.what) for name in (limit.name, *_OVERRIDES.get(limit.name, ()))
                    )
                ]
        return list(dict.fromkeys(found))

    def parents(self, account: str) -> list[str]:
        """Return the account and those above it, as far as they are known."""
        found: list[str] = []
        while account in self.accounts and account not in found:
            found.append(account)
            account = self.accounts[account]["parentname"]
        return found


def _limits(holder: str, fields: Mapping[str, str]) -> Iterator[Limit]:
    for key, name in LIMIT_NAMES.items():
        text = fields.get(key, "")
        seconds = seconds_of(text)
        amounts = {"wall": seconds} if seconds is not None else parse_tres(text)
        for what, most in ({"jobs": int(text)} if text.isdigit() else amounts).items():
            yield Limit(name=name, what=what, most=most, holder=holder)


def parse_tres(text: str) -> dict[str, int]:
    """Parse amounts in "cpu=4,mem=15.50G,gres/gpu=2"; mem in MiB. Entries without a number are omitted."""
    found = re.findall(rf"([^\s,=]+)=([0-9.]+)([{_UNITS}]?)(?=,|$)", text)
    amounts = {}
    for what, number, unit in found:
        power = "MGTP".index(unit or "M") if what == "mem" else f" {_UNITS}".index(unit or " ")
        amounts[what] = int(float(number) * 1024**power)
    return amounts


def parse_rows(text: str, fields: str) -> list[dict[str, str]]:
    """Parse rows of `sacctmgr` or `sacct` with -n and -P as field -> text; rows of another width are omitted."""
    names = fields.split(",")
    rows = [line.split("|") for line in text.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
