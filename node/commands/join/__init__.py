"""Join a run: the command, invitations and the list of public runs."""
