"""Routes of one sequence as a value, its file, and whether a router can have made them."""

from rtk.trace.file import load_traces, save_traces
from rtk.trace.route_trace import RouteTrace

__all__ = ["RouteTrace", "load_traces", "save_traces"]
