"""The server against its own OpenAPI description: every answer to what Schemathesis sends is as described."""

from __future__ import annotations

import numpy as np
import pytest
from support.libraries import need
from support.serving import need_server, serving

import weft

need_server()


def model():
    return weft.serve.model(factory=lambda: lambda x: 2 * x, name="twice", example={"x": np.zeros((1, 2), np.float32)})


def test_it_lists_the_endpoints_of_each_model():
    with serving(model(), token="secret") as served:
        told = served.ask("GET", "/openapi.json", None, {"Authorization": "Bearer secret"})[1]
    assert "/v2/models/twice/infer" in told["paths"]
    assert "/v1/models/twice:predict" in told["paths"]
    assert told["security"] == [{"bearer": []}]


def test_a_model_that_streams():
    def count(x):
        yield x

    with serving(weft.serve.model(count)) as served:
        paths = served.ask("GET", "/openapi.json")[1]["paths"]
    answered = paths["/v2/models/count/generate_stream"]["post"]["responses"]["200"]
    assert list(answered["content"]) == ["text/event-stream"]
    assert "/v2/models/count/infer" not in paths


@pytest.mark.slow
def test_schemathesis():
    need("schemathesis")
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    with serving(model(), limits={"rows": 1000}) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")

        count = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.endswith("/unload"):  # the others need the model
                continue

            @with_cases(operation)
            def check(case):
                # No schema says that the data must have the declared shape.
                case.validate_response(case.call(), excluded_checks=[positive_data_acceptance])

            check()
            count += 1
        assert count > 15
        assert served.ask("GET", "/v2/health/live")[0] == 200


def with_cases(operation):
    """Run a function with cases of an operation."""
    from hypothesis import HealthCheck, given, settings

    def decorate(f):
        return settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))(
            given(case=operation.as_strategy())(f)
        )

    return decorate
