"""Values that a configuration refuses at the door, each with the full key in the message."""

import pytest
from hydra import compose, initialize_config_dir

from specfit import config
from specfit.config import CONF

REFUSED = [
    ("runtime.num_processes=0", "runtime.num_processes must be at least 1"),
    ("runtime.num_threads=-1", "runtime.num_threads must be at least 0"),
    ("runtime.device=gpu", "runtime.device must be auto, cpu, cuda or cuda:N"),
    ("measure.num_draft_tokens=[]", "measure.num_draft_tokens must be distinct numbers"),
    ("measure.num_draft_tokens=[4,4]", "measure.num_draft_tokens must be distinct numbers"),
    ("measure.num_draft_tokens=[0]", "measure.num_draft_tokens must be distinct numbers"),
    ("measure.temperatures=[]", "measure.temperatures must be null or distinct numbers"),
    ("train.betas=[0.9]", "train.betas must be two numbers"),
    ("train.weight_decay=-1", "train.weight_decay must be at least 0"),
    ("speculator.aux_layers=[3,3]", "speculator.aux_layers must ascend"),
    ("speculator.draft_vocab_size=0", "speculator.draft_vocab_size must be positive"),
    ("generate.top_p=0", "generate.top_p must lie in"),
    ("data.max_rejected=2", "data.max_rejected must lie in"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_a_value_out_of_range_is_refused(override, message):
    config.register()
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        pytest.raises(ValueError, match=message.replace("(", r"\(")),
    ):
        config.typed(compose("config", overrides=[override]))


def test_an_index_of_a_device_cannot_be_shared_by_several_processes():
    with pytest.raises(ValueError, match=r"runtime\.device must have no index"):
        config.RuntimeConfig(device="cuda:1", num_processes=2)


def test_a_device_that_is_not_there_is_named():
    from specfit.targets.load import device_of

    with pytest.raises(ValueError, match=r"runtime\.device must be on this machine, got cuda:63"):
        device_of("cuda:63")
