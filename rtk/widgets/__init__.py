"""Widgets for JupyterLab. They take a session, and never talk to a server themselves."""

from rtk.extras import need

need("ipywidgets", "rtk.widgets")

from rtk.widgets.sampler import Sampler  # noqa: E402 - the check comes before what it checks for

__all__ = ["Sampler"]
