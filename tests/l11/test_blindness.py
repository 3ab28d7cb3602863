"""Lesson 11. The tests are not blind: a wrong state changes tokens. Without these, parity would prove nothing.

A delta net with transformers' own initialization forgets within a few tokens. These models have Mamba's time steps, and
every sabotage below must change answers.
"""

import pytest
import torch

from tests.shared.hybrids import greedy, hybrid
from tests.support import ask, drain, some_ids

pytestmark = [pytest.mark.reference, pytest.mark.ci]  # about the tests, not about a task

NEW = 20
each_family = pytest.mark.parametrize(
    "family",
    ["every fourth attends", pytest.param("one delta net, first", marks=pytest.mark.nightly), "one delta net, last"],
)


def zero(states, slots):
    states.recurrent_state[0, slots] = 0


def shift(states, slots):
    states.conv_state[0, slots] = torch.roll(states.conv_state[0, slots], 1, dims=-1)


def swap(states, slots):
    states.recurrent_state[:, slots] = states.recurrent_state[:, slots[1:] + slots[:1]]


@each_family
@pytest.mark.parametrize(
    ("sabotage", "fewest", "most"),
    [(None, 0, 0), (zero, 2, 3), (shift, 2, 3), (swap, 3, 3)],
    ids=["none", "one layer's state is zero", "a conv state is shifted by one", "another request's state"],
)
def test_a_wrong_state_changes_answers(family, sabotage, fewest, most):
    engine, at = hybrid(family), 4
    requests = ask(engine, [some_ids(length, 160, seed=length) for length in (40, 57, 71)], NEW)
    memory = engine.scheduler.manager.coordinator.memory
    while engine.has_unfinished:
        engine.step()
        if sabotage and len(requests[0].output_ids) == at:
            sabotage(memory.states, [memory.slots_of(request.id)[0] for request in requests])
    wants = [greedy(family, tuple(request.prompt_ids), NEW) for request in requests]
    changed = sum(request.output_ids != want for request, want in zip(requests, wants, strict=True))
    assert fewest <= changed <= most, "the models forget too quickly: the parity tests could not see a wrong state"


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
    prompts = [ids[:33] + some_ids(9, 160, seed=seed) for seed in range(4)]
    changed = 0
    for number, prompt in enumerate(prompts):
        [request] = ask(engine, [prompt], NEW, f"late {number} ")
        drain(engine)
        changed += request.output_ids != greedy(family, tuple(prompt), NEW)
    assert changed >= 3, "the parity tests could not see a checkpoint of the wrong place"
