"""A server imports what requests need when it starts: during an import by the first one, all others would wait."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
PROGRAM = """
import asyncio, io, sys
sys.path.insert(0, TESTS)
import httpx, pyarrow as pa
from persia.serve.http.app import create_app
from persia.serve.http.codecs.codec import ARROW
from support.served import FakePredictor

async def main():
    app = create_app(FakePredictor())
    async with app.router.lifespan_context(app):
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.001)
        tags = pa.array(["a"]).dictionary_encode()
        table = pa.table({"user": [1], "tags": tags, "code": [3], "price": [0.5], "age": [2]})
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
        before = {*sys.modules}
        answer = await client.post("/predict", content=sink.getvalue(), headers={"Content-Type": ARROW})
        assert answer.status_code == 200, answer.text
        assert pa.ipc.open_stream(answer.content).read_all().num_rows == 1
        print(*sorted({*sys.modules} - before))

asyncio.run(main())
"""


def test_the_first_arrow_request_imports_nothing(forks, tmp_path):
    pytest.importorskip("fastapi", reason='fastapi is not installed: pip install "persia-recsys[serve]"')
    done = forks.run(["-c", f"TESTS = {str(TESTS)!r}\n{PROGRAM}"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == []
