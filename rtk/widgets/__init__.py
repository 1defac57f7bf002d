"""Widgets for JupyterLab. They take a session, and never talk to a server themselves."""

from rtk.widgets.sampler import Sampler

__all__ = ["Sampler"]
