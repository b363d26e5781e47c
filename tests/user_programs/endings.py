"""Ends in the way that its argument says."""

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import warnings

import torch


class Noisy:
    def __del__(self):
        print("freed", file=sys.stderr)
        raise ValueError("in __del__")


def fail(depth):
    if depth:
        fail(depth - 1)
    raise RuntimeError("a failure with ünïcode") from KeyError("its cause")


def end(way):
    if way == "exit-code":
        sys.exit(3)
    if way == "exit-message":
        sys.exit("a message\nof two lines")
    if way == "exit-none":
        sys.exit(None)
    if way == "exit-large":
        sys.exit(300)
    if way == "uncaught":
        fail(2)
    if way == "group":
        raise ExceptionGroup("several", [ValueError(1), TypeError("two")])
    if way == "hook":
        sys.excepthook = lambda kind, value, trace: print("hooked", kind.__name__, value, file=sys.stderr)
        fail(0)
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "sigint":
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    if way == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "segv":
        import faulthandler

        faulthandler.enable()
        faulthandler._sigsegv()
    if way == "abort":
        os.abort()
    if way == "os-exit":
        print("not flushed", end="")
        os._exit(7)
    if way == "thread":
        thread = threading.Thread(target=fail, args=(0,), name="mine")
        thread.start()
        thread.join()
    if way == "late-thread":
        threading.Timer(0.2, print, ["from a thread after the main one"]).start()
    if way == "atexit":
        for text in ("one", "two"):
            atexit.register(print, "atexit", text)
        atexit.register(fail, 0)
    if way == "noisy":
        globals()["noisy"] = Noisy()
    if way == "warn":
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        warnings.warn("older", DeprecationWarning, stacklevel=2)
        torch.tensor(torch.ones(1))
    if way == "asyncio":

        async def work():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, lambda: print("asyncio got the signal"))
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.05)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('from a child')")
            print("child", await process.wait())
            return await asyncio.gather(*(asyncio.to_thread(int, text) for text in "123"))

        print(asyncio.run(work(), debug=True))
    if way == "handlers":
        signal.signal(
            signal.SIGTERM,
            lambda number, frame: sys.exit(f"{signal.Signals(number).name} at {frame.f_code.co_name}"),
        )
        signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "stdin":
        print(list(sys.stdin), sys.stdin.read())
        with contextlib.suppress(EOFError):
            input("ask? ")
    if way == "closed":
        sys.stdout.close()
    if way == "re-exec":
        if "AGAIN" not in os.environ:
            os.environ["AGAIN"] = "1"
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        print("executed again", sys.argv[1:])
    if way == "pdb":
        import pdb

        number = 41
        pdb.set_trace()
        print("number", number)
    if way == "breakpoint":
        number = 41
        breakpoint()
        print("number", number)


if __name__ == "__main__":
    print("begins", sys.argv[1])
    end(sys.argv[1])
    print("ends")
