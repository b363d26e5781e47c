"""A sweeper plugin of Hydra's own form, for the tests: what it tries depends on what came out before."""

from pathlib import Path

PLUGIN = '''
import json
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class HalvingConf:
    _target_: str = "hydra_plugins.halving.HalvingSweeper"
    key: str = "program.x"
    start: float = 8.0
    batches: int = 2
    size: int = 1
    patient: bool = True


ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=HalvingConf, provider="tests")


class HalvingSweeper(Sweeper):
    """Takes half of the best value of each batch to the next."""

    def __init__(self, key, start, batches, size, patient):
        self.key, self.value, self.batches, self.size, self.patient = key, start, batches, size, patient

    def setup(self, *, hydra_context, task_function, config):
        self.folder = Path(config.hydra.sweep.dir)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        tried = []
        for batch in range(self.batches):
            values = [self.value + number for number in range(self.size)]
            jobs = [[f"{self.key}={value}", *arguments] for value in values]
            found = []
            for value, result in zip(values, self.launcher.launch(jobs, initial_job_idx=batch * self.size)):
                try:
                    found.append((result.return_value, value))
                except Exception as error:
                    if not self.patient:
                        raise
                    tried.append([value, str(error)])
            tried += [[value, objective] for objective, value in found]
            self.value = min(found)[1] / 2 if found else self.value / 2
        (self.folder / "tried.json").write_text(json.dumps(tried))
'''


def write_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin below a folder, and return the variables with which Hydra finds it."""
    (folder / "hydra_plugins").mkdir(parents=True)
    (folder / "hydra_plugins/halving.py").write_text(PLUGIN)
    return {"PYTHONPATH": str(folder)}
