"""What holds for every test: one thread, no network, and shapes checked as they are annotated."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ.get("SPECFIT_NO_SHAPES") != "1":
    from jaxtyping import install_import_hook

    # It rewrites modules as they are imported, so it comes before the first of them.
    install_import_hook(
        ["specfit", "specfit_data", "specfit_kernels", "specfit_serve"], "beartype.beartype"
    )

import torch

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    # OmegaConf's annotations are of the old kind, and beartype says so once for each.
    warning = "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning"
    config.addinivalue_line("filterwarnings", warning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that take longest come first, so that no process works on one while the others are done.
    first = ("test_kernels_triton_interpreter.py", "test_stages_quantize.py", "test_pipeline.py")
    items.sort(key=lambda item: item.path.name not in first)
