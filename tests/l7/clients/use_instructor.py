"""instructor: a pydantic model out of a chat, by tools and by JSON schema."""

import sys
from importlib.metadata import version

import instructor
import openai
from pydantic import BaseModel, Field


class Town(BaseModel):
    name: str = Field(max_length=12)
    size: int = Field(ge=0, le=999)


plain = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Name a town."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    asked = dict(model="pocket", messages=ASK, temperature=0, max_retries=0, max_tokens=200)
    if mode is instructor.Mode.JSON:  # asks for any JSON object, which the pocket model fills as it likes
        try:
            client.chat.completions.create(response_model=Town, **asked)
        except Exception as error:
            assert "BadRequest" not in type(error).__name__, error
        continue
    assert isinstance(client.chat.completions.create(response_model=Town, **asked), Town), mode
print("PASS", version("instructor"))
