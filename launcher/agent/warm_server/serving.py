"""What `sitecustomize` calls in the warm process."""

import json
import os
import sys

OWN = "launcher"


def serve_ranks(text: str, hook: str, root: str, before: frozenset[str]) -> None:
    """Serve as the warm process until the launcher ends; returns in each rank that is forked.

    `text` is the variable from the launcher, `hook` our folder on PYTHONPATH, and `root`, first on
    `sys.path`, the folder of our package; `before` are the modules that were there before ours.
    """
    try:
        settings = json.loads(text)
        with open("/proc/self/comm", "rb") as file:
            name = file.read().rstrip(b"\n")
        from launcher.agent.warm_server.becoming import become_rank
        from launcher.agent.warm_server.forking import ForkServer, end_with_launcher

        end_with_launcher(int(settings["launcher"]))
        server = ForkServer(int(settings["socket"]), hook)
        sys.path.remove(root)  # the imports find what the program's find
        request, preloaded = server.run(list(settings["preload"]), before)
        sys.path.insert(0, root)
        become_rank(server, request, preloaded, name)
        forget_own_modules(root)
    except BaseException as error:  # the program must not run in this process
        os.write(2, f"launch-rank: the warm process has failed: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def forget_own_modules(root: str) -> None:
    """Remove all modules of ours, and their folders: the program may have some by the same names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == OWN]:
        del sys.modules[name]
    sys.path.remove(root)
    folder = os.path.join(root, OWN)
    for path in [path for path in sys.path_importer_cache if f"{path}/".startswith(f"{folder}/")]:
        del sys.path_importer_cache[path]
    if root not in sys.path:
        sys.path_importer_cache.pop(root, None)
