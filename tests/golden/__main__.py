"""Write expected results again: `python -m tests.golden [WORD ...]`.

Words are `machines`, `plans`, `outputs`, `report`, `runs` and folders of clusters.

Without words, all but those on SLURM, which need the folder of a cluster: `slurm/sandbox --folder FOLDER up`.
`runs` starts real jobs, for a minute.
"""

import sys

from tests.golden import outputs, plans, runs
from tests.probe import test_odd_machines
from tests.report import test_page

words = sys.argv[1:] or ["machines", "plans", "outputs", "report", "runs"]
for word in sorted(words, reverse=True):  # plans and outputs clear the environment: they come last
    if word == "runs":
        runs.record_local()
    elif word == "report":
        test_page.write_tables()
    elif word == "machines":
        test_odd_machines.write()
    elif word not in ("plans", "outputs"):
        runs.record_on_slurm(word)
if set(words) - {"machines", "plans", "outputs", "report"}:
    runs.write_shapes()
if "plans" in words:
    plans.write_all()
if "outputs" in words:
    outputs.write_all()
