"""The report: one HTML file about one run or several, which needs nothing else to be looked at.

Data flows one way: run folders (written by `folder`) -> `runs`, `examples`, `course`, `comparison`
(what is known) -> `sections` (`figures`, `gallery`: what is said of it) -> `blocks` -> `page`.
"""

from microclip.report.folder import RunFolder

__all__ = ["RunFolder"]
