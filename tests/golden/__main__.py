"""Write expected outputs again: `python -m tests.golden [plans] [report] [runs] [FOLDER_OF_A_SANDBOX]`.

Without words, all but those on SLURM, which need a cluster: `slurm/sandbox --folder FOLDER up`.
`runs` starts real jobs, for a minute.
"""

import sys

from tests.golden import plans, report, runs

words = sys.argv[1:] or ["plans", "report", "runs"]
for word in sorted(words, reverse=True):  # plans clears the environment: it comes last
    if word == "runs":
        runs.record_local()
    elif word == "report":
        report.write_tables()
    elif word != "plans":
        runs.record_on_slurm(word)
if set(words) - {"plans", "report"}:
    runs.write_shapes()
if "plans" in words:
    plans.write_all()
