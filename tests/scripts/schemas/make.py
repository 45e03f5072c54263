"""Makes the JSON schemas of this folder of two packages, which the tests do without:

    python -m venv FOLDER
    FOLDER/bin/pip install skypilot==0.14.1 kubeflow-trainer-api==2.3.0
    FOLDER/bin/python tests/scripts/schemas/make.py

Both packages are under the Apache License 2.0, and so are the schemas that are made of them.

skypilot-task.json        what `sky` checks a task by: sky/utils/schemas.py. It checks the resources
                          of a task apart, by a schema that stands in place of them here.
jobset.json               JobSet v1alpha2 with the Kubernetes types in it, from the models that the
                          OpenAPI generator made of Kubeflow Trainer's API. Texts are left out, and
                          a key that a type does not have is an error, as for the API server.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LICENCE = "Apache License 2.0, http://www.apache.org/licenses/LICENSE-2.0"
TEXTS = ("description", "title", "default", "examples")


def sky_task() -> dict[str, Any]:
    schemas = import_module("sky.utils.schemas")
    task: dict[str, Any] = schemas.get_task_schema()
    resources = schemas.get_resources_schema()
    resources.pop("$schema", None)
    task["properties"]["resources"] = resources
    return task


def jobset() -> dict[str, Any]:
    models = import_module("kubeflow_trainer_api.models")
    schema: dict[str, Any] = models.JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    return strict(schema)


def strict(schema: Any, *, is_table: bool = False) -> Any:
    """`is_table`: its keys are names of properties, or of types."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # How the generator writes a type that is one of two, such as a number or a text.
    either = schema.get("properties", {}).get("actual_instance")
    if either is not None:
        return {"anyOf": [each for each in either["anyOf"] if each["type"] != "null"]}
    made = {}
    for key, value in schema.items():
        if is_table or key not in TEXTS:
            inner = not is_table and key in ("properties", "$defs")
            made[key] = strict(value, is_table=inner)
    if not is_table and "properties" in schema:
        made["additionalProperties"] = False
    return made


def write(name: str, source: str, schema: dict[str, Any]) -> None:
    noted = {"$comment": f"Made of {source} by make.py; {LICENCE}", **schema}
    (HERE / name).write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write("skypilot-task.json", "skypilot 0.14.1", sky_task())
    write("jobset.json", "kubeflow-trainer-api 2.3.0", jobset())
