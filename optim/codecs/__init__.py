"""Codecs: wire formats for flat fp32 vectors."""
