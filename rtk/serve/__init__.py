"""The embedded server: a small real MoE model on this machine's CPU, speaking vLLM's HTTP.

It is to vLLM what SQLite is to PostgreSQL: nothing to set up, one user, and true forward passes.
"""

from rtk.serve.process import EmbeddedServer, embedded

__all__ = ["EmbeddedServer", "embedded"]
