"""The parts of the page that the server renders."""
