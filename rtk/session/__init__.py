"""A notebook's handle on one inference server."""

from rtk.session.connecting import connect
from rtk.session.session import Session

__all__ = ["Session", "connect"]
