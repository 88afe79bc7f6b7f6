"""Rules of a round: pure functions of the state of one peer, each file one question."""
