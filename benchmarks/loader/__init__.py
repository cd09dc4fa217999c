"""The loader alone: a plain `DataLoader`, the public package and `OdbDataLoader` over the same samples."""
