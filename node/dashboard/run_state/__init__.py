"""The parts of the run's state: rounds, contributors, grouped log lines, the trend of the loss. Pure."""
