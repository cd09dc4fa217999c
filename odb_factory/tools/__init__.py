"""What surrounds a training: plan it, check the machine, get data, make a demo; the `odb-factory` command's parts."""
