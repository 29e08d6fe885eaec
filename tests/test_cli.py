"""The command line answers at once, on the right stream, and in one line when the user erred."""

import json
import logging
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import specfit
from specfit import cli
from specfit.artifacts import Artifact, ArtifactStore, Recipe, StatusRow
from specfit.config import RunConfig


@pytest.fixture(autouse=True)
def _logging_as_before():
    """Hydra points the root logger at streams that end with the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a command line on a pipeline of one stage; (exit code, stdout, stderr)."""
    pipeline = SimpleNamespace(run=_run, recipes=_recipes, status=_status)
    monkeypatch.setitem(sys.modules, "specfit.pipeline", pipeline)
    monkeypatch.setattr(specfit, "pipeline", pipeline, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.delenv("SPECFIT_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specfit", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        return code, *capsys.readouterr()

    return run


def _run(cfg: RunConfig) -> Artifact:
    match cfg.seed:
        case 13:
            raise ValueError("seed must not\nbe 13, got 13")
        case 14:
            raise KeyboardInterrupt
        case 15:
            raise AssertionError("this is ours")
    recipe = _recipes(cfg)["train"]
    return ArtifactStore(cfg.runtime.root).get_or_make(recipe, lambda _folder: None)


def _recipes(cfg: RunConfig) -> dict[str, Recipe]:
    return {"train": Recipe("train", 1, {"seed": cfg.seed}, {})}


def _status(cfg: RunConfig) -> list[StatusRow]:
    return [StatusRow("train", _recipes(cfg)["train"].key, 0, "missing", None)]


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_question_is_answered_at_once_and_without_torch(tmp_path, arguments):
    code = (
        "import sys; from specfit.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    sys.stderr.write(f'heavy: {sorted(heavy)}')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert time.monotonic() - start < 10  # 1 s on an idle core
    assert done.stderr == "heavy: []"
    assert "smollm2" in done.stdout.lower()


def test_help_says_how_to_choose_and_override(run):
    code, out, _ = run("--help")
    assert code == 0
    for stage in cli.config.Stage:
        assert f"  {stage.name} " in out
    assert out.count("\n  specfit") == 10
    assert "\nspeculator: eagle31, portable\n" in out


def test_the_last_line_on_stdout_is_the_folder(run, tmp_path):
    code, out, err = run("stage=train")
    assert code == 0
    assert Path(out.strip()).parent == tmp_path / "artifacts" / "train"
    assert (Path(out.strip()) / "artifact.json").exists()
    assert "INFO specfit.artifacts made stage=train key=" in err


def test_a_job_says_what_it_was_and_made(run, tmp_path):
    _, out, _ = run("stage=train", "train.lr=0.5")
    [path] = tmp_path.glob("runs/*/job.json")
    key = Path(out.strip()).name
    assert json.loads(path.read_text()) == {
        "overrides": ["stage=train", "train.lr=0.5"],
        "stage": "train",
        "artifact": str(tmp_path / "artifacts" / "train" / key),
        "keys": {"train": key},
        "root": str(tmp_path / "artifacts"),
    }


def test_logs_are_kept_in_the_folder_of_the_run(run, tmp_path):
    run("stage=train")
    [path] = tmp_path.glob("runs/*/specfit.log")
    assert "made stage=train" in path.read_text()


def test_every_job_of_a_sweep_says_what_it_made(run, tmp_path):
    code, out, _ = run("-m", "stage=train", "seed=1,2")
    assert code == 0
    jobs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/*/*/job.json"))]
    assert [job["overrides"] for job in jobs] == [["stage=train", f"seed={i}"] for i in (1, 2)]
    assert [job["artifact"] for job in jobs] == out.split()


def test_a_job_that_fails_does_not_stop_a_sweep(run, tmp_path):
    code, _, err = run("-m", "stage=train", "seed=1,13,2")
    assert code == 2
    assert len(list(tmp_path.glob("runs/*/*/*/job.json"))) == 2
    assert "ERROR specfit.cli job failed error=seed must not be 13, got 13" in err
    assert err.endswith("specfit: error: seed must not be 13, got 13\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=13", "seed must not be 13, got 13"),
        ("train.evals=0", "train.evals must be at least 1, got 0"),
        ("train.epochs=many", "train.epochs: Value 'many' of type 'str' could not be converted"),
        ("train.epoch=3", "unknown key train.epoch; did you mean train.epochs?"),
        ("+train.epoch=3", "unknown key train.epoch; known here: betas, epochs"),
        ("train.colour=1", "unknown key train.colour; known here: betas, epochs"),
        ("epochs=3", "unknown key epochs; did you mean train.epochs?"),
        ("experimnt=smoke", "unknown key experimnt; did you mean experiment?"),
        ("stage=trane", "stage: Invalid value 'trane', expected one of [status, target"),
        ("target=nope", "In 'config': Could not find 'target/nope' Available options in 'target'"),
        ("target=folder", "target.path must be given"),
        ("nonsense", "Error parsing override 'nonsense'"),
    ],
    ids=lambda value: value.split(" ")[0],
)
def test_a_mistake_is_answered_in_one_line(run, override, message):
    code, out, err = run("stage=train", override)
    assert code == 2
    assert out == ""
    assert err.startswith(f"specfit: error: {message}")
    assert err.count("\n") == 1


def test_a_missing_file_is_answered_in_one_line(run, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run("stage=train", "runtime.root=file")
    assert code == 2
    assert err.startswith("specfit: error: ")
    assert "file/train" in err
    assert err.count("\n") == 1


def test_debugging_shows_where_an_error_came_from(run, monkeypatch):
    monkeypatch.setenv("SPECFIT_DEBUG", "1")
    with pytest.raises(ValueError, match="seed must not"):
        run("stage=train", "seed=13")


def test_an_error_of_ours_is_not_made_to_look_like_the_users(run):
    with pytest.raises(AssertionError, match="this is ours"):
        run("stage=train", "seed=15")


def test_an_interrupted_run_says_that_it_can_be_resumed(run):
    code, _, err = run("stage=train", "seed=14")
    assert code == 130
    assert err == "specfit: interrupted; what was made is kept: the same command resumes there\n"


def test_status_makes_nothing(run, tmp_path):
    code, out, _ = run("stage=status")
    assert code == 0
    assert out.splitlines()[1].split()[-3:] == ["-", "missing", "-"]
    assert not (tmp_path / "artifacts").exists()


def test_a_status_table_is_aligned():
    now = datetime(2026, 1, 2, tzinfo=UTC)
    rows = [
        StatusRow("fit", "0123456789abcdef", 1023, "made", now - timedelta(seconds=59)),
        StatusRow("train", "fedcba9876543210", 3 << 29, "partial", now - timedelta(hours=30)),
        StatusRow("export", "0000000000000000", 0, "missing", None),
    ]
    assert cli.status_table(rows, now) == (
        "stage   key               size     state    age\n"
        "fit     0123456789abcdef  1023 B   made     59 s\n"
        "train   fedcba9876543210  1.5 GiB  partial  1 d\n"
        "export  0000000000000000  -        missing  -\n"
    )
