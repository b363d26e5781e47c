"""`python -m tests.machines` makes conf/machine/ again from the descriptions."""

from .build import NAMES, SHIPPED, build_files

for name in NAMES:
    for file, text in build_files(name).items():
        (SHIPPED / file).write_text(text)
    print(name)
