"""`python -I -S cold.py ROOT`: import, probe, plan and JSON values once; prints each with its ms."""

import sys
from time import perf_counter

sys.path.insert(0, __file__.rpartition("/tests/")[0])
times = [perf_counter()]

from launcher.plan.json_form import plan_to_json  # noqa: E402  # the import is timed
from launcher.plan.model import Request  # noqa: E402
from launcher.plan.planner import plan  # noqa: E402
from launcher.probe.machine import probe  # noqa: E402

times.append(perf_counter())
machine = probe(sys.argv[1])
times.append(perf_counter())
made = plan(machine, Request())
times.append(perf_counter())
plan_to_json(made)
times.append(perf_counter())
parts = zip(("import", "probe", "plan", "JSON values"), times, times[1:], strict=False)
sys.stdout.write("".join(f"{name}\t{1e3 * (end - start)}\n" for name, start, end in parts))
