"""`fit.check` at a start: who is refused, and who never is."""

from dataclasses import replace

import pytest

from launcher.config.fit_check import act_on
from launcher.config.schema import LaunchConfig
from launcher.errors import MachineError
from launcher.fit.fit_decision import assess
from launcher.fit.fit_model import Device
from tests.fit.made_requests import REQUEST


@pytest.mark.parametrize(("kind", "is_refused"), [("gpu", True), ("cpu", False)])
def test_a_job_on_cpus_is_warned_of_since_swap_may_hold_it(
    kind: str, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    report = assess(replace(REQUEST, is_bundled=True, device=Device("small", 64, kind=kind)))
    assert report.verdict == "does_not_fit"
    if is_refused:
        with pytest.raises(MachineError, match="does not fit"):
            act_on(report, LaunchConfig())
    else:
        act_on(report, LaunchConfig())
        assert "does not fit" in caplog.text
