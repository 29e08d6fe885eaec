import pytest
import torch

from specfit_kernels import weights
from specfit_kernels.weights import finite_amax, row_chunks


@pytest.mark.parametrize("rows", [1, 2, 9, 10, 11, 100])
@pytest.mark.parametrize("columns", [1, 7, 10, 30, 100, 1000])
@pytest.mark.parametrize("multiple", [1, 4])
def test_chunks_cover_all_rows_and_are_no_larger_than_they_must(
    monkeypatch, rows, columns, multiple
):
    monkeypatch.setattr(weights, "CHUNK_VALUES", 100)
    chunks = list(row_chunks(rows, columns, multiple=multiple))
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    for chunk in chunks:
        assert chunk.start % multiple == 0
        assert (chunk.stop - chunk.start) * columns <= max(100, columns * multiple)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_size_is_exact(dtype, sign):
    weight = torch.zeros(3, 5, dtype=dtype)
    weight[1, 2], weight[2, 4] = sign * 3.140625, -sign * 2
    amax = finite_amax(weight, "w")
    assert amax.dtype == torch.float32
    assert amax.item() == 3.140625


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_value_that_is_not_finite_is_named(bad):
    weight = torch.ones(4, 6, dtype=torch.bfloat16)
    weight[2, 3] = bad
    weight[2, 5] = weight[3, 0] = torch.nan
    with pytest.raises(ValueError, match=rf"^q_proj\.weight must be finite, got {bad} at \[2, 3\]"):
        finite_amax(weight, "q_proj.weight")
