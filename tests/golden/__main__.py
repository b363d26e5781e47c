"""Write expected outputs again: `python -m tests.golden [plans] [runs] [SLURM_SANDBOX_FOLDER]`; all without words.

`runs` starts real jobs, for a minute. Those on SLURM need a sandbox: `slurm/sandbox --folder DIR up`, and DIR here.
"""

import sys

from tests.golden import plans, runs

words = sys.argv[1:] or ["plans", "runs"]
for word in sorted(words, reverse=True):  # plans clears the environment: it comes last
    if word == "runs":
        runs.record_local()
    elif word != "plans":
        runs.record_on_slurm(word)
if set(words) - {"plans"}:
    runs.write_shapes()
if "plans" in words:
    plans.write_all()
