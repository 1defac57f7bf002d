"""Generation through one proxy, and control over every server behind it."""

from rtk.fleet.client import RemoteInferenceClient

__all__ = ["RemoteInferenceClient"]
