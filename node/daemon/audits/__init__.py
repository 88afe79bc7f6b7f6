"""Audits: keep what an auditor needs, repeat the work of other peers, and judge it."""
