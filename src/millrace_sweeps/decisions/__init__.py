"""What a sweep decides, on plain data: which trials, which is stopped, which is best, how many at once."""
