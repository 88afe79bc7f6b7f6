"""Connect the daemon with its trainer processes: shared memory, messages, process supervision."""
