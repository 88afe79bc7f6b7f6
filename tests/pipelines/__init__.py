"""Processes of pipelines that are killed, slowed and lied to; no gradient may count twice, and losses are counted."""
