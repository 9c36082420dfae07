"""The page of a running cluster: what is served to whom, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from urllib.parse import quote, urlsplit

import pytest
from typer.testing import CliRunner

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import persia
from persia.cli.app import app
from persia.dashboard.server import serve_page
from persia.dashboard.view import asking
from persia.errors import ConfigError
from persia.membership.observing import ask_members
from support.cluster_samples import eventually, make_trainer, reader
from support.observed_cluster import Trained, observed_cluster

pytestmark = pytest.mark.processes

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture
def page():
    trained = Trained()
    with (
        observed_cluster(nn_worker=trained.nn_worker, embedding_ps=trained.embedding_ps) as (address, coordinator),
        serve_page(lambda: ask_members(address, 5.0), 0, 0.1) as url,
    ):
        eventually(lambda: len(views(url)) > 2, "some views")
        yield url, coordinator


def views(url: str, query: str = "") -> list[dict]:
    with urllib.request.urlopen(f"{url}views{query}", timeout=10) as answer:
        found: list[dict] = json.load(answer)
    return found


def test_it_listens_on_loopback_only_and_serves_two_things(page):
    url, _ = page
    assert urlsplit(url).hostname == "127.0.0.1"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text, headers = answer.read().decode(), answer.headers
    assert "prefers-color-scheme: dark" in text  # The style sheet is inside.
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # Nothing is loaded from elsewhere.
    assert "innerHTML" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("x", "../pyproject.toml", "style.css"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url + path, timeout=10)


def test_names_of_other_sites_do_not_lead_here(page):
    """DNS rebinding: a site resolves to 127.0.0.1, so that its scripts may read what is served there."""
    url, _ = page
    for host, status in (("evil.example:80", 403), ("", 403), ("localhost:1", 200), (urlsplit(url).netloc, 200)):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/views", headers={"Host": host})
        assert connection.getresponse().status == status, host
        connection.close()


def test_views_come_once(page):
    url, _ = page
    first = views(url)
    assert {p["name"] for p in first[-1]["processes"]} == {"coordinator 0", "NN worker 0", "embedding PS 0"}
    eventually(lambda: bool(views(url, f"?since={first[-1]['time']!r}")), "another view")
    assert all(v["time"] > first[-1]["time"] for v in views(url, f"?since={first[-1]['time']!r}"))
    for query in ("?since=x", "?since=nan", "?since=-inf", "?since="):
        assert len(views(url, query)) >= len(first)


def test_a_taken_port_is_passed_over():
    def ask():
        return []

    with serve_page(ask, 0) as first:
        taken = urlsplit(first).port
        with serve_page(ask, taken) as second:
            assert taken < urlsplit(second).port < taken + 256
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(first, timeout=1)


def test_a_cluster_in_this_process_has_a_page():
    cluster = persia.cluster.Embedded(1)
    trainer = make_trainer(cluster)
    with serve_page(asking(cluster), 0, 0.05) as url:
        trainer.fit(reader(20))

        def shown() -> list[tuple]:
            """Of the last view, which may be of an answer from before the last step."""
            last = views(url)[-1:]
            return [(p["name"], p["step"], p["unit"]) for view in last for p in view["processes"]]

        eventually(lambda: shown() == [("embedded 0", 20.0, "samples/s")], "the last step is shown")
    with pytest.raises(ConfigError, match="no health"):
        asking(object())


def test_the_command_prints_the_address(tmp_path, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text('[data]\nkind = "synthetic"\nbatch_size = 64\noptions = { rows = 640 }\n[observe]\nui_port = 0\n')
    seen: list[list[dict]] = []
    fit = persia.Trainer.fit

    def watched(self, *args, **kwargs):
        (url,) = urls
        seen.append(views(url))
        return fit(self, *args, **kwargs)

    urls: list[str] = []
    said = "persia.cli.train.say"
    monkeypatch.setattr(said, lambda text, **_: urls.extend(w for w in text.split() if w.startswith("http")))
    monkeypatch.setattr(persia.Trainer, "fit", watched)
    done = CliRunner().invoke(app, ["train", str(config), "--ui", "--set", "trainer.progress=false"])
    assert done.exit_code == 0, done.exception
    assert len(seen) == 1
    with pytest.raises(ConfigError, match=r"observe\.ui_port"):
        CliRunner().invoke(app, ["train", str(config), "--set", "observe.ui_port=-1"], catch_exceptions=False)


# --- in a browser -----------------------------------------------------------------------------------------------


def dump(url: str, hash_: str = "") -> str:
    """The document after some seconds, as the browser has it."""
    if BROWSER is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, url + hash_], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.partition("</script>")[0].partition("<script>")[0]


@pytest.mark.browser
def test_a_browser_draws_charts_and_processes(page):
    url, _ = page
    document = dump(url)
    assert document.count("<figure>") == 8
    assert document.count("<polyline") >= 8
    for shown in ("3 processes", "NN worker 0", "samples/s", "0.7500", "0.2500", "1.50", "ids/s", "90 %"):
        assert shown in document, shown
    assert "No answer" not in document


@pytest.mark.browser
def test_a_chosen_process_has_the_charts_for_itself(page):
    url, _ = page
    document = dump(url, "#" + quote("embedding PS 0"))
    assert "lines of embedding PS 0" in document
    assert document.count('class="chosen"') == 1
    assert document.count("No data yet.") == 7  # It has a rate.
    assert "embedding PS 0: " in document


@pytest.mark.browser
def test_hostile_text_stays_text(page):
    url, coordinator = page
    coordinator.depart("embedding_ps", 0, 1, HOSTILE)
    eventually(lambda: any(p["problem"] for p in views(url)[-1]["processes"]), "its death is seen")
    document = dump(url)
    assert "&lt;img src=x" in document
    assert "<img" not in document
    assert "<title>persia</title>" in document
