"""The sources that ship in conf/data."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from specfit.config import DataConfig, RunConfig
from specfit_data.formats import check_columns
from specfit_data.sources import Source, read, read_rows
from specfit_data.splits import split_of, without_duplicates

CONF = Path(__file__).parent.parent / "conf"
SOURCES = sorted(path.stem for path in (CONF / "data" / "source").glob("*.yaml"))
FOLDER = Path(__file__).parent.parent / "data" / "specfit_data" / "samples"
SAMPLES = sorted({path.name.partition(".")[0] for path in FOLDER.glob("*.jsonl.gz")})


def data_config(*overrides: str) -> DataConfig:
    ConfigStore.instance().store(name="data_schema", node=RunConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("data_schema", overrides=list(overrides))
    data = OmegaConf.to_object(config.data)
    assert isinstance(data, DataConfig)
    return data


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_fits_the_schema_and_states_its_licence(name):
    source = data_config(f"+data/source@data.sources.{name}={name}").sources[name]
    assert isinstance(source, Source)
    assert source.licence
    assert source.opt_in == (source.licence == "unknown")


def test_the_default_has_every_sample_and_holds_out_what_others_are_measured_on():
    sources = data_config("+data=samples").sources
    assert {source.path.removeprefix("sample:") for source in sources.values()} == set(SAMPLES)
    held_out = [name for name, source in sources.items() if source.held_out]
    assert sorted(held_out) == ["humaneval", "mt_bench", "tooltalk"]


def test_your_own_file_takes_one_override():
    data = data_config("+data=local", "data.sources.mine.path=/logs/today.jsonl")
    assert data.sources["mine"].path == "/logs/today.jsonl"


def test_functions_are_asked_for_as_in_humaneval():
    sources = data_config("+data=samples").sources
    assert sources["codeio_complete"].instruction == sources["humaneval"].instruction


@pytest.mark.parametrize("name", SAMPLES)
def test_every_row_of_a_sample_is_a_conversation_and_there_are_some_of_each_split(name):
    source = data_config("+data=samples").sources[name]
    _, row = next(read_rows(source, name))
    check_columns(row, source, name)
    chats = list(without_duplicates(read(name, source), set()))
    splits = [split_of(chat.id, held_out=source.held_out) for chat in chats]
    assert splits.count("test") >= 8
    assert source.held_out or splits.count("train") >= 60
