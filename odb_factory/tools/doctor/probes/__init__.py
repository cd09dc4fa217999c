"""Checks that run in a separate Python process: `python -m odb_factory.tools.doctor.probes.<name> <odb_port>`."""
