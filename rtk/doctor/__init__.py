"""Is this server fit to give routes? A few short requests, and one named finding for each property.

    print(rtk.connect("http://127.0.0.1:8000").doctor())

or `rtk doctor http://127.0.0.1:8000` in a terminal.
"""

from rtk.doctor.examination import Target, examine
from rtk.doctor.known_faults import KNOWN_FAULTS, KnownFault
from rtk.doctor.report import DoctorReport, Finding

__all__ = ["KNOWN_FAULTS", "DoctorReport", "Finding", "KnownFault", "Target", "examine"]
