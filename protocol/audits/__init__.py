"""Audits: which contributions are repeated by whom, and what follows from the findings. PURE."""
