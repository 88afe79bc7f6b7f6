"""What is sent in which round, and with which options."""
