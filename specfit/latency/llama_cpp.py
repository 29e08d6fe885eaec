"""llama.cpp as a peer: its library decodes in a process of its own, one request at a time.

    python -m specfit.latency.llama_cpp LIBRARIES MODEL.gguf NUM_THREADS NUM_COLUMNS

reads a line `{"prompt": [ids], "num_tokens": n}` from standard input and answers with
`{"tokens": [ids], "seconds": s}`: greedy tokens, and the time of those after the first.

LIBRARIES is a folder with libllama*.so, libggml*.so and the libraries of ggml's backends, such as
`npm pack @node-llama-cpp/linux-x64` brings them. There are no headers with them, so structures of
parameters get their defaults handed through; but for the first number, the columns of the cache,
whose default says whether it is where we think it is.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

_DEFAULT_COLUMNS = 512


class _Defaults(ctypes.Structure):
    """Parameters of any kind, of which only the first is known here; larger than all of them."""

    _fields_ = (("first", ctypes.c_uint32), ("rest", ctypes.c_char * 1020))


class _Batch(ctypes.Structure):
    _fields_ = (("num_tokens", ctypes.c_int32), ("arrays", ctypes.c_void_p * 6))


@dataclass(frozen=True)
class Answer:
    """What one request took."""

    tokens: list[int]
    seconds: float  # of the tokens after the first


class LlamaCpp:
    """A running child."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Greedy tokens, however the answer would end.

        Raises:
            ValueError: the child has died.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = json.dumps({"prompt": [*prompt], "num_tokens": num_tokens})
        try:
            self._child.stdin.write(request + "\n")
            self._child.stdin.flush()
            return Answer(**json.loads(self._child.stdout.readline()))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            code = self._child.wait()
            raise ValueError(
                "bench.llama_cpp must name libraries of a llama.cpp that reads the model, got exit "
                f"code {code} from them"
            ) from error


@contextmanager
def llama_cpp(
    libraries: Path, model: Path, *, num_threads: int, num_columns: int
) -> Iterator[LlamaCpp]:
    """A child that has loaded the model, until the end of the block.

    Raises:
        FileNotFoundError: the folder holds no libllama.
    """
    if not any(libraries.glob("libllama*.so*")):
        raise FileNotFoundError(
            f"bench.llama_cpp must be a folder with libllama.so, got {libraries}; npm pack "
            "@node-llama-cpp/linux-x64 has one"
        )
    sizes = map(str, (libraries, model, num_threads, num_columns))
    child = subprocess.Popen(
        [sys.executable, "-m", "specfit.latency.llama_cpp", *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield LlamaCpp(child)
    finally:
        child.kill()
        child.wait()


def _libraries(folder: Path) -> Any:
    """libllama, with the backends that suit this machine."""
    base = next(iter(sorted(folder.glob("libggml.*so*"))))
    ggml = ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
    [path] = sorted(p for p in folder.glob("libllama*.so*") if "common" not in p.name)[:1]
    lib = ctypes.CDLL(str(path))
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    lib.llama_backend_init()
    pointers = ("model_load_from_file", "init_from_model", "get_memory", "model_get_vocab")
    for name in pointers:
        getattr(lib, f"llama_{name}").restype = ctypes.c_void_p
    for name in ("model", "context"):
        getattr(lib, f"llama_{name}_default_params").restype = _Defaults
    lib.llama_batch_get_one.restype = _Batch
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    return lib


class _Context:
    """A model and its cache."""

    def __init__(self, lib: Any, model: str, num_threads: int, num_columns: int) -> None:
        self.lib = lib
        loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        if not loaded:
            sys.exit(2)
        parameters = lib.llama_context_default_params()
        if parameters.first != _DEFAULT_COLUMNS:
            sys.exit(3)
        parameters.first = num_columns
        self.handle = ctypes.c_void_p(
            lib.llama_init_from_model(ctypes.c_void_p(loaded), parameters)
        )
        lib.llama_set_n_threads(self.handle, num_threads, num_threads)
        vocab = ctypes.c_void_p(lib.llama_model_get_vocab(ctypes.c_void_p(loaded)))
        self.vocab_size = int(lib.llama_vocab_n_tokens(vocab))

    def newest(self, tokens: Sequence[int]) -> int:
        """Reads the tokens; the one that follows them."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if self.lib.llama_decode(self.handle, self.lib.llama_batch_get_one(ids, len(tokens))):
            sys.exit(4)
        logits = self.lib.llama_get_logits_ith(self.handle, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def forget(self) -> None:
        """Empties the cache."""
        memory = ctypes.c_void_p(self.lib.llama_get_memory(self.handle))
        self.lib.llama_memory_clear(memory, ctypes.c_bool(False))


def main() -> None:
    """The child."""
    folder, model, num_threads, num_columns = sys.argv[1:]
    libraries = _libraries(Path(folder))
    context = _Context(libraries, model, int(num_threads), int(num_columns))
    for line in sys.stdin:
        request = json.loads(line)
        context.forget()
        tokens = [context.newest(request["prompt"])]
        start = perf_counter()
        while len(tokens) < request["num_tokens"]:
            tokens.append(context.newest(tokens[-1:]))
        answer = {"tokens": tokens, "seconds": perf_counter() - start}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
