"""A notebook's handle on one inference server."""

from rtk.session.session import Session, connect

__all__ = ["Session", "connect"]
