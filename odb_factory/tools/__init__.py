"""The tools behind the `odb-factory` command: plan a run, check the machine, fetch data, make a demo."""
