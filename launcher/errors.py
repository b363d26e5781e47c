"""The errors that end `launch`, each with its exit code and the fix."""

EXIT_USAGE = 2
"""A bad command line or configuration."""
EXIT_MACHINE = 3
"""The machine cannot do what was asked."""
EXIT_SCHEDULER = 4
"""The scheduler refused."""
EXIT_HANG = 124
"""The ranks hung, and `watch.on_hang=stop` ended them; timeout(1) ends with it too."""
EXIT_DEFECT = 70
"""A defect of ours (EX_SOFTWARE of sysexits.h)."""


class LaunchError(Exception):
    """What happened, with the values, and then the fix; shown as one line, without a traceback."""

    exit_code = EXIT_MACHINE


class UsageError(LaunchError):
    """The command line or the configuration is wrong."""

    exit_code = EXIT_USAGE


class MachineError(LaunchError):
    """The machine cannot do what was asked."""


class SchedulerError(LaunchError):
    """The scheduler refused, or does not answer."""

    exit_code = EXIT_SCHEDULER
