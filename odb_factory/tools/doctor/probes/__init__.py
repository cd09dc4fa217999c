"""What is asked in a Python process of its own: `python -m odb_factory.tools.doctor.probes.<name> <odb_port>`."""
