"""Several training processes on one machine, started by the one that composed the configuration."""

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, spawn


def launch(work: Callable[..., None], num_processes: int, *arguments: Any) -> None:
    """Runs `work(*arguments)` in each of `num_processes` processes, or here when that is one.

    `accelerate` finds its place in the group from the environment that this sets: NCCL on GPUs,
    gloo on CPUs.

    Raises:
        ValueError: what a process said of the user's input, or of the disk.
    """
    if num_processes == 1:
        work(*arguments)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, torch.get_num_threads() // num_processes)
    errors = get_context("spawn").SimpleQueue()
    rest = (num_processes, port, threads, errors, work, arguments)
    try:
        spawn(_rank, args=rest, nprocs=num_processes)  # type: ignore[no-untyped-call]
    except ProcessException as error:
        if errors.empty():
            raise
        raise ValueError(errors.get()) from error


def _rank(
    rank: int,
    world: int,
    port: int,
    threads: int,
    errors: Any,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }
    torch.set_num_threads(threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        work(*arguments)
    except (ValueError, OSError) as error:
        errors.put(str(error))  # what the user did, or the disk: to be said in one line
        raise
    torch.distributed.destroy_process_group()
