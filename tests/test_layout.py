"""The rules of the layout that no tool checks by itself."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "specfit": ROOT / "specfit",
    "specfit_kernels": ROOT / "kernels" / "specfit_kernels",
    "specfit_serve": ROOT / "serve" / "specfit_serve",
    "specfit_data": ROOT / "data" / "specfit_data",
}
MAY_IMPORT = {
    "specfit": {"specfit_kernels", "specfit_serve", "specfit_data"},
    "specfit_kernels": set(),
    "specfit_serve": {"specfit_kernels"},
    "specfit_data": set(),
}
SHIPPED = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
CODE = SHIPPED + sorted((ROOT / "tests").glob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """The modules that a file imports, anywhere in it; `a.b` of `from a import b`."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*modules: str) -> set[str]:
    return {
        name_of(path)
        for path in SHIPPED
        for module in imported(path)
        if module.split(".")[0] in modules
    }


def test_the_walk_sees_files_of_every_package():
    assert {name_of(path).split("/")[0] for path in SHIPPED} == {
        "specfit",
        "kernels",
        "serve",
        "data",
    }
    assert "specfit/cli.py" in importers("hydra")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package):
    for path in PACKAGES[package].rglob("*.py"):
        tops = {module.split(".")[0] for module in imported(path)}
        ours = {top for top in tops if top == "specfit" or top.startswith("specfit_")}
        assert ours <= MAY_IMPORT[package] | {package}, name_of(path)


def test_stages_do_not_import_each_other():
    stages = PACKAGES["specfit"] / "stages"
    for path in stages.rglob("*.py"):
        others = [module for module in imported(path) if module.startswith("specfit.stages")]
        assert others == [], name_of(path)


def test_hydra_stays_at_the_door():
    assert importers("hydra", "omegaconf") <= {"specfit/cli.py", "specfit/config.py"}


def test_triton_stays_in_the_kernels():
    assert {name.split("/")[0] for name in importers("triton")} <= {"kernels"}


def test_nothing_is_pickled():
    assert importers("pickle", "cloudpickle", "dill", "shelve", "marshal") == set()
    for path in SHIPPED:
        used = {
            f"{node.value.id}.{node.attr}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        assert not used & {"torch.load", "torch.save"}, name_of(path)


def test_nothing_is_printed_or_evaluated():
    for path in SHIPPED:
        called = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"print", "eval", "exec"}, name_of(path)


@pytest.mark.parametrize("folder", ["kernels", "serve", "data"])
def test_no_folder_shadows_a_package_of_its_name(folder):
    # With the working directory on sys.path, a regular package ./kernels is what
    # `from kernels import ...` in transformers would find in place of Hugging Face's.
    assert not (ROOT / folder / "__init__.py").exists()


def test_files_are_short():
    lengths = {name_of(path): path.read_text().count("\n") for path in CODE}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_functions_are_short():
    lengths = {
        f"{name_of(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SHIPPED
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert {name: n for name, n in lengths.items() if n > 60} == {}


def test_no_module_is_named_for_what_it_is_not():
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [name_of(path) for path in CODE if path.stem in vague or path.parent.name in vague] == []


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="there is no README yet")
def test_the_tree_in_the_readme_is_the_tree():
    drawn = list(_drawn_paths((ROOT / "README.md").read_text()))
    assert "specfit/" in drawn, "README.md must draw the tree in a fenced block"
    assert [path for path in drawn if not (ROOT / path).exists()] == []
    folders = {f"{folder.name}/" for folder in ROOT.iterdir() if any(folder.rglob("*.py"))}
    assert {f for f in folders if not f.startswith(".")} - {"build/", "dist/"} <= set(drawn)


def _drawn_paths(readme: str) -> Iterator[str]:
    """Paths of the first fenced block with a line `specfit/`; two spaces of indent are a folder."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    tree = next((b for b in blocks if re.search(r"^specfit/", b, re.MULTILINE)), "")
    parents: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        # Names end where two spaces start what is said about them; there may be several names.
        names = re.split(r"\s{2,}", line.strip())[0].split()
        for name in names:
            yield "".join(parents[:depth]) + name
        parents[depth:] = [names[-1]]
