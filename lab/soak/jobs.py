"""Batch jobs beside everybody else: their rows have the solo answers too, each exactly once and in order."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from lab.soak.answers import Answer, BrokenAnswerError, difference, whole
from lab.soak.client import Client
from lab.soak.templates import TEMPLATES, Template

from inferloop.backends.http import HttpError

ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 0.5


class Jobs:
    """Uploads small files of requests whose answers are known, one batch after the other; cancels some of them."""

    def __init__(self, client: Client, truth: dict[str, Answer], rng: random.Random) -> None:
        self._client, self._ledger, self._truth, self._rng = client, client.ledger, truth, rng

    async def work(self, until_s: float, *, last_within_s: float) -> None:
        """Until then; the last batch may take `last_within_s` longer, for rows stand behind all other requests."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(until_s + last_within_s):
                while loop.time() < until_s:
                    await self._one(until_s)
        except (TimeoutError, HttpError) as error:
            self._ledger.problem(f"batch job: {type(error).__name__}: {error}")

    async def _one(self, until_s: float) -> None:
        rng = self._rng
        path = rng.choice([template.path for template in TEMPLATES])
        rows = [rng.choice([t for t in TEMPLATES if t.path == path]) for _ in range(rng.randint(2, 6))]
        file_id = (await self._upload(path, rows))["id"]
        asked = {"input_file_id": file_id, "endpoint": path, "completion_window": "24h"}
        batch = await self._json("POST", "/v1/batches", json.dumps(asked).encode())
        if rng.random() < 0.25:
            await asyncio.sleep(rng.uniform(0, 3.0))
            await self._json("POST", f"/v1/batches/{batch['id']}/cancel", b"", may_be=(200, 409))
        while batch["status"] not in ENDED:
            await asyncio.sleep(_POLL_S)
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        await self._check(batch, rows)

    async def _check(self, batch: dict[str, Any], rows: list[Template]) -> None:
        counts, status = self._ledger.counts, batch["status"]
        counts[f"batches {status}"] += 1
        if status not in ("completed", "cancelled"):
            self._ledger.problem(f"batch {status}: {batch['errors']}")
            return
        good, bad = [await self._lines(batch[name]) for name in ("output_file_id", "error_file_id")]
        ids = [line["custom_id"] for line in good]
        if ids != sorted(ids, key=int) or sorted([*ids, *(line["custom_id"] for line in bad)], key=int) != [
            str(i) for i in range(len(rows))
        ]:
            self._ledger.problem(f"batch {status}: rows {ids} and {[line['custom_id'] for line in bad]}")
        if status == "completed" and bad:
            self._ledger.problem(f"batch row failed: {str(bad[0])[:300]}")
        for line in good:
            template = rows[int(line["custom_id"])]
            try:
                wrong = difference(whole(json.dumps(line["response"]["body"]).encode()), self._truth[template.name])
            except BrokenAnswerError as error:
                wrong = str(error)
            if wrong is not None:
                self._ledger.problem(f"batch row {template.name}: not the solo answer: {wrong}")
        counts["batch rows equal to their solo run"] += len(good)

    async def _upload(self, path: str, rows: list[Template]) -> dict[str, Any]:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": path, "body": self._client.body(template)}
            for i, template in enumerate(rows)
        ]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        part = b'--edge\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        form = part % (b"purpose", b"batch") + part % (b'file"; filename="rows.jsonl', data) + b"--edge--\r\n"
        kind = ("content-type", "multipart/form-data; boundary=edge")
        return await self._json("POST", "/v1/files", form, kind)

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        response = await self._client.http.request("GET", f"/v1/files/{file_id}/content", timeout_s=60)
        return [json.loads(line) for line in (await response.read()).splitlines()]

    async def _json(
        self, method: str, path: str, body: bytes | None = None, *headers: tuple[str, str], may_be: tuple[int, ...] = ()
    ) -> dict[str, Any]:
        response = await self._client.http.request(method, path, body=body, headers=headers, timeout_s=60)
        found: dict[str, Any] = await response.json()
        if response.status not in (may_be or (200,)):
            self._ledger.problem(f"{method} {path}: status {response.status}: {str(found)[:200]}")
            raise HttpError("protocol", f"status {response.status}")
        return found
