"""Which variables Python code asks for while modules are imported."""

import os
from collections import deque
from collections.abc import Iterator

TYPE_CHECKING = False
if TYPE_CHECKING:
    EncodedVariables = dict[bytes, bytes]
else:
    EncodedVariables = dict


class RecordedVariables(EncodedVariables):
    """The dictionary behind `os.environ`, which notes the names that are looked up.

    A copy of all variables looks each one up in order, and asks for none by name: it is not noted.
    """

    def __init__(self, variables: "dict[bytes, bytes]") -> None:
        super().__init__(variables)
        self.names: set[bytes] = set()
        self.copied: deque[bytes] = deque()

    def __getitem__(self, name: bytes) -> bytes:
        if self.copied and name == self.copied[0]:
            self.copied.popleft()
        else:
            self.copied.clear()
            self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            self.names.add(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[bytes]:
        self.copied = deque(self.keys())
        return super().__iter__()


class EnvironRecorder:
    """Records what Python code reads from `os.environ`, and what it changes there."""

    def __init__(self) -> None:
        self.before = dict(os.environ)
        self.recorded = RecordedVariables({os.fsencode(n): os.fsencode(v) for n, v in self.before.items()})
        self.kept = vars(os.environ)["_data"]
        vars(os.environ)["_data"] = self.recorded

    def stop(self) -> frozenset[str]:
        """Return the names that were read, and let `os.environ` be as it was, with what it holds now."""
        names = frozenset(map(os.fsdecode, self.recorded.names))
        self.kept.clear()
        self.kept.update(self.recorded)
        vars(os.environ)["_data"] = self.kept
        return names

    def list_changes(self) -> dict[str, str | None]:
        """Return the variables that the imports have set, and None for those that they have removed."""
        after = dict(os.environ)
        names = {*self.before, *after}
        return {name: after.get(name) for name in names if after.get(name) != self.before.get(name)}
