"""Lesson 11. The tests are not blind: a wrong state changes tokens. Without these, parity would prove nothing.

A delta net with transformers' own initialization forgets within a few tokens. These models have Mamba's time steps, and
every sabotage below must change answers.
"""

import pytest
import torch

from tests.l11.models import ask, drain, greedy, hybrid
from tests.support import some_ids

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # about the tests, not about a task

NEW = 20
each_family = pytest.mark.parametrize(
    "family",
    ["every fourth attends", pytest.param("one delta net, first", marks=pytest.mark.nightly), "one delta net, last"],
)


def prompts():
    return [tuple(some_ids(length, 160, seed=length)) for length in (40, 57, 71)]


def num_changed(family, sabotage, at=4):
    """Run all prompts; call `sabotage(states, slots)` once, after `at` new tokens. Return how many answers change."""
    engine = hybrid(family)
    requests = ask(engine, prompts(), NEW)
    memory = engine.scheduler.manager.coordinator.memory
    while engine.has_unfinished:
        engine.step()
        if len(requests[0].output_ids) == at:
            sabotage(memory.states, [memory.slots_of(request.id)[0] for request in requests])
    wants = [greedy(family, tuple(request.prompt_ids), NEW) for request in requests]
    return sum(request.output_ids != want for request, want in zip(requests, wants, strict=True))


@each_family
def test_without_sabotage_no_answer_changes(family):
    assert num_changed(family, lambda states, slots: None) == 0


@each_family
def test_zeroing_one_layer_s_state_changes_answers(family):
    def zero(states, slots):
        states.recurrent_state[0, slots] = 0

    assert num_changed(family, zero) >= 2, "the models forget too quickly: the parity tests could not see a lost state"


@each_family
def test_a_conv_state_shifted_by_one_changes_answers(family):
    def shift(states, slots):
        states.conv_state[0, slots] = torch.roll(states.conv_state[0, slots], 1, dims=-1)

    assert num_changed(family, shift) >= 2, "the parity tests could not see a wrong convolution state"


@each_family
def test_another_request_s_state_changes_answers(family):
    def swap(states, slots):
        states.recurrent_state[:, slots] = states.recurrent_state[:, slots[1:] + slots[:1]]

    assert num_changed(family, swap) == 3, "the parity tests could not see a stale slot"


@each_family
def test_a_checkpoint_one_block_too_late_changes_answers(family):
    """The state of 40 tokens where that of 32 belongs."""
    engine, ids = hybrid(family), some_ids(41, 160)
    ask(engine, [ids], 1)
    drain(engine)
    memory = engine.scheduler.manager.coordinator.memory
    kept = memory.checkpoints.slots
    slots = {sum(len(part.blocks) for part in node.path()) * 8: slot for node, slot in kept.items()}
    memory.states.copy_states(slots[40], slots[32])
    changed = 0
    for seed in range(4):
        prompt = tuple(ids[:33] + some_ids(9, 160, seed=seed))
        [request] = ask(engine, [prompt], NEW, f"late {seed} ")
        drain(engine)
        changed += request.output_ids != greedy(family, prompt, NEW)
    assert changed >= 3, "the parity tests could not see a checkpoint of the wrong place"
