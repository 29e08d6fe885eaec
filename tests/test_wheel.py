"""The wheel holds all that `specfit` needs, and nothing that gets in the way of other packages."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("*.whl")
    return path


def test_the_wheel_holds_our_packages_only(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {"specfit", "specfit_data", "specfit_kernels", "specfit_serve"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages


def test_the_wheel_holds_the_configuration(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (ROOT / "conf").rglob("*.yaml")
    assert {f"specfit/{path.relative_to(ROOT).as_posix()}" for path in files} <= names


def test_the_wheel_holds_the_samples(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    samples = (ROOT / "data" / "specfit_data" / "samples").rglob("*.*")
    assert {path.relative_to(ROOT / "data").as_posix() for path in samples} <= names


def test_an_installed_wheel_answers_from_any_folder(wheel, tmp_path):
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    # Its dependencies are those of this environment: a line in a .pth file is searched for
    # packages, but .pth files that lie there (that of an editable specfit) are not read.
    [site] = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    # The other specfit, if there is one, is in a folder that pip would not write to.
    subprocess.run(
        [sys.executable, *install, "--ignore-installed", "--no-index", str(wheel)], check=True
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["HOME"] = str(tmp_path)
    command = [folder / "bin" / "specfit", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "target: folder, llama31_8b" in done.stdout
    where = [python, "-c", "import sys, specfit; sys.stdout.write(specfit.__file__)"]
    done = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout).is_relative_to(folder)
