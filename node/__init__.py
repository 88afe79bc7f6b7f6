"""The daemon, the trainer and the commands: the only place where protocol and optim meet."""
