"""The report: one HTML file about one run or several, which needs nothing else to be looked at.

Data flows one way: run folders (written by `folder`) -> `runs`, `examples`, `course`, `comparison`
(what is known) -> `sections` (`figures`, `gallery`: what is said of it) -> `blocks` -> `page`.
Writing folders needs no extra, so that any training can do it; the page does.
"""

from typing import TYPE_CHECKING, Any

from microclip.report.folder import RunFolder

if TYPE_CHECKING:
    from microclip.report.write import write_report

__all__ = ["RunFolder", "write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":
        try:
            import plotly  # type: ignore[import-untyped]  # noqa: F401

            from microclip.report.write import write_report
        except ImportError as error:
            raise ImportError(
                f"microclip.report needs {error.name}: pip install 'microclip[report]'"
            ) from error
        return write_report
    raise AttributeError(f"module 'microclip.report' has no attribute {name!r}")
