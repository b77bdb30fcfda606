"""Parts of stored tensors: what reading them gives is what the whole has there, and no more than that is read."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferloop.core.errors import ModelFileError
from inferloop.engine.compute.groups import GROUP_TYPES
from inferloop.engine.compute.stored import READABLE, half_split, read_tensor, stored_rows
from inferloop.models.headers import TensorInfo
from inferloop.models.headers.dtypes import block_of

SAME_FOLDER = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_BEFORE = 96


def written(folder: Path, dtype: str, shape: tuple[int, ...], *, heads: int = 0, seed: int = 1) -> TensorInfo:
    """A tensor of random numbers in a file of its own, with other bytes before and behind it."""
    block, block_bytes = block_of(dtype)
    rng = np.random.default_rng(seed)
    num_blocks = int(np.prod(shape)) // block
    stored = rng.integers(0, 256, num_blocks * block_bytes, dtype=np.uint8)
    if dtype in GROUP_TYPES:
        fields = stored.view(GROUP_TYPES[dtype].block)
        for name in set(fields.dtype.names or ()) & {"d", "m", "dmin"}:
            fields[name] = rng.standard_normal(fields.shape)
    else:
        plain = {"bf16": "<u2", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8"}[dtype]
        numbers = rng.integers(0, 1 << 14, num_blocks) if dtype == "bf16" else rng.standard_normal(num_blocks)
        stored = numbers.astype(plain).view(np.uint8)
    file = folder / "weights.bin"
    file.write_bytes(b"\xff" * _BEFORE + stored.tobytes() + b"\xff" * 64)
    return TensorInfo("w", dtype, shape, file, _BEFORE, len(stored), heads)


@pytest.mark.parametrize("dtype", READABLE)
@given(data=st.data())
@SAME_FOLDER
def test_a_part_of_a_matrix_is_what_the_whole_has_there(tmp_path: Path, dtype: str, data: st.DataObject) -> None:
    block = block_of(dtype)[0]
    num_rows, num_blocks = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    info = written(tmp_path, dtype, (num_rows, num_blocks * block), seed=data.draw(st.integers(0, 2**32)))
    first, left = data.draw(st.integers(0, num_rows - 1)), data.draw(st.integers(0, num_blocks - 1))
    end, right = data.draw(st.integers(first + 1, num_rows)), data.draw(st.integers(left + 1, num_blocks))
    part = info.part(slice(first, end), slice(left * block, right * block))
    whole = read_tensor(info)
    np.testing.assert_array_equal(read_tensor(part), whole[first:end, left * block : right * block], strict=True)
    assert part.num_bytes == stored_rows(part).size
    np.testing.assert_array_equal(stored_rows(part, 1), stored_rows(part)[1:])  # rows of a part, in turn
    again = part.part(slice(part.shape[0] - 1, None), slice(part.shape[1] - block, None))
    np.testing.assert_array_equal(read_tensor(again), whole[end - 1 : end, (right - 1) * block : right * block])


def test_a_part_of_a_vector(tmp_path: Path) -> None:
    info = written(tmp_path, "bf16", (32,))
    np.testing.assert_array_equal(read_tensor(info.part(slice(8, 20))), read_tensor(info)[8:20])


def test_whole_heads_of_interleaved_rows_are_put_right_by_themselves(tmp_path: Path) -> None:
    info = written(tmp_path, "fp32", (4 * 8, 6), heads=4)
    whole = half_split(read_tensor(info), info, 8)
    part = info.part(slice(8, 24), slice(2, 6))
    assert part.interleaved_heads == 2
    np.testing.assert_array_equal(half_split(read_tensor(part), part, 8), whole[8:24, 2:6])
    with pytest.raises(ModelFileError, match=r"tensor w cannot be cut into rows 4 to 24: it has heads of 8 fp32"):
        info.part(slice(4, 24))


def test_columns_that_cut_a_block_are_refused(tmp_path: Path) -> None:
    info = written(tmp_path, "q8_0", (2, 64))
    with pytest.raises(ModelFileError, match=r"tensor w cannot be cut into columns 0 to 48: it has blocks of 32 q8_0"):
        info.part(columns=slice(0, 48))


@pytest.mark.parametrize("columns", [slice(None), slice(0, 256), slice(768, 1024)])
def test_no_more_than_the_part_is_read_or_held(tmp_path: Path, columns: slice) -> None:
    part = written(tmp_path, "fp32", (512, 1024)).part(slice(100, 356), columns)
    before = characters_read()
    tracemalloc.start()
    found = stored_rows(part)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.nbytes == part.num_bytes
    assert characters_read() - before < part.num_bytes + 10_000
    assert held < part.num_bytes + 100_000


def test_a_file_that_ends_within_a_part(tmp_path: Path) -> None:
    info = written(tmp_path, "fp32", (4, 8))
    info.file.write_bytes(info.file.read_bytes()[: _BEFORE + 4 * 8 * 3 + 8])
    assert len(stored_rows(info.part(slice(0, 3), slice(4, 8)))) == 3
    with pytest.raises(ModelFileError, match="the file ends within it"):
        stored_rows(info.part(columns=slice(4, 8)))


def characters_read() -> int:
    """By this process, from anything."""
    return int(Path("/proc/self/io").read_text().split()[1])
