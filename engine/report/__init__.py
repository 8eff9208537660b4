"""Reports: a run's events as one HTML page and one JSON file.

Each part of a report is a class in a file of its own (`curves`, `spread`, `partition`, …) that takes in
events, states facts for `report.json` and shows them as a section of `report.html`; see `part.Part`.
"""

from mycelia.engine.report.build import Report, build_report, default_parts
from mycelia.engine.report.part import Figure, Part, Section, Table

__all__ = ["Figure", "Part", "Report", "Section", "Table", "build_report", "default_parts"]
