"""The verbs that show something and start nothing."""

import os
import sys
from collections.abc import Mapping

from launcher.job import plan_configured
from launcher.save import refuse_files
from launcher.schema import LaunchConfig
from launcher.sources import Sources


def show(verb: str, config: LaunchConfig, sources: Sources) -> int:
    """Do what `launch plan`, `topo` or `doctor` asks; return the exit code."""
    environ = {**os.environ, **config.env}
    if verb != "topo":
        refuse_files(f"launch {verb}", config)
    if verb == "plan":
        return show_plan(config, environ)
    if verb == "topo":
        from launcher.topo import show_topo

        return show_topo(config, environ)
    from launcher.checkup import show_checkup

    return show_checkup(config, environ)


def show_plan(config: LaunchConfig, environ: Mapping[str, str]) -> int:
    """Print the plan to stdout, as a table or as JSON."""
    plan = plan_configured(config, environ)
    if config.format == "json":
        import json

        from launcher.plan.codec import plan_to_json

        sys.stdout.write(json.dumps(plan_to_json(plan), indent=1) + "\n")
        return 0
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    print_placement(make_console(stderr=False), plan, explain=config.explain, full=True)
    return 0
