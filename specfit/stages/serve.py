"""`serve`: the target and the exported head behind an OpenAI-compatible HTTP server."""

import errno
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from specfit.artifacts import Artifact
from specfit.checks import require
from specfit.draft_vocab import DraftVocab
from specfit.engine import DecodeEngine
from specfit.export.imports import read_head
from specfit.files import read_json
from specfit.serve_config import Drafts, ServeConfig
from specfit.speculators.eagle3 import Eagle3
from specfit.targets.info import TargetInfo
from specfit.targets.text import TargetText
from specfit.targets.vocabulary import token_classes
from specfit_serve.ngram import NgramProposer, NoProposer
from specfit_serve.protocols import DecodeTarget, Proposer
from specfit_serve.server.running import Server
from specfit_serve.server.settings import ServerSettings

MEMORY_SHARE = 0.5  # of what is free, for keys and values
CONTAINER = Path("/sys/fs/cgroup")
KV_BYTES = 4  # a number of them, at most: float32
log = logging.getLogger(__name__)


@runtime_checkable
class Opened(Protocol):
    """The target that the head is fitted to."""

    @property
    def served(self) -> Artifact:
        """What holds it."""

    @property
    def engine(self) -> DecodeEngine:
        """Decodes it."""


@runtime_checkable
class ServedPath(Protocol):
    """The path, as far as it is served."""

    @property
    def export(self) -> Artifact:
        """The head as servers load it."""

    @property
    def opened(self) -> Opened:
        """What opens the target."""


def run(config: ServeConfig, path: ServedPath) -> Artifact:
    """Serves until told to stop; writes the address to stdout when requests are taken.

    Returns what is served: the exported head, or the target where the head does not draft.

    Raises:
        ValueError: the port is taken, or a limit does not fit the target.
    """
    listener = _listener(config)  # fails here, not after the training
    with listener:
        drafts = config.proposer is Drafts.eagle3
        made = path.export if drafts else path.opened.served
        exported = _first_folder(made) if drafts else None
        server = open_server(config, path.opened.engine, exported)
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

        def tell() -> None:
            log.info("serve address=%s", address)
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()

        server.run(listener, tell)
    return made


def open_server(config: ServeConfig, engine: DecodeEngine, exported: Path | None) -> Server:
    """A server of the target in `engine`, and of the head in the folder `exported`, if it drafts.

    Raises:
        ValueError: a limit does not fit the target.
    """
    info = engine.target.info
    # What is served is what was exported.
    head = None if exported is None else read_head(exported, engine.target)
    k = 0 if config.proposer is Drafts.none else config.num_draft_tokens
    columns = _columns(config, info, k, engine.target.device)
    slots = engine.slots(
        num_slots=config.batch_size,
        max_length=columns,
        aux_layers=list(head[0].config.aux_layers) if head else None,
    )
    name = config.served_name or info.name
    log.info(
        "serve model=%s engine=%s proposer=%s k=%d slots=%d max_length=%d",
        *(name, engine.name, config.proposer.name, k, config.batch_size, columns - k),
    )
    return Server(
        slots,
        _proposer(config, engine, head, slots),
        TargetText(engine.target.tokenizer),
        ServerSettings(
            model=name,
            num_draft_tokens=k,
            batch_size=config.batch_size,
            max_queue=config.max_queue,
            max_new_tokens=config.max_new_tokens,
            # More could never be taken in.
            max_choices=min(config.max_choices, config.batch_size + config.max_queue),
            max_body_bytes=config.max_body_bytes,
            drain_seconds=config.drain_seconds,
            api_key=config.api_key,
        ),
        token_classes=token_classes(engine.target),
    )


def _first_folder(exported: Artifact) -> Path:
    """Of the first engine that the head was exported for; they are the same head."""
    engine = read_json(exported.file("manifest.json"))["engines"][0]["engine"]
    return exported.folder() / str(engine)


def _proposer(
    config: ServeConfig,
    engine: DecodeEngine,
    head: tuple[Eagle3, DraftVocab] | None,
    slots: DecodeTarget,
) -> Proposer:
    if head is not None:
        return engine.eagle3(*head, num_slots=slots.num_slots, max_length=slots.max_length)
    return NgramProposer(2, 4) if config.proposer is Drafts.ngram else NoProposer()


def _columns(config: ServeConfig, info: TargetInfo, k: int, device: torch.device) -> int:
    """Of a slot: a sequence, and room for what drafts are padded with.

    Raises:
        ValueError: `serve.max_length` is beyond the context, or there is no memory.
    """
    context = info.max_position_embeddings
    if config.max_length is not None:
        known = config.max_length + k <= context
        requirement = f"be at most {context - k}: the target's context, less {k} drafted tokens"
        require(known, "serve.max_length", requirement, config.max_length)
        return config.max_length + k
    # One layer more than the target's: the head's.
    column_bytes = 2 * (info.num_layers + 1) * info.num_kv_heads * info.head_dim * KV_BYTES
    room = int(MEMORY_SHARE * _free_bytes(device) / (column_bytes * config.batch_size))
    least = k + 2
    fewer = f"leave memory for {least} columns of {column_bytes} bytes each"
    require(room >= least, "serve.batch_size", fewer, config.batch_size)
    return min(room, context)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    file = Path("/proc/meminfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    limit, used = (CONTAINER / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def _listener(config: ServeConfig) -> socket.socket:
    """Bound, so that the port is ours, and deaf: who connects before it is ready is refused."""
    found = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a kill
    try:
        found.bind((config.host, config.port))
        return found
    except socket.gaierror as error:
        raise ValueError(f"serve.host must be an address here, got {config.host}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"serve.host must be an address here, got {config.host}") from error
        reason = f"be free on {config.host} ({error.strerror})"
        raise ValueError(f"serve.port must {reason}, got {config.port}") from error
