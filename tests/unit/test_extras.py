"""Parts that need an extra say which one, when it is not installed."""

import subprocess
import sys

import pytest

ASK = """
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
try:
    {statement}
except ImportError as error:
    print(error)
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("missing", "statement", "extra"),
    [
        ("transformers", "import microclip.integrations.transformers", "hf"),
        ("accelerate", "import microclip.integrations.transformers", "hf"),
        ("accelerate", "import microclip.integrations.accelerate", "hf"),
        ("lightning", "import microclip.integrations.lightning", "lightning"),
        ("pyarrow", "import microclip; microclip.Ledger('somewhere')", "ledger"),
        ("numpy", "import microclip; microclip.guard", "ledger"),
        ("jinja2", "from microclip.report import write_report", "report"),
        ("plotly", "import microclip; microclip.report.write_report", "report"),
    ],
)
def test_the_error_names_the_command(missing, statement, extra):
    source = ASK.format(missing=missing, statement=statement)
    found = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert f"pip install 'microclip[{extra}]'" in found.stdout
