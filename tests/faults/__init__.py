"""Faults: interruptions, killed processes, full disks, two writers, and long runs.

``make faults`` runs many of them, ``make soak SECONDS=1800`` mixed calls for a long time;
`test_faults.py` runs a few.
"""
