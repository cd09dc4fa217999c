"""What the alignment costs as the world grows: bytes and time a round, and the start of many ranks."""
