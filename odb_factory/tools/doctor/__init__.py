"""What `odb-factory doctor` looks at: whether a training run would work on this machine, and what to do where not.

A check is a function in a module of its subject; `registry.py` lists them. What is heavy, or may end a process, runs in
a *probe*: a Python process of its own, with a deadline.
"""
