"""The run manifest: its tables, how it is read, and what is said of a wrong one."""
