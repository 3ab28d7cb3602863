"""Lesson 18. A rank reads its own part of a checkpoint: no byte more, the same checks, the same name for the whole."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from mini_engine.assembly.build import start_ranks
from mini_engine.assembly.engine_config import EngineConfig
from mini_engine.assembly.loading import reader_of
from mini_engine.base.errors import UserError
from mini_engine.checkpoint import stored as stored_module
from mini_engine.checkpoint import tensor_files
from mini_engine.checkpoint.stored import Stored
from mini_engine.distributed.tensor_parallel.shard import RankCut
from mini_engine.tiers.opening import identity, identity_of, stored_digest, weights_digest
from tests.l18.ranks import part
from tests.l18.shapes import BIASED, TIED, each_shape, path_of, stored
from tests.support import must_raise

PIECE = 2**11  # several pieces for most tensors of these models


class Watched:
    """A stored tensor that notes the bytes of its slices."""

    def __init__(self, slices, noted):
        self.slices, self.noted = slices, noted
        self.get_shape, self.get_dtype = slices.get_shape, slices.get_dtype

    def __getitem__(self, where):
        found = self.slices[where]
        self.noted.append(found.nbytes)
        return found


@pytest.fixture
def reads(monkeypatch):
    """The bytes of each slice that is read from a checkpoint from now on, in pieces of PIECE bytes."""
    noted, opened = [], tensor_files.safe_open

    class File:
        def __init__(self, file):
            self.file, self.keys = file, file.keys

        def get_slice(self, name):
            return Watched(self.file.get_slice(name), noted)

    @contextmanager
    def safe_open(path, framework):
        with opened(path, framework=framework) as file:
            yield File(file)

    monkeypatch.setattr(tensor_files, "safe_open", safe_open)
    monkeypatch.setattr(stored_module, "PIECE_BYTES", PIECE)
    return noted


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.ci)])
@each_shape
def test_ranks_together_read_a_checkpoint_s_cut_tensors_once(name, num_ranks, reads):
    """Each rank reads its share and, of what is not cut, all: no byte more, in small pieces."""
    checkpoint = stored(name)
    if checkpoint.config.num_key_value_heads % num_ranks:
        pytest.skip("its key heads cannot be shared by so many")
    reads.clear()
    for rank in range(num_ranks):
        model = checkpoint.load(torch.float32, cut=RankCut(rank, num_ranks))
        most = sum(weight.nbytes for weight in model.parameters())
        assert sum(reads) <= most, f"rank {rank} reads more than the {most} bytes that it keeps"
        assert sum(reads) > 0.8 * most, "only biases and padding are zeros that no file holds"
        rows = [shape[1:].numel() * 4 for shape in map(torch.Size, checkpoint.shapes.values())]
        assert max(reads) <= max(PIECE, *rows), "a rank needs memory for its share and one piece"
        reads.clear()


def test_one_process_reads_everything_once(reads):
    checkpoint = stored(BIASED)
    model = checkpoint.load(torch.float32)
    assert sum(reads) == sum(weight.nbytes for weight in model.parameters())
    assert model.config == checkpoint.config


@each_shape
def test_what_is_behind_the_rows_that_are_read_is_zero(name, monkeypatch):
    """Memory that was never written may hold anything; NaN here."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more).fill_(float("nan")))
    for rank in range(2):
        for parameter, weight in part(path_of(name), rank, 2).named_parameters():
            assert weight.isfinite().all(), parameter


# ---------------------------------------------------------------- checks


@pytest.fixture
def damaged(tmp_path):
    """Return what copies a checkpoint, its tensors changed by a function."""

    def copy(name, change):
        directory = shutil.copytree(path_of(name), tmp_path / "damaged")
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return copy


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(("column", "rank"), [(0, 0), (47, 0), (48, 1), (95, 1)])
def test_a_nan_is_found_by_the_rank_that_loads_it(damaged, column, rank):
    directory = damaged(BIASED, lambda tensors: tensors[DOWN][3].__setitem__(column, float("nan")))
    with must_raise(UserError, "a damaged checkpoint is refused, not run") as caught:
        part(directory, rank, 2)
    assert DOWN in str(caught.value)
    part(directory, 1 - rank, 2)


def test_tensors_of_a_rank_s_own_shape_are_refused(damaged):
    """Shapes are those of the whole model: files with one rank's part are another model."""

    def halve(tensors):
        tensors[DOWN] = tensors[DOWN][:, :48].contiguous()

    with must_raise(UserError, "the checkpoint must hold the whole matrix") as caught:
        part(damaged(BIASED, halve), 0, 2)
    assert "[48, 48], not [48, 96]" in str(caught.value)


def test_a_model_that_cannot_be_shared_is_refused_before_anything_is_read(reads):
    checkpoint = stored("two, tied, wide heads")
    reads.clear()
    with must_raise(UserError, "2 key heads over 4 ranks"):
        checkpoint.load(torch.float32, cut=RankCut(0, 4))
    assert not reads


# ---------------------------------------------------------------- what tiers call the whole model


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.ci)])
@each_shape
def test_the_digest_of_a_checkpoint_is_that_of_the_model(name, dtype, reads):
    """A directory that one process has filled is of use to two."""
    model = reader_of(path_of(name)).load(path_of(name), dtype)
    checkpoint = stored(name)
    reads.clear()
    assert stored_digest(checkpoint, dtype) == weights_digest(model)
    rows = [shape[1:].numel() * 4 for shape in map(torch.Size, checkpoint.shapes.values())]
    assert max(reads) <= max(2 * PIECE, *rows), "no tensor is in memory as a whole"
    config = EngineConfig(kv_host_bytes=2**28)
    in_shares = identity(stored_digest(checkpoint, dtype), checkpoint.config, dtype, config)
    assert in_shares == identity_of(model, config)


def test_a_tie_that_the_files_contradict_is_no_tie_for_ranks_either(damaged):
    def untie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    directory = damaged(TIED, untie)
    model, checkpoint = reader_of(directory).load(directory), reader_of(directory).stored(directory)
    assert not model.config.tie_word_embeddings
    assert stored_digest(checkpoint, torch.float32) == weights_digest(model)
    head = part(directory, 1, 2).lm_head.weight
    assert torch.equal(head[:65], model.lm_head.weight[66:]) and not head[65].any()


def test_without_tiers_nothing_is_hashed(monkeypatch):
    monkeypatch.setattr(Stored, "pieces", lambda *_: pytest.fail("a digest of the weights takes seconds"))
    ranks, identity = start_ranks(path_of(BIASED), EngineConfig(tensor_parallel_size=1), torch.float32)
    ranks.close()
    assert identity is None
