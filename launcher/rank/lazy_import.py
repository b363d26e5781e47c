"""Modules that are loaded when something of them is asked for."""

import sys
from types import ModuleType


class LaterModule(ModuleType):
    """Stands for a module until one of its names is looked up."""

    def __getattr__(self, name: str) -> object:
        """Load the module, and hand on what was asked for; raises AttributeError as it does."""
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(__import__(self.__name__), name)


def import_later(name: str) -> None:
    """Let `import name` cost nothing until the module is used; one that is loaded already stays."""
    sys.modules.setdefault(name, LaterModule(name))
