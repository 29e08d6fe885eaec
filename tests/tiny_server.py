"""Servers of tiny targets, in threads of the test's process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import tiny_targets
import torch
from prometheus_client.parser import text_string_to_metric_families
from tiny_heads import make_speculator

from specfit.config import TargetConfig
from specfit.engine import DecodeEngine
from specfit.export import vllm
from specfit.export.served import Served
from specfit.serve_config import Drafts, ServeConfig
from specfit.stages.serve import open_server
from specfit.targets.load import load
from specfit.targets.locate import locate
from specfit.targets.target import Target
from specfit_serve.server.running import Server

__all__ = ["Drafts"]
MODEL = "tiny"


def load_target(folder: Path) -> Target:
    """A tiny target with its tokenizer, on the CPU."""
    config = TargetConfig(path=str(tiny_targets.write_target(folder / "target")))
    location = locate(config, digests=folder / "digests.json", download=False)
    return load(config, location, torch.device("cpu"))


def export(target: Target, folder: Path) -> Path:
    """A head for it, exported."""
    speculator = make_speculator(target)
    (folder / "vllm").mkdir()
    vllm.write(folder / "vllm", speculator.head, speculator.vocab, Served(target.info))
    return folder / "vllm"


def opened(target: Target, exported: Path, **config: Any) -> Server:
    """A server that does not run yet."""
    settings: dict[str, Any] = {"served_name": MODEL, "max_length": 160, "batch_size": 4}
    served = ServeConfig(**settings | config)
    head = exported if served.proposer is Drafts.eagle3 else None
    return open_server(served, DecodeEngine(target), head)


@contextmanager
def running(server: Server) -> Iterator[SimpleNamespace]:
    """The server, its `url`, and clients for it; shut down at the end."""
    ready, failed = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def run() -> None:
            try:
                server.run(listener, ready.set)
            except BaseException as error:  # noqa: BLE001
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert ready.wait(30)
        try:
            with (
                openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
                httpx.Client(base_url=url, timeout=60) as http,
            ):
                yield SimpleNamespace(
                    url=url, client=client, http=http, server=server, thread=thread, failed=failed
                )
        finally:
            server.shut_down()
            server.shut_down()
            thread.join(30)
            assert not thread.is_alive()


def metrics(http: httpx.Client) -> dict[str, float]:
    """Every sample of /metrics by its name, with the value of a label after it."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
            if not sample.name.endswith("_bucket"):
                found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns when it does; fails after `seconds`."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
