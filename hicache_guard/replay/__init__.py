"""Playing a record again on the real allocator of its release, and shrinking what it shows."""
