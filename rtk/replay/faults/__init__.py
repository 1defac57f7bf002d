"""The faults that were reported in the field, each made from clean traces, to see that a check catches it."""

from rtk.replay.faults.catalogue import Fault, Specimen, catalogue

__all__ = ["Fault", "Specimen", "catalogue"]
