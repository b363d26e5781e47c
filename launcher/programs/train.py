"""Train a language model: `python -m launcher.programs.train`, or under torchrun with the same options."""

import signal

from launcher.programs.options import parse_config


def main() -> None:
    """Run the program; `--help` and mistakes on the command line need no torch, which takes two seconds.

    Until the training loop handles signals, SIGINT ends it without a traceback, and SIGUSR2 does nothing. A
    SIGINT that was ignored at the start (nohup, a shell's background job) stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    config = parse_config()
    from launcher.programs.training import run  # noqa: PLC0415 - see above

    run(config)


if __name__ == "__main__":
    main()
