"""The commands of `murmur`: their declarations, apart from those in `node.cli`, and the small ones as a whole."""
