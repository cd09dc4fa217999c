"""`odb-factory doctor`: checks whether a training run would work on this machine, and says what to do if not.

A check is a function in the module of its subject; `registry.py` lists them. Whatever is slow to import, or may crash,
runs in a *probe*: a separate Python process with a deadline.
"""
