"""What `odb-factory plan` says of an epoch against what `llamafactory-cli train` then does."""
