"""Modules that are loaded once something in them is used."""

import sys
from types import ModuleType


class LazyModule(ModuleType):
    """Stands for a module until one of its names is looked up."""

    def __getattr__(self, name: str) -> object:
        """Load the module, and return its attribute; raises AttributeError as the module does."""
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(__import__(self.__name__), name)


def import_lazily(name: str) -> None:
    """Let `import name` cost nothing until the module is used; a module that is loaded already stays."""
    sys.modules.setdefault(name, LazyModule(name))
