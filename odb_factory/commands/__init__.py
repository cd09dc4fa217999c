"""The subcommands of `odb-factory`: a module each, light to import, with `add_arguments` and `run`."""
