"""What a check does to modules and tensors on the way, where a GPU does it otherwise."""

import pytest
import torch

from tuner.check.calls import exercise, threads
from tuner.check.calls.exercise import checksum_of
from tuner.check.calls.history import _pickled


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


EDITS_OF_ALL = {
    "negated": lambda t: t.neg_(),
    "one negated": lambda t: t.view(-1)[t.numel() // 3].neg_(),
    "odd ones negated": lambda t: t.view(-1)[1::2].neg_(),
    "the first two negated": lambda t: t.view(-1)[:2].neg_(),
    "one 1 for a 0": lambda t: t.view(-1)[-5].fill_(1.0),
    "rows exchanged": lambda t: t.copy_(t.roll(1, 0)),
    "last ones exchanged": lambda t: t.view(-1)[-2:].copy_(t.view(-1)[-2:].flip(0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(4, 4), (64, 4096), (64, 4095), (37, 1001)])
def test_a_gpus_checksum_sees_signs_which_are_a_words_highest_bit(dtype, shape):
    given = torch.randn(*shape, dtype=dtype) + 3
    given.view(-1)[-5] = 0.0
    found = {name: given.clone() for name in EDITS_OF_ALL}
    for name, edit in EDITS_OF_ALL.items():
        edit(found[name])
    sums = {name: exercise._summed(exercise.as_bytes(t)) for name, t in found.items()}
    sums["as given"] = exercise._summed(exercise.as_bytes(given))
    assert len(set(sums.values())) == len(sums), sums


def test_a_gpus_checksum_sees_each_bit_of_any_number_of_bytes_at_any_place():
    for num_bytes in (*range(1, 18), 32759, 32760, 32761, 65536):
        whole = torch.randint(0, 256, (num_bytes + 8,), dtype=torch.uint8)
        for offset in range(8):
            bits = whole[offset : offset + num_bytes]
            before = exercise._summed(bits)
            for place in {0, num_bytes // 2, num_bytes - 1}:
                for bit in (1, 128):
                    other = bits.clone()
                    other[place] ^= bit
                    assert exercise._summed(other) != before
            assert exercise._summed(bits.clone()) == before
