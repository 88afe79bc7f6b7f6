"""The command line of `murmur`, apart from the commands themselves."""
