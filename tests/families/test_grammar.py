"""Course machinery. Conformance: a grammar decides which tokens may come, whatever else the engine does."""

import pytest

from mini_engine.gpu.graphs import no_graph
from tests.families.engines import (
    TIERS,
    ask,
    check,
    check_nothing_is_lost,
    drain,
    engine_of,
    forget,
    hf_logits,
    limits_of,
    prompts_of,
)
from tests.families.rows import each_kind, nightly

PATHS = {"cached": {}, "guesses": {"speculate": 4}}
OTHER_PATHS = {"chunks": {"limits": limits_of(7, 24)}, "tiers": TIERS, "padded": {"capture": no_graph}}


class Thirds:
    """A grammar and its matcher: behind token t comes one that, divided by 3, leaves the rest that t + 1 leaves."""

    is_over, may_end, error = False, True, None

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def matcher(self) -> "Thirds":
        return Thirds()

    def allows(self, token: int, last: int) -> bool:
        return token % 3 == (last + 1) % 3

    def mask(self) -> bytes:
        return self.mask_after([])

    def push(self, token_id: int) -> None:
        assert self.allows(token_id, self.last), f"token {token_id} behind {self.last}"
        self.last = token_id

    def num_valid(self, drafts) -> int:
        pairs = enumerate(zip([self.last, *drafts], drafts, strict=False))
        return next((at for at, (last, draft) in pairs if not self.allows(draft, last)), len(drafts))

    def mask_after(self, drafts) -> bytes:
        last = drafts[-1] if drafts else self.last
        bits = sum(1 << token for token in range(160) if self.allows(token, last))
        return bits.to_bytes(20, "little")


def expected(model, requests):
    """Return for each token of the answers Hugging Face's best one that the grammar allows there."""
    grammar, found = Thirds(), []
    texts = [[*request.prompt_ids, *request.output_ids] for request in requests]
    for request, logits in zip(requests, hf_logits(model, texts), strict=True):
        said = request.output_ids
        for last, row in zip([0, *said], logits[len(request.prompt_ids) - 1 : -1], strict=False):
            allowed = [token for token in range(len(row)) if grammar.allows(token, last)]
            found.append(allowed[int(row[allowed].argmax())])
    return found


@each_kind
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in PATHS.items()),
        *(pytest.param(options, id=name, marks=nightly) for name, options in OTHER_PATHS.items()),
    ],
)
def test_only_what_the_grammar_allows_comes(model, options):
    engine, prompts = engine_of(model, **options), prompts_of(model)
    for when in ("cold", "warm"):
        ruled = ask(engine, prompts[::2], name=f"{when}, ruled", grammar=Thirds())
        free = ask(engine, prompts[1::2], name=f"{when}, free")
        drain(engine)
        check(model, free, f"{when}, beside answers with a grammar")
        assert [token for request in ruled for token in request.output_ids] == expected(model, ruled), when
        if options is TIERS:
            forget(engine)
    assert any(request.num_cached_tokens for request in ruled)
    check_nothing_is_lost(engine)
