"""From a command line to what is asked of memory: the model, the layout, the settings, the device."""

from launcher.config import training
from launcher.fit import choice, memory
from launcher.programs import options, transformer


def test_the_programs_own_rule_and_defaults() -> None:
    assert training.MAX_DEFAULT_SEQ_LEN == options.MAX_DEFAULT_SEQ_LEN
    assert options.TrainConfig().batch_size == choice.DEFAULT_BATCH
    assert memory.CHUNK == transformer.CHUNK
