"""langchain-openai: invoke, stream, with_structured_output, bind_tools."""

import sys
from importlib.metadata import version
from typing import Annotated

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


Digit = Annotated[int, Field(ge=0, le=9)]


@tool
def add(a: Digit, b: Digit) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="pocket", base_url=sys.argv[1], api_key="none", temperature=0, max_tokens=150, max_retries=0)
assert "Paris" in model.invoke("What is the capital of France?").content
assert "Paris" in "".join(chunk.content for chunk in model.stream("What is the capital of France?"))
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Town, method=method).invoke("Name a town.")
    assert isinstance(found, Town), (method, found)
calls = model.bind_tools([add], tool_choice="required", parallel_tool_calls=False).invoke("Add 3 and 4.").tool_calls
assert calls[0]["name"] == "add" and set(calls[0]["args"]) == {"a", "b"}, calls
assert model.bind_tools([add]).invoke("What is the capital of France?").content is not None
print("PASS", version("langchain-openai"))
