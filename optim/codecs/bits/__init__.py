"""Bit-level coding that several codecs share."""
