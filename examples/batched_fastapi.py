"""A web service with FastAPI and PyTorch: numbers in, labels out. Requests that come while the model runs share its next run.

`uvicorn examples.batched_fastapi:app` serves it; then

    curl -d '{"features": [5.0, 3.4, 1.5, 0.2]}' -H 'content-type: application/json' http://127.0.0.1:8000/classify

Run as a program, it sends itself a few hundred requests, some of them wrong.
"""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

import weft

LABELS = ["setosa", "versicolor", "virginica"]
CENTRES = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])


def trained():
    """Return a network that has learned the three kinds of flowers, from flowers drawn around their centres."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(150):
        kinds = torch.randint(3, (64,))
        loss = torch.nn.functional.cross_entropy(net(CENTRES[kinds] + 0.2 * torch.randn(64, 4)), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


net = trained()


# One example per call; at most 1,024 wait, and nobody waits longer than 2 s.
@weft.batched(rows=False, max_batch_size=64, max_queue=1024, deadline=2.0)
def classify(features):
    """The model, on whole batches: a label and a score for each row."""
    if not features.isfinite().all():
        raise weft.errors.InvalidArgumentError("features must be finite")
    with torch.inference_mode():
        scores, kinds = net(features).softmax(1).max(1)
    return {"label": [LABELS[kind] for kind in kinds.tolist()], "score": scores.tolist()}


@asynccontextmanager
async def lifespan(app):
    async with classify:  # at the end, requests that wait are answered
        yield


app = FastAPI(lifespan=lifespan)


class Flower(BaseModel):
    features: list[float] = Field(min_length=4, max_length=4)


@app.post("/classify")
async def post(flower: Flower):
    return await classify.aio(torch.tensor(flower.features))


@app.get("/statistics")
async def statistics():
    return classify.statistics(last=60.0).to_dict()


@app.exception_handler(weft.errors.OpError)
async def refused(request, error):
    """Answer with the status of the error: 400 for a bad request, 429 for a full queue, 504 for one that waited too long."""
    return JSONResponse({"error": str(error)}, error.http_status)


async def main():
    """Send 300 requests at once, and check the answers."""
    import httpx

    kinds = [i % 3 for i in range(300)]
    bodies = [b'{"features": %s}' % str(CENTRES[kind].tolist()).encode() for kind in kinds]
    bodies[100] = b'{"features": [1e39, 0, 0, 0]}'  # too large for float32
    bodies[200] = b'{"features": [1, 2]}'
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        headers = {"content-type": "application/json"}
        answers = await asyncio.gather(*(client.post("/classify", content=body, headers=headers) for body in bodies))
        seen = (await client.get("/statistics")).json()
    right = sum(a.status_code == 200 and a.json()["label"] == LABELS[k] for a, k in zip(answers, kinds, strict=True))
    print("status of the answers:", dict(Counter(answer.status_code for answer in answers)), "- right labels:", right)
    print(f"{seen['calls']} calls in {seen['batches']} batches; so many of each size: {seen['sizes']}")
    assert right == 298
    assert seen["failed"] == 1


if __name__ == "__main__":
    asyncio.run(main())
