"""The warm process: imports torch in the program's interpreter, before its first line, and forks the ranks.

It is the program's own interpreter, started with the program's command line, and held in `sitecustomize`
(`launcher.inprocess`). A forked rank returns from there, and the interpreter goes on to the program by
itself: `__main__`, `sys.path`, `-m`, tracebacks and the end are Python's own. Before that, all modules of
ours are removed. A rank that would not be as by itself is executed instead.
"""
