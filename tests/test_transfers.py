"""Small tensors cross to a GPU and back in one piece, each as it was."""

from __future__ import annotations

import pytest
import torch

from tuner.check.calls import crossing
from tuner.check.calls.exercise import recorded
from tuner.check.calls.transfers import contents_of, joined, moved, parted


def different_tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    numbers = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(device)
    return {
        "plain": numbers,
        "transposed": numbers.t(),
        "expanded": numbers[:1].expand(5, 4),
        "one": numbers[2, 3],
        "bytes": numbers > 0,
        "odd": torch.arange(7, dtype=torch.int16, device=device),
        "wide": numbers.double()[1:],
        "half": numbers.bfloat16(),
        "complex": torch.complex(numbers, numbers + 1.0).conj(),
        "negated": torch.complex(numbers, numbers).conj().imag,
        "none": numbers[:0],
    }


def test_what_is_joined_is_found_again():
    tensors = [t.resolve_conj().resolve_neg() for t in different_tensors().values()]
    for found, tensor in zip(parted(joined(tensors), tensors), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_on_the_cpu_nothing_is_moved_and_bytes_are_the_tensors_own():
    tensor = torch.arange(4.0)
    assert moved([tensor, tensor + 1.0], "cpu")[0] is tensor
    contents = contents_of({"x": tensor})
    tensor[2] = 7.0
    assert torch.frombuffer(contents["x"], dtype=torch.float32)[2] == 7.0


@pytest.mark.gpu
@pytest.mark.parametrize("how_many", [1, 2, None])
def test_tensors_of_a_gpu_cross_as_they_are(how_many):
    given = dict([*different_tensors("cuda").items()][:how_many])
    text, blobs = crossing.pack(crossing.Script(), given)
    _, there = crossing.unpack(crossing.Script, text, [bytes(blob) for blob in blobs], "cuda")
    assert [*there] == [*given]
    for name, tensor in given.items():
        found = there[name]
        assert found.is_cuda and found.is_contiguous() and found.storage_offset() == 0, name
        assert found.untyped_storage().nbytes() == found.nbytes, name  # no part of another's
        assert torch.equal(found, tensor), name


@pytest.mark.gpu
def test_all_go_in_one_copy_each_way():
    given = different_tensors("cuda")
    copied: list[str] = []
    with recorded(copied):
        text, blobs = crossing.pack(crossing.Script(), given)
    assert copied.count("aten._to_copy") == 2  # of the empty one, too
    copied.clear()
    with recorded(copied):
        crossing.unpack(crossing.Script, text, [bytes(blob) for blob in blobs], "cuda")
    assert copied.count("aten._to_copy") == 2
