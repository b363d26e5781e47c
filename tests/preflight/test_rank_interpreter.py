"""The ranks' interpreter, by the program's words."""

import pytest

from launcher.preflight.rank_interpreter import find_rank_python


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (("python", "train.py"), {}, "python"),
        (("/opt/venv/bin/python3.12", "-m", "train"), {}, "/opt/venv/bin/python3.12"),
        ((".venv/bin/python", "train.py"), {"PYTHON_EXEC": "/x/python"}, "/srv/job/.venv/bin/python"),
        (("train.py", "--lr", "1"), {}, ""),
        (("train.py",), {"PYTHON_EXEC": "/x/python"}, "/x/python"),
        (("-m", "launcher.programs.train"), {"PYTHON_EXEC": "python3"}, "python3"),
        (("./start.sh", "python"), {"PYTHON_EXEC": "/x/python"}, ""),
        (("pythonic",), {}, ""),
        ((), {}, ""),
    ],
)
def test_the_interpreter(argv: tuple[str, ...], environ: dict[str, str], expected: str) -> None:
    assert find_rank_python(argv, environ, "/srv/job") == expected
