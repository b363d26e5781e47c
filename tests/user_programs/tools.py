"""Looks at itself by the tools that programs have."""

import cProfile
import faulthandler
import io
import pstats
import sys
import tracemalloc

import torch


def work():
    torch.manual_seed(0)
    weight = torch.rand(64, 64)
    for _ in range(3):
        weight = torch.relu(weight @ weight.t()).softmax(1)
    return weight


def count_calls():
    profile = cProfile.Profile()
    profile.runcall(work)
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    return sorted((name[2], calls[0]) for name, calls in stats.stats.items())


def list_operators():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_stack=True
    ) as found:
        work()
    return sorted((event.key, event.count) for event in found.key_averages())


def main():
    print(float(work().sum()).hex())
    print(count_calls())
    print(list_operators())
    faulthandler.dump_traceback(all_threads=False)
    tracemalloc.start()
    kept = [bytes(1000) for _ in range(100)]
    print(
        len(tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__)]).traces) > 0,
        len(kept),
    )
    lines = set()

    def trace(frame, event, _argument):
        if frame.f_code is work.__code__ and event == "line":
            lines.add(frame.f_lineno - frame.f_code.co_firstlineno)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)
    print(sorted(lines))


if __name__ == "__main__":
    main()
