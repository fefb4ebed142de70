"""`/openapi.json` describes what is served."""

from __future__ import annotations

from typing import Any

from app.api.http.options import ApiOptions, KeyLimits
from tests.app.api.conftest import MODEL, Server, StartServer


async def test_document_describes_what_is_served(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"k": KeyLimits()}))
    headers = {"authorization": "Bearer k"}
    document = (await server.http.get("/openapi.json", headers=headers)).json()
    assert document["security"] == [{"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = await server.http.request(method, path, headers=headers)
            assert str(answer.status_code) in operation["responses"], path
            for status in ("401", "403", "404", "405", "429", "431", "500"):
                assert status in operation["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["model", "messages"]
    assert chat["properties"]["model"]["enum"] == [MODEL]
    assert chat["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
    }


async def test_a_call_of_an_answer_has_the_members_that_are_sent(server: Server) -> None:
    schemas = (await server.http.get("/openapi.json")).json()["components"]["schemas"]
    message = schemas["AnswerMessage"]["properties"]["tool_calls"]["anyOf"][0]
    found = [schemas[one["$ref"].rsplit("/", 1)[1]] for one in message["items"]["anyOf"]]
    members = [("function", "arguments"), ("custom", "input")]
    for call, (what, given) in zip(found, members, strict=True):
        assert set(call["properties"]) == {"id", "type", what}
        called = schemas[call["properties"][what]["$ref"].rsplit("/", 1)[1]]
        assert set(called["properties"]) == {"name", given}


async def test_document_has_no_dangling_reference(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        if isinstance(node, list):
            return set().union(*(references(value) for value in node))
        return set()

    found = references(document)
    assert found
    assert {reference.rsplit("/", 1)[1] for reference in found} <= set(schemas)
