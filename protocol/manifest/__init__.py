"""Read the run manifest: its tables, its checks, and the line about a wrong one."""
