"""What an installation brings along: few imports, pinned versions, a licence, types."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import microclip
import microclip_lab

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
    lab = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]["dependencies"]
    names = {normal(re.match(r"[A-Za-z0-9_.-]+", each)[0]) for each in lab}
    assert names - {"microclip"} <= set(pinned)
    for extra in PROJECT["optional-dependencies"]:
        assert set(requirements(extra)) <= set(pinned), extra
    assert pinned["torch"] == "2.13.0"


def test_what_is_installed_is_what_is_pinned():
    """Also what dependencies brought along; this package, pip and a GPU's libraries aside."""
    aside = re.compile(r"microclip|microclip-lab|pip|setuptools|triton|nvidia-.*|cuda-.*")
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


def test_the_readme_of_the_distribution_has_absolute_links():
    """On a package index nothing lies beside it."""
    text = (
        metadata.metadata("microclip").get_payload()
        or metadata.metadata("microclip")["Description"]
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 5
    assert all(link.startswith(("https://", "#")) for link in links)


@pytest.mark.full
@pytest.mark.parametrize("folder", [".", "lab"])
def test_python_m_build(folder, tmp_path):
    """Source distribution and wheel, the wheel made of the source distribution, as indexes want."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "-o",
        str(tmp_path),
        str(ROOT / folder),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.endswith((".tar.gz", ".whl")) for name in names] == [True, True]
    wheel = next(tmp_path.glob("*.whl"))
    listed = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("py.typed") for name in listed)
    assert not any("test" in name.split("/")[0] for name in listed)
    (about,) = (name for name in listed if name.endswith(".dist-info/METADATA"))
    links = re.findall(r"\]\(([^)\s]+)\)", zipfile.ZipFile(wheel).read(about).decode())
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert any(name.endswith("licenses/LICENSE") for name in listed)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        assert not any("/lab/" in name for name in archive.getnames())


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_wheel_with_the_library_is_one_for_many_linuxes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "-w",
        "-o",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "-w", str(tmp_path / "fixed"), str(wheel)],
        check=True, capture_output=True, env={**os.environ, "PATH": tools},
    )  # fmt: skip
    (fixed,) = (tmp_path / "fixed").iterdir()
    assert "py3-none-manylinux" in fixed.name


def test_what_is_claimed_is_what_was_run():
    """Lower bounds and classifiers name versions that the tests ran with."""
    assert PROJECT["dependencies"] == [f"torch>={pins()['torch'].rpartition('.')[0]}"]
    listed = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c}
    assert listed == {f"{sys.version_info.major}.{sys.version_info.minor}"}


def test_both_distributions_have_one_version():
    assert microclip_lab.__version__ == microclip.__version__
    assert metadata.version("microclip-lab") == microclip_lab.__version__
