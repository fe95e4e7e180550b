"""Options of Slurm commands from a few settings, here or as the ordinary user of a development cluster."""

import uuid
from dataclasses import fields, replace

from coordinator.site.cluster.sbatch_text import SlurmOptions
from coordinator.site.config.schema import Config

OWN = {field.name for field in fields(SlurmOptions)}


def slurm_options(like=None, slurm=None, nodes=None, borrow=None, **more):
    """Other settings for what `like` has beside them.

    `slurm`, `nodes`, `borrow`: those sections. `more`: keys of [cluster], or fields of SlurmOptions.
    """
    own = {key: value for key, value in more.items() if key in OWN}
    cluster = {key: value for key, value in more.items() if key not in OWN}
    sections = {"cluster": cluster, "slurm": slurm or {}, "nodes": nodes or {}, "borrow": borrow or {}}
    return replace(like or SlurmOptions(), settings=Config.model_validate(sections), **own)


def on_site(site, path="", **more):
    """Those of the site's user, with a token of their own. `path`: a folder before the user's PATH; `more`: as above."""
    env = dict(site.user_env)
    prefix = tuple(site.user_argv(["x"])[:-1])
    if path:
        env["PATH"] = f"{path}:{env['PATH']}"
        prefix = (*site.user_argv(["env"]), f"PATH={env['PATH']}")
    own = {"partition": "gpu", "cpu_partition": "cpu", "token": f"t:{uuid.uuid4().hex[:8]}"}
    return slurm_options(**{**own, "command_prefix": prefix, "env": env, **more})
