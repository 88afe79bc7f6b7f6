"""The stages of a pipeline, and the machine of the peer that serves one."""
