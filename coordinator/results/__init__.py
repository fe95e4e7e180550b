"""What came of evaluations: reports, and exports to trackers.

Rule: read from the files of evaluations; nothing here changes one. Start at `report/measurements.py`.
"""
