"""What a check does to modules and tensors on the way, where a GPU does it otherwise."""

import pytest
import torch

from tuner.check import exercise, threads
from tuner.check.exercise import checksum_of
from tuner.check.history import _pickled


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_checksum_depends_on_each_bit_and_on_its_place(device):
    given = torch.randn(37, 4099, device=device)
    edits = {
        "one element": lambda t: t[5, 6].add_(1e-3),
        "last element": lambda t: t[-1, -1].neg_(),
        "rows exchanged": lambda t: t.copy_(t.roll(1, 0)),
        "columns exchanged": lambda t: t.copy_(t.roll(1, 1)),
        "moved by a row of the sum": lambda t: t.copy_(t.flatten().roll(4096).view_as(t)),
    }
    found = {"as given": checksum_of(given), "a copy": checksum_of(given.clone())}
    assert len(set(found.values())) == 1
    for name, edit in edits.items():
        other = given.clone()
        edit(other)
        found[name] = checksum_of(other)
    assert len(set(found.values())) == 1 + len(edits), found
    few = torch.arange(9, dtype=torch.uint8, device=device)[1:8]  # no whole word, at an odd place
    assert checksum_of(few) != checksum_of(few.flip(0)) != checksum_of(few[1:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pickled_copy_has_memory_of_its_own(device):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to(device)
    model[0].weight.requires_grad_(False)
    model.tied = model[0].weight
    copy = _pickled(model)
    assert copy.tied is copy[0].weight and not copy.tied.requires_grad
    state = copy.state_dict()
    for name, tensor in model.state_dict().items():
        assert state[name].device == tensor.device and torch.equal(state[name], tensor)
        assert state[name].data_ptr() != tensor.data_ptr()


def test_threads_do_not_wait_for_one_whose_memory_ran_out(monkeypatch):
    asked = []

    def without_memory(tensor):
        asked.append(tensor)
        if len(asked) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return checksum_of(tensor)

    monkeypatch.setattr(threads, "checksum_of", without_memory)
    model, values = torch.nn.Linear(3, 4).eval(), [[torch.ones(2, 3)] for _ in range(24)]
    models = [model] * len(values)
    with pytest.raises(torch.OutOfMemoryError):
        threads.called_at_once(models, values, torch.device("cpu"), {}, has_gradients=False)


@pytest.mark.parametrize("num_bytes", [0, 3, 4096 * 4, 4096 * 4 * 7 + 4 * 100 + 2])
def test_a_checksum_of_pieces_is_that_of_the_whole(monkeypatch, num_bytes):
    bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    whole = exercise._summed(bits)
    monkeypatch.setattr(exercise, "CHUNK_ELEMENTS", 3 * 4096)
    assert exercise._summed(bits) == whole
    if num_bytes > 8 and not torch.equal(bits[:4], bits[-8:-4]):
        others = torch.cat([bits[-8:-4], bits[4:-8], bits[:4], bits[-4:]])
        assert exercise._summed(others) != whole
