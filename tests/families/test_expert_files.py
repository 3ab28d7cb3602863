"""Course machinery. Conformance: how files store the matrices of experts, and who reads which of them.

Protects readers from a checkpoint whose experts are swapped, lost or counted twice.
"""

import pytest
import torch

from mini_engine.assembly import build
from mini_engine.assembly.loading import load, reader_of
from mini_engine.base.errors import UserError
from mini_engine.distributed.tensor_parallel.shard import RankCut, share_of, shared_by
from mini_engine.engine.runner import ModelRunner
from mini_engine.experts.experts import Experts
from mini_engine.gpu import graphs
from mini_engine.kv.block_tensor import KvPool
from tests.families.engines import prompts_of
from tests.families.rows import MODELS, parametrized, some
from tests.l0.edits import rewritten, sharded
from tests.support import hugging_face, refused

SPARSE = [model for models in MODELS for model in models if "experts" in model.family]
QWEN3, QWEN3_5 = (
    next(model for model in SPARSE if model.family == f"{name} with experts") for name in ("Qwen3", "Qwen3.5")
)
each = parametrized(some(SPARSE))


# ---------------------------------------------------------------- files


def in_one_tensor(found):
    """Store each layer's experts as transformers has them in memory."""
    apart = {name: tensor for name, tensor in found.items() if ".experts." in name}
    together = {name: tensor for name, tensor in found.items() if name not in apart}
    for prefix in sorted({name.partition(".experts.")[0] for name in apart}):
        count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in apart if name.startswith(prefix))

        def all_of(part, prefix=prefix, count=count):
            return torch.stack([apart[f"{prefix}.experts.{i}.{part}.weight"] for i in range(count)])

        together[f"{prefix}.experts.gate_up_proj"] = torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1)
        together[f"{prefix}.experts.down_proj"] = all_of("down_proj")
    return together


def beside_a_tower(found):
    """Name tensors as a model with a vision tower does, with some of its own and of a prediction head."""
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in found.items()}
    others = ("model.visual.blocks.0.x", "mtp.layers.0.mlp.experts.0.gate_proj.weight", "mtp.norm.weight")
    return inner | {name: torch.ones(2) for name in others}


def nested(config):
    """Return the config of a model with a vision tower."""
    return {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {"depth": 1}, "image_token_id": 5}


def same_weights(one, other):
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@each
def test_experts_in_one_tensor_are_those_in_many(model, tmp_path, capsys):
    together = rewritten(model.path, tmp_path / "together", in_one_tensor)
    capsys.readouterr()  # of transformers, if it has just written the checkpoint
    assert same_weights(load(together, "float32", "cpu"), load(model.path, "float32", "cpu"))
    assert capsys.readouterr().err == ""
    one, many = (reader_of(directory).stored(directory) for directory in (together, model.path))
    for name in many.shapes:  # tiers tell models apart by these
        assert torch.equal(*(torch.cat(list(stored.pieces(name, torch.float32))) for stored in (one, many)))


@parametrized(some([QWEN3, QWEN3_5]))
def test_shards_hold_parts_of_a_layer_s_experts(model, tmp_path):
    shards = sharded(rewritten(model.path, tmp_path / "shards"))
    assert same_weights(load(shards, "float32", "cpu"), load(model.path, "float32", "cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tensors", [beside_a_tower, lambda found: beside_a_tower(in_one_tensor(found))])
def test_a_model_with_a_vision_tower_is_its_text_part(tmp_path, capsys, tensors):
    from transformers import AutoModelForCausalLM

    directory = rewritten(QWEN3_5.path, tmp_path / "both", tensors, nested)
    assert same_weights(load(directory, "float32", "cpu"), load(QWEN3_5.path, "float32", "cpu"))
    assert capsys.readouterr().err == "", "what belongs to the family is no reason for a warning"
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([prompts_of(QWEN3_5)[-1]])
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, hugging_face(QWEN3_5.path)(ids).logits, rtol=1e-4, atol=1e-4)


def without(part):
    return lambda found: {name: tensor for name, tensor in found.items() if part not in name}


def cut(part, rows):
    return lambda found: {name: tensor[:rows] if part in name else tensor for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (without("experts.3.up_proj"), "gate_up_proj"),
        (without("experts.5."), "5 experts 6"),
        (without("mlp.gate."), "mlp.gate.weight"),
        (cut("0.mlp.experts.2.gate_proj", 19), "0.mlp.experts.2.gate_proj.weight [19, 48] [20, 48]"),
        (cut("0.mlp.gate.", 5), "0.mlp.gate.weight [5, 48] [6, 48]"),
        (lambda found: cut("0.mlp.experts.down_proj", 5)(in_one_tensor(found)), "[5, 48, 20] [6, 48, 20]"),
    ],
)
def test_experts_that_are_not_whole_are_refused(tmp_path, tensors, words):
    with refused(UserError, words):
        load(rewritten(QWEN3.path, tmp_path / "broken", tensors), "float32", "cpu")


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    def broken(found):
        found["model.layers.1.mlp.experts.4.up_proj.weight"][3, 5] = float("inf")
        return found

    with refused(UserError, "model.layers.1.mlp.experts.gate_up_proj"):
        load(rewritten(QWEN3.path, tmp_path / "broken", broken), "float32", "cpu")


# ---------------------------------------------------------------- ranks and devices


def test_a_rank_reads_its_own_experts_and_the_whole_router():
    stored = reader_of(QWEN3.path).stored(QWEN3.path)
    whole = dict(stored.load(torch.float32).named_parameters())
    for rank in range(2):
        part = stored.load(torch.float32, cut=RankCut(rank, 2))
        for name, weight in part.named_parameters():
            if ".experts." in name:
                assert torch.equal(weight, whole[name][3 * rank : 3 * rank + 3])
            elif ".mlp.gate." in name:
                assert torch.equal(weight, whole[name])
        assert {module.first for module in part.modules() if isinstance(module, Experts)} == {3 * rank}


def test_experts_that_ranks_cannot_divide_are_refused_in_one_sentence():
    config = load(SPARSE[1].path, "float32", "cpu").config
    with refused(UserError, "num_experts = 4 8"):
        share_of(config, 8, ("num_experts",))
    assert "num_experts" in shared_by(config)


def test_steps_are_launched_one_by_one_on_a_gpu(monkeypatch):
    monkeypatch.setattr(KvPool, "device", torch.device("cuda"))  # nothing runs there
    monkeypatch.setattr(graphs, "CudaCapture", lambda: pytest.fail("counts of rows cannot be captured"))
    monkeypatch.setattr(graphs, "can_record", lambda pool: True)
    engine = build.build_engine(load(QWEN3.path, "float32", "cpu"), backend="reference", num_blocks=8)
    assert isinstance(engine.runner, ModelRunner)
