"""Profiles read back as they were written, and files that hold anything else are refused."""

import json
from pathlib import Path

import pytest
import yaml

from specfit.traffic.config import (
    ArrivalConfig,
    ArrivalKind,
    ComponentConfig,
    ProfileConfig,
    Quantiles,
    SloConfig,
)
from specfit.traffic.profile_files import from_json, named_profile, read_profile, to_json

CONF = Path(__file__).parents[1] / "conf"
FULL = ProfileConfig(
    "full",
    [
        ComponentConfig(
            "agent",
            0.75,
            ["a", "b"],
            0.7,
            Quantiles(600.0, 2400.0),
            Quantiles(300.0, 900.0),
            Quantiles(280.0, 600.0),
            Quantiles(2.0, 6.0),
            Quantiles(3.5, 20.0),
            1500,
        ),
        ComponentConfig("chat", 0.25, ["c"]),
    ],
    ArrivalConfig(ArrivalKind.closed, 2.0, 1.5, 16),
    SloConfig(500.0, 20.0),
    8.0,
    12,
    "log.jsonl",
)
LEAST = {"name": "p", "components": [{"name": "c", "sources": ["s"]}]}


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_a_profile_reads_back_as_it_was_written(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    values = to_json(FULL)
    path.write_text(json.dumps(values) if suffix == ".json" else yaml.safe_dump(values))
    assert read_profile(path) == FULL


def test_enums_are_written_by_name():
    assert to_json(FULL)["arrival"]["kind"] == "closed"


def test_what_is_not_given_is_the_default():
    assert from_json(LEAST, "f") == ProfileConfig("p", [ComponentConfig("c", sources=["s"])])


def test_every_profile_of_ours_reads():
    names = [path.stem for path in (CONF / "profile").glob("*.yaml")]
    assert {named_profile(name, CONF).name for name in names} == set(names)


def test_a_defaults_list_merges_mappings_and_replaces_lists(tmp_path):
    below = LEAST | {"arrival": {"rate": 3.0, "cv": 2.0}, "scale": 4.0}
    (tmp_path / "below.yaml").write_text(yaml.safe_dump(below))
    above = {"defaults": ["below", "_self_"], "name": "q", "arrival": {"cv": 1.5}}
    above["components"] = [{"name": "d", "sources": ["t"]}]
    (tmp_path / "above.yaml").write_text(yaml.safe_dump(above))
    expected = ProfileConfig("q", [ComponentConfig("d", sources=["t"])], scale=4.0)
    expected.arrival = ArrivalConfig(rate=3.0, cv=1.5)
    assert read_profile(tmp_path / "above.yaml") == expected


@pytest.mark.parametrize("defaults", [["_self_", "below"], ["nothing", "_self_"], "below", []])
def test_another_defaults_list_is_refused(tmp_path, defaults):
    (tmp_path / "below.yaml").write_text(yaml.safe_dump(LEAST))
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({"defaults": defaults}))
    with pytest.raises(ValueError, match=r"p\.yaml: defaults must be files beside it"):
        read_profile(tmp_path / "p.yaml")


def changed(**changes):
    return json.loads(json.dumps(LEAST)) | changes


def component(**changes):
    return changed(components=[LEAST["components"][0] | changes])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "profile must be a mapping"),
        (changed(typo=1), r"profile\.typo must be a key of name, components"),
        (changed(arrival={"knd": "gamma"}), r"profile\.arrival\.knd must be a key of kind"),
        (changed(arrival={"kind": "poisson"}), r"profile\.arrival\.kind must be one of gamma"),
        (changed(arrival={"kind": 1}), r"profile\.arrival\.kind must be one of gamma"),
        (changed(arrival={"cv": 0}), r"profile\.arrival\.cv must be positive, got 0"),
        (changed(scale="1e3"), r"profile\.scale must be a number, got 1e3"),
        (changed(scale=True), r"profile\.scale must be a number, got True"),
        (changed(max_turns=1.5), r"profile\.max_turns must be a whole number, got 1\.5"),
        (changed(components={}), r"profile\.components must be a list"),
        (component(weight=0.5), r"profile\.components\[\]\.weight must sum to 1"),
        (component(sources="s"), r"profile\.components\[0\]\.sources must be a list, got s"),
        (component(sources=[1]), r"profile\.components\[0\]\.sources\[0\] must be a text"),
        (component(turns={"median": 2}), r"profile\.components\[0\]\.turns\.p90 must be given"),
        (component(turns={"median": 2, "p90": 1}), "have 0 < median <= p90, got median 2"),
        (component(turns=2), r"profile\.components\[0\]\.turns must be a mapping, got 2"),
        ({"components": LEAST["components"]}, r"profile\.name must be given"),
        ({"name": "p"}, r"profile\.components must be given"),
        (changed(components=[{"name": "c"}]), r"profile\.components\[0\]\.sources must be given"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_file_and_the_key(values, message):
    with pytest.raises(ValueError, match=rf"here\.json: .*{message}"):
        from_json(values, "here.json")


def test_broken_json_names_the_line(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{\n"name": \n}')
    with pytest.raises(ValueError, match=r"p\.json:3 must be JSON"):
        read_profile(path)


def test_broken_yaml_names_the_file(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"p\.yaml must be YAML"):
        read_profile(path)


def test_another_suffix_is_refused(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text("")
    with pytest.raises(ValueError, match=r"must end in \.json"):
        read_profile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a file"):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["nothing", "../data/local"])
def test_a_name_that_is_not_known_lists_those_that_are(name):
    with pytest.raises(FileNotFoundError, match=r"must be one of .*local.*, got"):
        named_profile(name, CONF)
