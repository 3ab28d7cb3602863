"""Lesson 18. How ranks reach each other: which way is taken, what it says if that is not the usual one, and with which
arguments torch.distributed is called. NCCL itself has never been run.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel import transport as ways
from mini_engine.distributed.tensor_parallel.follow import Place
from mini_engine.distributed.tensor_parallel.limits import device_of_ranks
from mini_engine.distributed.tensor_parallel.messages import receive
from mini_engine.distributed.tensor_parallel.transport import TorchTransport, transport_for
from mini_engine.engine.runner import Step
from tests.l18.ranks import Pipe

MINUTE = timedelta(seconds=60)


def no_compiler():
    raise UserError("no C++ compiler was found")


def chosen(name="auto", device="cpu", num_ranks=2):
    return transport_for(name, num_ranks, Path("folder"), MINUTE, device)


# ---------------------------------------------------------------- which one


def test_without_a_compiler_ranks_use_gloo_and_say_what_that_costs(monkeypatch, capsys):
    monkeypatch.setattr(ways, "LIBRARY", SimpleNamespace(load=no_compiler))
    found = chosen()
    assert isinstance(found, TorchTransport) and found.backend == "gloo"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no C++ compiler" in said and "gloo" in said
    with pytest.raises(UserError, match="compiler"):
        chosen("memory")


def test_gloo_can_be_asked_for_and_gpus_get_nccl():
    assert [chosen("gloo").backend, chosen("auto", "cuda").backend] == ["gloo", "nccl"]
    for name, device in (("memory", "cuda"), ("gloo", "cuda"), ("nccl", "cpu"), ("pigeons", "cpu")):
        with pytest.raises(UserError, match=name):
            chosen(name, device)


def test_one_process_is_in_one_process_group_only(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="already"):
        chosen("gloo")


# ---------------------------------------------------------------- with which arguments


@pytest.fixture
def joined(monkeypatch):
    """What init_process_group was called with, and what the group's time limit was set to afterwards."""
    calls = []
    group = SimpleNamespace(set_timeout=lambda limit: calls.append(("set_timeout", limit)))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "FileStore", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: calls.append((backend, options)))
    return calls


@pytest.mark.parametrize(("backend", "device"), [("nccl", torch.device("cuda", 3)), ("gloo", None)])
def test_a_rank_joins_as_itself_with_its_own_device(joined, backend, device):
    TorchTransport(backend, "folder/ranks", 4, MINUTE).connect(3)
    found, options = joined[0]
    assert found == backend and (options["rank"], options["world_size"]) == (3, 4)
    assert options["store"] == ("folder/ranks", 4), "all ranks meet in one file"
    assert options["device_id"] == device, "NCCL needs the GPU of this rank, and gloo none"


def test_gloo_has_ten_seconds_to_meet_and_then_as_long_as_patience_allows(joined):
    """A rank that dies while all meet must not be waited for as long as one that is alive in a step."""
    TorchTransport("gloo", "folder/ranks", 4, MINUTE).connect(3)
    assert joined[0][1]["timeout"].total_seconds() < 10 and joined[1:] == [("set_timeout", MINUTE)]


@dataclass(frozen=True)
class Plan:
    """A plan with one tensor."""

    positions: torch.Tensor


def test_a_step_arrives_on_the_device_of_the_rank_that_gets_it():
    step = Step(torch.tensor([1, 2]), Plan(torch.tensor([3, 4])), torch.tensor([1]))
    arrived = receive(Pipe(step), torch.device("meta"))
    devices = {arrived.token_ids.device.type, arrived.meta.positions.device.type, arrived.rows.device.type}
    assert devices == {"meta"}, "all tensors of a step, also those within its plan"
    assert receive(Pipe(step), torch.device("cpu")).meta.positions.tolist() == [3, 4]


@pytest.fixture
def gpus(monkeypatch):
    """Return what lets torch see GPUs, connected by NCCL or not."""

    def see(num_gpus, nccl=True):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return see


@pytest.mark.parametrize(("num_gpus", "nccl"), [(0, True), (1, True), (2, False)])
def test_ranks_on_gpus_that_are_not_there_are_refused(gpus, num_gpus, nccl):
    gpus(num_gpus, nccl)
    with pytest.raises(UserError, match="device 'cpu'"):
        device_of_ranks("cuda", 2)
    assert device_of_ranks("cpu", 2) == "cpu"


def test_with_a_gpu_for_each_rank_they_are_used(gpus):
    gpus(2)
    assert device_of_ranks("auto", 2) == device_of_ranks("cuda", 2) == "cuda"
    with pytest.raises(UserError, match="cuda:1"):
        device_of_ranks("cuda:1", 2)
    place = Place("", None, torch.float32, "auto", 2, None, None, 1, "cuda")
    assert [place.device_of(rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


# ---------------------------------------------------------------- gloo's address


@pytest.mark.skipif(sys.platform == "win32", reason="gloo chooses by itself there")
def test_gloo_listens_on_this_machine_only_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv(ways.INTERFACE, raising=False)
    with ways.on_this_machine():
        assert os.environ[ways.INTERFACE] in ways.LOOPBACK
    assert ways.INTERFACE not in os.environ
    monkeypatch.setenv(ways.INTERFACE, "eth7")
    with ways.on_this_machine():
        assert os.environ[ways.INTERFACE] == "eth7"
