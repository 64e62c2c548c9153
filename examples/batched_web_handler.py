"""A web handler whose requests share the runs of a model: ASGI, with nothing but the standard library and NumPy.

Any ASGI server runs `app` (`uvicorn examples.batched_web_handler:app`); here a few hundred requests are sent to it directly. Each
is one awaited call. The model runs in a thread, on whatever has come meanwhile; errors of weft carry the HTTP status to
answer with: a request that is wrong, one too many, one too late. A wrong one costs the others of its batch nothing.
"""

import asyncio
import json
from collections import Counter

import numpy as np

import weft

WEIGHTS = np.random.default_rng(0).standard_normal((4, 3))


@weft.batched(rows=False, max_batch_size=32, max_queue=1024, deadline=5.0)
def classify(features):
    """The model, on whole batches: the class of each row."""
    if np.isnan(features).any():
        raise weft.errors.InvalidArgumentError("features must be numbers")
    return np.argmax(features @ WEIGHTS, axis=1)


async def app(scope, receive, send):
    """Answer a request with `{"class": ..., "batch": ...}`."""
    try:
        body = json.loads((await receive())["body"])
        features = np.array(body["features"], np.float64)
        found, receipt = await classify.aio.call(features, receipt=True)
        status, answer = 200, {"class": int(found), "batch": receipt.size}
    except weft.errors.OpError as error:
        status, answer = error.http_status, {"error": str(error)}
    except (ValueError, KeyError, TypeError) as error:
        status, answer = 400, {"error": f"the body must be like {{'features': [1, 2, 3, 4]}}: {error}"}
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


async def post(body):
    """What a server does for one request: the status and the answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/"}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def main():
    """Send 300 requests at once, three of them wrong in three ways; then one alone."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal(4).tolist() for _ in range(297)]
    bodies = [json.dumps({"features": row}) for row in [*rows[:150], [float("nan")] * 4, *rows[150:]]]
    answers = await asyncio.gather(*(post(body) for body in ["no JSON", *bodies, '{"features": [1, 2]}']))
    lone = await post(bodies[0])

    good = [answer["class"] for status, answer in answers if status == 200]
    assert good == np.argmax(np.array(rows) @ WEIGHTS, axis=1).tolist()
    told = classify.statistics()
    print("status of the answers:", dict(Counter(status for status, _ in answers)))
    print(f"{told.calls} calls in {told.batches} batches; so many of each size:", told.sizes)
    print(
        f"waited for the model: half of them {1e3 * told.waits.quantile(0.5):.1f} ms, the longest {1e3 * told.waits.longest:.1f} ms"
    )
    print(f"the one alone: batch of {lone[1]['batch']}, answered at once")


asyncio.run(main())
