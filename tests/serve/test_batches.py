"""OpenAI's batches against a real engine, as its package calls them."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def ended(client: openai.OpenAI, batch: Any) -> Any:
    end_s = time.monotonic() + 120
    while (found := client.batches.retrieve(batch.id)).completed_at is None:
        assert time.monotonic() < end_s, found
        time.sleep(0.05)  # polling, bounded
    return found


def test_a_batch_has_the_answers_of_live_requests(demo: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    bodies = [
        {
            "model": demo.model,
            "messages": [{"role": "user", "content": f"What is {n} plus {n}?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        for n in range(12)
    ]
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": str(n), "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    lines.append({**lines[0], "custom_id": "wrong", "body": {**bodies[0], "temperature": 9}})
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    assert batch.status == "validating"
    found = ended(client, batch)
    assert found.status == "completed"
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (13, 12, 1)
    answers = [json.loads(x) for x in client.files.content(found.output_file_id).text.splitlines()]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in answers}
    for n in (0, 7):
        alone = client.chat.completions.create(**bodies[n]).choices[0]
        assert texts[str(n)]["message"]["content"] == alone.message.content
    (error,) = [json.loads(x) for x in client.files.content(found.error_file_id).text.splitlines()]
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [one.id for one in client.batches.list()]
    for file_id in (file.id, found.output_file_id, found.error_file_id):
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.BadRequestError):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"num_replicas": 1}, None, marks=pytest.mark.long),
        ({"num_replicas": 2}, "num_replicas: 2"),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}}, "max_replicas: 3"),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}}, None),
    ],
)
def test_a_replica_knows_whether_it_is_the_only_one(
    own_serve: str, options: dict[str, Any], said: str | None
) -> None:
    from ray import serve

    @serve.deployment(
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.05,
        graceful_shutdown_timeout_s=1,
    )
    class Asked:
        def __call__(self) -> str | None:
            from app.batch_service import several_replicas

            return several_replicas()

    handle = serve.run(Asked.options(**options).bind(), name="asked", route_prefix="/asked")
    answer = handle.remote().result(timeout_s=60)
    serve.delete("asked")
    if said is None:
        assert answer is None
    else:
        assert "deployment Asked has " in answer
        assert said in answer
