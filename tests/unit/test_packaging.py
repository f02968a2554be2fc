"""What an installation brings along: few imports, pinned versions, a licence, types."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import microclip

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    stripped = [line.split("#")[0].strip() for line in lines]
    return dict(line.split("==") for line in stripped if line)


def requirements(extra=None):
    """Return the names that a requirement list asks for, extras of our own resolved."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    for requirement in listed:
        if own := re.match(r"microclip\[(.*)\]", requirement):
            for other in own[1].split(","):
                yield from requirements(other)
        else:
            yield normal(re.match(r"[A-Za-z0-9_.-]+", requirement)[0])


def test_the_core_needs_torch_alone():
    assert list(requirements()) == ["torch"]


def test_every_dependency_is_pinned():
    pinned = pins()
    for extra in PROJECT["optional-dependencies"]:
        assert set(requirements(extra)) <= set(pinned), extra
    assert pinned["torch"] == "2.13.0"


def test_what_is_installed_is_what_is_pinned():
    """Also what dependencies brought along; this package, pip and a GPU's libraries aside."""
    aside = re.compile(r"microclip|pip|setuptools|triton|nvidia-.*|cuda-.*")
    # not all of sys.path: setuptools, once imported, adds a folder of packages it carries along
    found = metadata.distributions(path=[sysconfig.get_path("purelib")])
    installed = {normal(d.name): d.version.split("+")[0] for d in found}
    ours = {name: version for name, version in installed.items() if not aside.fullmatch(name)}
    assert ours.items() <= pins().items()


def test_importing_brings_nothing_but_torch():
    """In an interpreter where every other dependency is missing."""
    extras = {name for extra in PROJECT["optional-dependencies"] for name in requirements(extra)}
    missing = sorted({"sklearn", "jinja2", "numpy", *(name.replace("-", "_") for name in extras)})
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import microclip\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))\n"
        "model = torch.nn.Linear(2, 1)\n"
        "microclip.Clipper(model, 1).backward(lambda x: model(x).mean(), torch.ones(2, 2))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    brought = set(done.stdout.split()) - sys.stdlib_module_names
    assert brought <= {"microclip", "torch", "torchgen"}


def test_what_a_distribution_must_have():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "src/microclip/py.typed").exists()
    assert metadata.version("microclip") == microclip.__version__
    assert "2408.16204" in (ROOT / "CITATION.cff").read_text()
