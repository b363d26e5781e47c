"""The shim that each rank runs just before the user's program.

Every rank of every job pays for its imports: `dataclasses`, `json`, `collections`, `typing`, `pathlib` and
`signal` cost 2 to 13 ms each, more than all the work done here, so this package does without them.
"""
