"""What several tests share: arrays of each library, callers in threads, recorded answers."""
