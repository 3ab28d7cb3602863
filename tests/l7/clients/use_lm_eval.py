"""lm-eval: a tiny multiple-choice task and a generation task through `local-completions`."""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

CHOICE = """task: tiny_capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
"""
GENERATE = """task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: " {{{{choices[label]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8, temperature: 0}}
metric_list:
  - metric: exact_match
"""
TOWNS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}
with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data.jsonl"
    names = list(TOWNS.values())
    rows = [{"country": country, "choices": names, "label": names.index(town)} for country, town in TOWNS.items()]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        (Path(folder) / f"{name}.yaml").write_text(text.format(data=data), encoding="utf-8")
    arguments = dict(
        model="pocket",
        base_url=f"{sys.argv[1]}/completions",
        tokenizer=sys.argv[2],
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_retries=1,
        max_length=512,
    )
    found = simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=["tiny_capitals", "tiny_generate"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    accuracy = found["results"]["tiny_capitals"]["acc,none"]
    assert accuracy == 1.0, f"the pocket model knows these capitals, and {accuracy:.0%} were right"
    assert found["results"]["tiny_generate"]["exact_match,none"] == 1.0, found["results"]
print("PASS", version("lm_eval"))
