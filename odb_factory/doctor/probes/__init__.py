"""What is asked in a Python process of its own: `python -m odb_factory.doctor.probes.<name> <odb_port>`."""
