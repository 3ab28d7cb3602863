"""Course machinery. The sizes of a mixture of experts, as config.json has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import core_schema as s

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config_schema import WIDTH, check, validator

COUNT = s.int_schema(ge=1, le=2**16)
SIZES = validator({}, dict(num_experts=COUNT, num_experts_per_tok=COUNT, moe_intermediate_size=WIDTH))


@dataclass(frozen=True)
class ExpertSizes:
    """The part of a configuration that is about experts. Fields have the names they have in config.json.

    num_experts: the experts of this process in each layer; a rank has a share of them.
    routed_experts: those of all processes, between which a router chooses.
    """

    num_experts: int = 1
    routed_experts: int = 1
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 1


def read_experts(raw: Mapping[str, Any], path: Path, **defaults: int) -> dict[str, Any]:
    """Return the validated settings, by the names of the fields of ExpertSizes.

    Args:
        defaults: of settings that the file lacks.

    Raises:
        UserError: a setting is impossible; one sentence names it.
    """
    given = {"num_experts": raw.get("num_local_experts"), **raw}  # the name that transformers writes for some families
    sizes = defaults | check(SIZES, given, path)
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise UserError(
            f"{path} has num_experts_per_tok = {sizes['num_experts_per_tok']}, but num_experts = {sizes['num_experts']}"
        )
    return sizes | {"routed_experts": sizes["num_experts"]}
