"""Lesson 7. /openapi.json is true: bodies, answers, refusals, media types. Schemathesis looks for what is not."""

import gc
import subprocess
import sys

import pytest

from mini_engine.cli import serve
from mini_engine.server.answer_models import Chat, Completion, Error, ModelList, ResponseAnswer
from mini_engine.server.background import DrainingServer
from mini_engine.server.description import REFUSALS
from mini_engine.server.hardening import ending
from tests.l7.forms import ADD
from tests.shared.service import Service

pytestmark = pytest.mark.reference  # no task is about this

SERVER = {"num_blocks": 97, "api_keys": ("secret",)}
KEY = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "return_token_ids": True}
RUNS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
SEED, EXAMPLES = 7, 25
PATIENCE = 600  # seconds; a busy machine may need more than Schemathesis' ten for an answer that fills the context
RUN = "from schemathesis.cli import schemathesis; schemathesis()"
# what fits the schema can still be too long for the model, or name a function that is not there: no schema says so
EXCLUDED = "positive_data_acceptance"


@pytest.fixture(scope="module")
def described(server: Service):
    return server.get("/openapi.json").body


def test_the_command_builds_the_description_before_it_serves(options, monkeypatch):
    """It takes a third of a second, in which the event loop would answer no one."""
    served = []
    monkeypatch.setattr(DrainingServer, "run", lambda self, sockets: served.append(self.app.routes.openapi_schema))
    monkeypatch.setattr(ending, "end_in_time", lambda worker, seconds: worker.close())
    assert serve.run(options("--port", "0", "--num-blocks", "8")) == 0
    gc.unfreeze()
    assert served[0] and "/v1/chat/completions" in served[0]["paths"]


@pytest.mark.parametrize("path", RUNS)
def test_every_route_says_what_it_takes_and_gives(described, path):
    route = described["paths"][path]["post"]
    assert set(route["responses"]) == {"200", *map(str, REFUSALS)} and len(REFUSALS) > 8
    assert set(route["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "Retry-After" in route["responses"]["429"]["headers"], "a client must know when to come back"
    refusals = [route["responses"][str(status)]["content"]["application/json"]["schema"] for status in REFUSALS]
    (name,) = {schema["$ref"].rsplit("/", 1)[1] for schema in refusals}
    assert set(described["components"]["schemas"][name]["properties"]) == {"error"}
    assert route["security"] == [{"ApiKey": []}]


def test_open_routes_and_foreign_errors(described):
    assert described["paths"]["/health"]["get"]["security"] == []
    assert "HTTPValidationError" not in described["components"]["schemas"], "FastAPI's own errors are not given here"
    assert described["components"]["schemas"]["CompletionRequest"]["additionalProperties"] is False


def test_what_may_have_one_value_alone_says_so_and_null_is_allowed(described):
    fields = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["best_of"]["anyOf"][0]["const"] == 1 and {"type": "null"} in fields["best_of"]["anyOf"]
    assert fields["temperature"]["anyOf"][0]["maximum"] == 100


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        (RUNS[0], Completion, {"prompt": ["Hi", "Ho"], "max_tokens": 2, "n": 2}),
        (RUNS[0], Completion, {"prompt": "Hi", "max_tokens": 0, "echo": True, "logprobs": 2}),
        (RUNS[1], Chat, CHAT | {"logprobs": True, "top_logprobs": 2}),
        (RUNS[1], Chat, CHAT | {"tools": [ADD], "tool_choice": "required", "max_tokens": 60}),
        (RUNS[2], ResponseAnswer, {"input": "Hi", "max_output_tokens": 2}),
        (RUNS[2], Error, {"input": "Hi", "tools": [ADD]}),
        (RUNS[1], Error, CHAT | {"model": "gpt-9"}),
    ],
)
def test_answers_have_the_shape_that_is_described(server: Service, path, model, body):
    found = server.post(path, body, **KEY)
    assert (found.status == 200) == (model is not Error), found
    model.model_validate(found.body)


def test_models_have_the_shape_that_is_described(server: Service):
    ModelList.model_validate(server.get("/v1/models", **KEY).body)
    Error.model_validate(server.get("/v1/models").body)


@pytest.mark.nightly
def test_schemathesis_finds_nothing(server: Service, described, tmp_path):
    pytest.importorskip("schemathesis", reason="needs schemathesis, of the group 'test'")
    before = server.metrics.steps._value.get()
    command = [sys.executable, "-c", RUN, "run", f"{server.url}/openapi.json", "--no-color", "--continue-on-failure"]
    command += ["--header", f"Authorization: {KEY['Authorization']}", "--exclude-checks", EXCLUDED]
    command += f"--request-timeout {PATIENCE} --seed {SEED} --max-examples {EXAMPLES}".split()
    command += ["--phases", "examples,coverage,fuzzing"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path, check=False)
    assert done.returncode == 0, "\n".join(line[:300] for line in done.stdout.splitlines()[-150:]) + done.stderr[-1000:]
    count = sum(len(routes) for routes in described["paths"].values())
    assert f"Tested: {count}" in done.stdout, done.stdout[-1000:]
    assert server.metrics.steps._value.get() > before, "it was to get through to the engine"
    server.wait_until_idle()
