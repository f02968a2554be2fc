"""The report: a single, self-contained HTML file about one run or several.

Data flows one way: run folders (written by `folder`) -> `runs`, `run_data`, `comparison` (what is
known) -> `sections`, `figures`, `gallery` (what to say about it) -> `blocks` -> `page`, all tied
together in `write`. Writing run folders needs no extra, so any training loop can do it; the page
does.
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
