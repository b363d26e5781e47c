"""`python -m tests.golden`: write the expected outputs again."""

from tests.golden.plans import write_all

write_all()
