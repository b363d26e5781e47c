"""`python -I -S launcher/rank/__main__.py`: the shim without the site packages, for the fastest start."""

import os
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))

from launcher.rank.shim import main

sys.exit(main())
